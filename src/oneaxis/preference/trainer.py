"""TRL's trainers in a folder that outlives a kill: a training, by SFT or DPO, from a checkpoint to float32 weights.

The folder of a training holds, in the order in which they come to be:

    pairs/                    the pairs in TRL's format; TRL caches tokens and the reference's log-probabilities there
    trainer/checkpoint-N/     TRL's state after step N: weights, optimizer, schedule, random states; our `rows.json`
    result/                   the trained weights, `log.parquet` and `watched.json`; the training is done

Each is complete or counts as absent. A training that was killed goes on from the newest checkpoint that is complete,
and ends with the same bytes as if nothing had happened: saving draws no random numbers, and happens at logging steps
only, where TRL's running means are empty. Whether a folder is of the present inputs is its owner's to know.

With `train.processes` above 1 the training runs in as many processes, started by `accelerate launch`, each on a device
of its own (gloo and an equal share of the cores on a CPU). `train.batch_size` is then shared out: the effective batch
stays as it is. Every process watches the same weights and so comes to the same decisions; the first one writes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import polars as pl
import torch
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import DPOTrainer, SFTTrainer

from oneaxis import guard
from oneaxis.artifacts import read_json, write_json
from oneaxis.config.schema import Lora, TrainDpo
from oneaxis.errors import RunError, UserError
from oneaxis.preference.dpo_config import dpo_config, one_line, sft_config
from oneaxis.preference.forward import device, load, response_logps
from oneaxis.preference.pairs import Sequence
from oneaxis.preference.watch import ESCAPES, OnLog, SftWatch, Watch, Watched

SAVING_SHARE = 20
"""Saving takes at most one part in so many of the time, unless `train.checkpoint_s` is 0."""

GAP_NATS = 0.05
"""A log-ratio before the first step that is larger is no rounding: the largest seen is below 0.001."""


@dataclass(frozen=True)
class Training:
    """What is trained, and where it begins."""

    method: Literal["sft", "dpo"]
    start: Path
    """The checkpoint folder that is trained, with its tokenizer."""
    reference: Path
    """The checkpoint folder of DPO's reference; the same folder as `start` for the model that DPO begins with."""
    config: TrainDpo
    seed: int

    def write(self, path: Path) -> None:
        """As JSON, for the processes of a launch."""
        values = {"method": self.method, "start": str(self.start), "reference": str(self.reference), "seed": self.seed}
        write_json(path, {**values, "config": self.config.model_dump(mode="json")})

    @classmethod
    def read(cls, path: Path) -> "Training":
        """What `write` wrote."""
        found = read_json(path)
        config = TrainDpo.model_validate(found["config"])
        return cls(found["method"], Path(found["start"]), Path(found["reference"]), config, found["seed"])


def train(
    training: Training,
    pairs: pl.DataFrame,
    watched: Watched,
    folder: Path,
    on_log: OnLog | None,
) -> Path:
    """Train in `folder`, going on from what is there; return `folder/result`.

    Args:
        pairs: what is trained on, each within `train.max_length`.
        watched: what DPO's `Watch` asks of the weights.
        on_log: called at each logging step of DPO with (metrics, step).

    Raises:
        UserError: TRL or peft refuses a setting. RunError: the loss or the weights are not finite, or a process died.
    """
    if not (folder / "result").exists():
        folder.mkdir(parents=True, exist_ok=True)
        trl_dataset(pairs, folder / "pairs")
        if training.config.processes == 1:
            fit(training, watched, folder, on_log)
        else:
            watched.write(folder / "watched.json")
            launch(training, folder, on_log)
        shutil.rmtree(folder / "trainer", ignore_errors=True)
    return folder / "result"


def went_on_from(folder: Path) -> int:
    """The step that a training in `folder` would go on from; 0: from the start."""
    newest = Checkpoints(folder / "trainer", [], None).newest()
    return int(newest.name.rpartition("-")[2]) if newest else 0


# --- what is trained on ----------------------------------------------------------------------------------------------


def conversational(pairs: pl.DataFrame) -> bool:
    """Whether the pairs, all of one kind, are messages and no text."""
    return bool(pairs["conversational"][0])


def trl_dataset(pairs: pl.DataFrame, folder: Path) -> datasets.Dataset:
    """Pairs in TRL's preference format: text, or messages. On disk under `folder`, where TRL then caches."""
    datasets.disable_progress_bars()
    if not folder.exists():
        read = json.loads if conversational(pairs) else str
        rows = [
            {key: read(row[key]) for key in ("prompt", "chosen", "rejected")} for row in pairs.iter_rows(named=True)
        ]
        unfinished = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        datasets.Dataset.from_list(rows).save_to_disk(unfinished)
        unfinished.rename(folder)
    return datasets.load_from_disk(folder)


# --- one process -----------------------------------------------------------------------------------------------------


def fit(training: Training, watched: Watched, folder: Path, on_log: OnLog | None) -> None:
    """Train in this process, which may be one of several, and write `result/`. As `train`, whose work this is."""
    config = training.config
    model, tokenizer = load(training.start)
    watch: SftWatch | Watch = SftWatch() if training.method == "sft" else Watch(watched, config, on_log)
    probed = ESCAPES if training.method == "dpo" else None
    checkpoints = Checkpoints(folder / "trainer", watch.rows, config.checkpoint_s, probed=probed)
    newest = checkpoints.newest()
    if newest:
        watch.rows += read_json(newest / "rows.json")
    try:
        trainer = make_trainer(training, model, tokenizer, folder, [watch, checkpoints])
        trainer.remove_callback(PrinterCallback)
        # Also in a run that goes on: its trainer was made anew, from where the training began.
        gap = reference_gap(trainer) if training.method == "dpo" else None
        if gap and trainer.is_world_process_zero() and (said := gap_warning(gap)):
            print(f"oneaxis: train_dpo: warning: {said}", file=sys.stderr, flush=True)
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
        check_finite(trainer.model, trainer.state.global_step)
    except RunError as error:
        kept = checkpoints.newest()
        raise RunError(f"{error}; {f'the last good checkpoint is {kept}' if kept else 'there is no checkpoint yet'}"
                       ) from error  # fmt: skip
    except (ValueError, NotImplementedError, ImportError) as error:
        # A loss that needs another value, targets that the model does not have: TRL and peft say so only here.
        asked = {"train.dpo_args": config.dpo_args, "train.lora.targets": config.lora.r and config.lora.targets}
        given = "; ".join(f"{key}={value}" for key, value in asked.items() if value)
        if not given:
            raise
        raise UserError(f"params.yaml: {given}: TRL says: {one_line(error)}") from error
    finally:
        watch.bar.close()
    if trainer.is_world_process_zero():
        trained = trainer.model.merge_and_unload() if config.lora.r else trainer.model
        unfinished = folder / "result.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        save_beside_files_of(training.start, trained, unfinished)
        watch.table().write_parquet(unfinished / "log.parquet")
        if isinstance(watch, Watch):
            write_json(unfinished / "watched.json", watch.report())
        if gap:
            write_json(unfinished / "reference.json", gap)
        unfinished.rename(folder / "result")
    trainer.accelerator.wait_for_everyone()


def make_trainer(training: Training, model: Any, tokenizer: Any, folder: Path, callbacks: list[TrainerCallback]) -> Any:
    """TRL's trainer of `model` on the pairs in `folder`; DPO's has scored them with the reference by then."""
    cpu = device().type == "cpu"
    pairs = datasets.load_from_disk(folder / "pairs")
    shared = {"model": model, "processing_class": tokenizer, "callbacks": callbacks,
              "peft_config": lora_config(training.config.lora)}  # fmt: skip
    if training.method == "sft":
        arguments = sft_config(training.config, seed=training.seed, output_dir=folder / "trainer", cpu=cpu)
        chosen = pairs.remove_columns("rejected").rename_column("chosen", "completion")
        return SFTTrainer(**shared, args=arguments, train_dataset=chosen)
    arguments = dpo_config(training.config, seed=training.seed, output_dir=folder / "trainer", cpu=cpu)
    reference = None if training.reference == training.start else load(training.reference)[0]
    trainer = DPOTrainer(**shared, args=arguments, train_dataset=pairs, ref_model=reference)
    # Its log-probabilities are columns of the data set by now.
    trainer.ref_model = None
    return trainer


def lora_config(lora: Lora) -> LoraConfig | None:
    """peft's configuration; None for full fine-tuning."""
    if not lora.r:
        return None
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")


def check_finite(model: Any, step: int) -> None:
    """The loss is computed before a step changes the weights, so a finite loss does not vouch for them.

    Raises:
        RunError: naming the step.
    """
    if not all(bool(weights.isfinite().all()) for weights in model.parameters() if weights.requires_grad):
        raise RunError(f"the weights are not finite after step {step}; try a smaller learning rate")


def save_beside_files_of(source: Path, model: Any, folder: Path) -> None:
    """The model's safetensors; every other file is that of `source` (TRL changes configs of its own accord)."""
    model.save_pretrained(folder)
    for path in folder.iterdir():
        if ".safetensors" not in path.name:
            path.unlink()
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json", ".parquet")):
            shutil.copyfile(path, folder / path.name)


class Checkpoints(TrainerCallback):
    """Saves TRL's state at logging steps, `every_s` seconds after the last time, and keeps the newest.

    Each is good: here the weights are found finite, and with `probed`, a column of the log, it is saved only at steps
    at which `Watch` has found what these weights say finite, too. Where the disk has no room for one, none is saved.
    """

    def __init__(
        self, folder: Path, rows: list[dict[str, Any]], every_s: float | None, *, probed: str | None = None
    ) -> None:
        self.folder, self.rows, self.every_s, self.probed = folder, rows, every_s, probed
        self.saved_at = self.asked_at = time.monotonic()
        self.saving_s = 0.0

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = [path.parent for path in self.folder.glob("checkpoint-*/complete")]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_at = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], model: Any, **kwargs: Any) -> Any:
        if "loss" not in logs or self.every_s is None or state.global_step >= state.max_steps:
            return control
        if control.should_training_stop:
            # What goes on from here would not stop again.
            return control
        if self.probed and self.probed not in self.rows[-1]:
            return control
        now = time.monotonic()
        due = now - self.saved_at >= (max(self.every_s, SAVING_SHARE * self.saving_s) if self.every_s else 0)
        due = due and self._fits(model)
        if args.world_size > 1:
            # Clocks differ, and all must save or none.
            agreed = torch.tensor(float(due), device=args.device)
            torch.distributed.broadcast(agreed, src=0)
            due = bool(agreed)
        if due:
            check_finite(model, state.global_step)
            self.asked_at = now
            control.should_save = True
        return control

    def _fits(self, model: Any) -> bool:
        # The weights, and two numbers of AdamW for each.
        needed = 3 * sum(weights.nbytes for weights in model.parameters() if weights.requires_grad)
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        return bool(free > 2 * needed)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            # Each process saves its own random state.
            torch.distributed.barrier()
        self.saved_at = time.monotonic()
        self.saving_s = self.saved_at - self.asked_at
        if not state.is_world_process_zero:
            return
        saved = self.folder / f"checkpoint-{state.global_step}"
        write_json(saved / "rows.json", self.rows)
        (saved / "complete").touch()
        for other in self.folder.glob("checkpoint-*"):
            if other != saved:
                shutil.rmtree(other)


# --- the reference ---------------------------------------------------------------------------------------------------


def reference_gap(trainer: Any, count: int = 8) -> dict[str, float]:
    """How far the policy is from the reference before the first step, on the first pairs that are trained on.

    DPO begins at its reference, where every log-ratio is 0. Where it is not, the reference is another model than the
    one that is trained (not the SFT checkpoint, say), or its log-probabilities are of other tokens.

    Returns:
        `chosen` and `rejected`, the mean log-ratio in nats per response; `largest`, the largest magnitude of one;
        `pairs`, how many pairs.
    """
    rows = trainer.train_dataset.select(range(min(count, len(trainer.train_dataset))))
    ratios = {}
    for side in ("chosen", "rejected"):
        sequences = [Sequence([*row["prompt_ids"], *row[f"{side}_ids"]], len(row["prompt_ids"])) for row in rows]
        ratios[side] = response_logps(trainer.model, sequences) - np.array(rows[f"ref_{side}_logps"])
    return {
        **{side: float(values.mean()) for side, values in ratios.items()},
        "largest": float(max(np.abs(values).max() for values in ratios.values())),
        "pairs": len(rows),
    }


def gap_warning(gap: dict[str, float]) -> str | None:
    """What to say of a `reference_gap`; None where it is no more than rounding in other batches."""
    if gap["largest"] <= GAP_NATS:
        return None
    return (f"DPO did not begin at its reference: the policy was {gap['chosen']:+.2f} nats (chosen) and "
            f"{gap['rejected']:+.2f} nats (rejected) from it on the first {gap['pairs']} pairs; the reference is not "
            "the checkpoint that is trained (train.reference)")  # fmt: skip


# --- several processes -----------------------------------------------------------------------------------------------


def launch(training: Training, folder: Path, on_log: OnLog | None) -> None:
    """Train in `train.processes` processes by `accelerate launch`. As `train`, whose work this is.

    They run under a guard, and so end when this process does, whatever ends it.
    """
    # Not above: it imports this module.
    from oneaxis.preference import worker

    processes = training.config.processes
    cpu = device().type == "cpu"
    if not cpu and torch.cuda.device_count() < processes:
        raise UserError(f"params.yaml: train.processes={processes}: {torch.cuda.device_count()} GPUs are visible; "
                        "allowed: at most so many")  # fmt: skip
    training.write(folder / "training.json")
    for name in ("rows.jsonl", "error.json"):
        (folder / name).unlink(missing_ok=True)
    cores = len(os.sched_getaffinity(0))
    # `--multi_gpu` is accelerate's word for torch's launcher; its `--cpu` would start one process only.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes),
               "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
               "-m", worker.__name__, str(folder)]  # fmt: skip
    given = {"ACCELERATE_USE_CPU": str(cpu).lower(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
             # A model with experts may leave some without a gradient; that DDP looks for them is no news.
             "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
    if cpu:
        given |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // processes))}
    pipe, pipe_write = os.pipe()
    keeper = [sys.executable, "-P", "-S", guard.__file__, str(os.getpid()), str(pipe), "0", tempfile.mkdtemp()]
    process = subprocess.Popen([*keeper, *command], env={**os.environ, **given}, pass_fds=[pipe])
    os.close(pipe)
    told = 0
    try:
        while True:
            code = process.poll()
            told = _tell(folder / "rows.jsonl", told, on_log)
            if code is not None:
                break
            time.sleep(0.2)
    finally:
        process.terminate()
        process.wait()
        os.close(pipe_write)
    if (folder / "error.json").exists():
        error = read_json(folder / "error.json")
        raise (UserError if error["kind"] == "UserError" else RunError)(error["message"])
    if not (folder / "result").exists():
        raise RunError(f"train.processes={processes}: a process ended with code {code}; what it said is above")


def _tell(path: Path, told: int, on_log: OnLog | None) -> int:
    """Pass on the rows after the first `told` that a launch has written; how many there are now."""
    if on_log is None or not path.exists():
        return told
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    for row in whole[told:]:
        on_log(row["values"], row["step"])
    return len(whole)
