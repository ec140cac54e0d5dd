"""DPO on the kept pairs by TRL's trainer, with absolute log-probabilities before, during and after.

From a checkpoint, scored pairs and benign probes to a trained checkpoint and the evidence on displacement. In order:

1. Pairs are tokenized as TRL does: plain responses end with EOS, conversational ones as the chat template ends a turn.
   Pairs longer than `max_length` are left out and counted; TRL would cut them. When the run sees fewer pairs than were
   kept, a seeded sample of just those is taken, so that the reference pass scores no pair in vain.
2. With `train.sft.epochs` the model is first fitted to the chosen responses of all kept train pairs (TRL's SFTTrainer),
   for DPO assumes a reference that fits them. What comes out is then the reference; what came in is measured too.
3. Before: the summed log-probability of every held-out response, what the model says after the held-out prompts, the
   log-probability of the escape texts on benign prompts, and its greedy answers to these (`evidence`).
4. Training in float32 (Adam's updates at these learning rates vanish in bfloat16 weights); the reference is the
   model that DPO begins with, scored once. Each logging step logs TRL's means since the last one (`logps/*` are batch
   means of *summed* log-probabilities; `rewards/chosen / beta` below 0 is displacement), and every k-th the
   escape texts on a few of the benign prompts.
5. The policy is written in BF16, and "after" is measured on the written checkpoint read back, since that is what is
   served. Rounding is stochastic (see `stochastic_bfloat16`): most updates are smaller than half a BF16 step, so
   rounding to nearest took back three quarters of the change in our default run. What rounding still costs is the
   difference from the `*_after_float32` metrics.

Same inputs, same bytes on the same machine with the same number of threads. Not promised: across machines, thread
counts or library versions, or on CUDA, where sums run in another order each time. A run that was killed goes on from
its newest checkpoint (`oneaxis.preference.trainer`).
"""

import gc
import hashlib
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import torch

from oneaxis.artifacts import read_json, write_json
from oneaxis.config.schema import TrainDpo
from oneaxis.errors import UserError
from oneaxis.parts import folder_digest
from oneaxis.preference.displacement import interval
from oneaxis.preference.dpo_config import NORMALISATION, dpo_config
from oneaxis.preference.evidence import (
    Seen,
    Subjects,
    answer_changes,
    answer_table,
    differences,
    escapes_table,
    heldout_table,
    judge,
    mass_report,
    metrics,
)
from oneaxis.preference.forward import device, load
from oneaxis.preference.pairs import Sequence, tokenize_pair
from oneaxis.preference.trainer import Training, conversational, gap_warning, save_beside_files_of, train, went_on_from
from oneaxis.preference.watch import OnLog


def train_dpo(
    source: Path,
    pairs: pl.DataFrame,
    probes: pl.DataFrame,
    config: TrainDpo,
    *,
    seed: int,
    out: Path,
    scratch: Path,
    on_log: OnLog | None = None,
    observed: dict[str, Any] | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write the policy and the evidence to `out`.

    `checkpoint/`, `train_log.parquet`, `heldout.parquet` (log-probabilities per pair), `escapes.parquet` (per benign
    prompt and text), `answers.parquet` (to benign prompts), `mass.json` and `displacement.json`. With
    `train.sft.epochs` also `sft_log.parquet`.

    Args:
        source: the checkpoint that is trained; the reference too, unless SFT comes first.
        pairs: as filter_pairs writes them (kept, split).
        probes: benign prompts (column prompt).
        scratch: a folder of our own for the trainings. What a run of the same inputs left there is gone on from, what
            another left is removed; removed at the end.
        on_log: called at each logging step with (metrics, step).
        observed: takes the steps that were gone on from, where there were any.

    Returns:
        (metrics without prefix, notes).

    Raises:
        UserError: too few pairs or probes, a mix of plain and conversational pairs, or a wrong `train.dpo_args`.
        RunError: the loss is not finite.
    """
    arguments = dpo_config(config, seed=seed, output_dir=scratch, cpu=device().type == "cpu")
    claim(scratch, inputs_key(source, pairs, probes, config, seed))
    observed = {} if observed is None else observed
    model, tokenizer = load(source)

    kept, _, train_long = fitting(pairs.filter((pl.col("split") == "train") & pl.col("kept")), tokenizer, config)
    heldout, tokens, heldout_long = fitting(pairs.filter(pl.col("split") == "heldout"), tokenizer, config)
    steps_pairs = config.steps * config.batch_size * config.gradient_accumulation
    if train_long + heldout_long:
        print(f"oneaxis: train_dpo: {train_long} train and {heldout_long} held-out pairs have more tokens than "
              f"train.max_length={config.max_length}; left out", file=sys.stderr, flush=True)  # fmt: skip
    check_pairs(kept, heldout, config)
    subjects = Subjects(model, tokenizer, tokens, probes, config)
    sample = sampled(kept, steps_pairs, seed)
    notes: dict[str, Any] = {
        "policy": "artifacts/train_dpo/checkpoint",
        "pairs_kept": kept.height,
        "pairs_trained_on": sample.height,
        "epochs": steps_pairs / sample.height,
        "heldout_pairs": heldout.height,
        "longer_than_max_length": {"train": train_long, "heldout": heldout_long, "policy": "left out, not cut"},
        "rpo_alpha": config.rpo_alpha,
        "rpo_alpha_normalisation": NORMALISATION if config.rpo_alpha else None,
        "loss_type": arguments.loss_type,
        "tokenized": "conversational: chat template" if conversational(sample) else "plain: prompt + response + EOS",
        "weights": "trained in float32, written in bfloat16 by stochastic rounding, measured as written",
        "probe_prompts": subjects.probes.height,
        "reference": "after SFT" if config.sft.epochs and config.reference == "start" else "the fetched model",
    }

    def run(method: Literal["sft", "dpo"], start: Path, reference: Path, table: pl.DataFrame, began: Seen) -> Path:
        folder = scratch / method
        if step := went_on_from(folder):
            observed[f"{method}_went_on_from_step"] = step
            print(f"oneaxis: train_dpo: {method} goes on from step {step}", file=sys.stderr, flush=True)
        watched = subjects.watched(began.logps)
        return train(Training(method, start, reference, config, seed), table, watched, folder, on_log)

    fetched, start = None, source
    if config.sft.epochs:
        fetched = subjects.see(model, "before SFT")
        del model
        start = run("sft", source, source, kept, fetched)
        shutil.copyfile(start / "log.parquet", out / "sft_log.parquet")
        notes["sft"] = {"pairs": kept.height, "loss": "mean NLL over the tokens of the chosen responses of a step"}
        model, _ = load(start)
    before = subjects.see(model, "before DPO")
    del model
    gc.collect()
    result = run("dpo", start, start if config.reference == "start" else source, sample, before)
    shutil.copyfile(result / "log.parquet", out / "train_log.parquet")
    gap = read_json(result / "reference.json")
    notes["reference_gap_nats"] = gap
    model, _ = load(result)
    unrounded = subjects.measure(model, "after, float32")
    write_checkpoint(model, source, out / "checkpoint", seed=seed)
    del model
    gc.collect()
    written, _ = load(out / "checkpoint")
    after = subjects.see(written, "after training")
    confidence = config.displacement.confidence
    moved = mass_report(subjects, before, after, written, lambda: load(start)[0], confidence)
    del written
    log, seen = pl.read_parquet(result / "log.parquet"), read_json(result / "watched.json")
    shutil.rmtree(scratch)

    began, steps = fetched or before, int(log["step"][-1])
    levels = {"before": before.logps, "after": after.logps} | ({"source": fetched.logps} if fetched else {})
    heldout_table(heldout, levels).write_parquet(out / "heldout.parquet")
    answer_table(subjects, began, after).write_parquet(out / "answers.parquet")
    escapes_table(subjects, levels, seen["during"], steps).write_parquet(out / "escapes.parquet")
    write_json(out / "mass.json", moved)
    changes = differences(before.logps, after.logps, confidence)
    shares = answer_changes(began, after, confidence)
    judged = judge(changes, shares, config, seen["stopped"])
    if fetched:
        by_sft = differences(fetched.logps, before.logps, confidence)
        judged["sft"] = {name: interval(change) for name, change in by_sft.items()}
    judged["warnings"] = [said] if (said := gap_warning(gap)) else []
    write_json(out / "displacement.json", judged)
    notes |= {"verdict": judged["verdict"], "stopped": seen["stopped"]}
    answers = {"before": began.answers, "after": after.answers}
    numbers = metrics(levels | {"after_float32": unrounded}, answers, changes, shares)
    return {"steps": float(steps), "stopped_early": float(bool(seen["stopped"])), **numbers}, notes


# --- the inputs -------------------------------------------------------------------------------------------------------


def inputs_key(source: Path, pairs: pl.DataFrame, probes: pl.DataFrame, config: TrainDpo, seed: int) -> str:
    """Hex SHA-256 of all that the bytes of the result follow from: inputs, settings, code, libraries, threads."""
    digest = hashlib.sha256(folder_digest(source).encode())
    for table in (pairs, probes):
        digest.update(table.write_ndjson().encode())
    for path in sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".jsonl")):
        digest.update(path.read_bytes())
    libraries = {name: metadata.version(name) for name in ("accelerate", "peft", "torch", "transformers", "trl")}
    where = [str(device()), torch.get_num_threads(), torch.cuda.get_device_name() if torch.cuda.is_available() else ""]
    settings = config.model_dump(mode="json", exclude={"checkpoint_s"})
    digest.update(json.dumps([settings, seed, libraries, where], sort_keys=True).encode())
    return digest.hexdigest()


def claim(scratch: Path, key: str) -> None:
    """Empty `scratch`, unless a run of the same inputs left it."""
    path = scratch / "inputs.json"
    if not path.is_file() or read_json(path) != key:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        write_json(path, key)


# --- pairs -------------------------------------------------------------------------------------------------------


def fitting(
    pairs: pl.DataFrame, tokenizer: Any, config: TrainDpo
) -> tuple[pl.DataFrame, list[tuple[Sequence, Sequence]], int]:
    """The pairs that fit into `max_length` with both responses, their tokens as trained on, and how many do not."""
    pairs = pairs.sort("pair_id")
    tokens = [tokenize_pair(row, tokenizer, append_eos=True) for row in pairs.iter_rows(named=True)]
    rows = [index for index, pair in enumerate(tokens) if max(len(part.ids) for part in pair) <= config.max_length]
    return pairs[rows], [tokens[index] for index in rows], len(tokens) - len(rows)


def check_pairs(train: pl.DataFrame, heldout: pl.DataFrame, config: TrainDpo) -> None:
    """Refuse what TRL or the paired interval cannot work on.

    Raises:
        UserError: saying how many there are and how many are needed.
    """
    if train.height < config.batch_size:
        raise UserError(f"filter_pairs/pairs.parquet: {train.height} kept train pairs within train.max_length="
                        f"{config.max_length}; allowed: at least train.batch_size={config.batch_size}")  # fmt: skip
    if heldout.height < 2:
        raise UserError(f"filter_pairs/pairs.parquet: {heldout.height} held-out pairs within train.max_length="
                        f"{config.max_length}; allowed: at least 2 (data.pairs.heldout_pairs)")  # fmt: skip
    if train["conversational"].n_unique() > 1:
        raise UserError("filter_pairs/pairs.parquet: plain and conversational pairs are mixed; allowed: one kind, "
                        "for TRL reads the kind from the first pair")  # fmt: skip


def sampled(train: pl.DataFrame, needed: int, seed: int) -> pl.DataFrame:
    """All of `train`, or the seeded sample of `needed` pairs that the steps will see, in order of pair_id."""
    if needed >= train.height:
        return train
    chosen = np.random.default_rng(seed).permutation(train.height)[:needed]
    return train[np.sort(chosen).tolist()]


# --- what is written -------------------------------------------------------------------------------------------------


def stochastic_bfloat16(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 to bfloat16 at random to one of the two neighbours, so that the expectation is the float32 value.

    A weight that is a bfloat16 number already stays as it is. Updates far below a bfloat16 step survive in the sum over
    many weights, where rounding to nearest would undo every one of them (Gupta et al., 2015, "Deep Learning with
    Limited Numerical Precision").

    Args:
        weights: finite float32, on the CPU. generator: on the CPU; it decides every bit.
    """
    # bfloat16 is the upper half of float32: random lower bits carry into it with the probability of the lower half.
    bits = weights.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


@torch.no_grad()
def write_checkpoint(model: Any, source: Path, folder: Path, *, seed: int) -> None:
    """The model in BF16 safetensors, beside the other files of `source`.

    `model` is rounded and cast in place, its tied weights once.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        parameter.copy_(stochastic_bfloat16(parameter.cpu(), generator))
    save_beside_files_of(source, model.to(torch.bfloat16), folder)
