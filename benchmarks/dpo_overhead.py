"""Seconds of a DPO step of ours, with all that is watched and saved, beside one of a bare TRL `DPOTrainer`.

    python benchmarks/dpo_overhead.py ARTIFACTS --out overhead.md

ARTIFACTS is the folder of a run up to `filter_pairs`. Both trainers have the same model, pairs, order and `DPOConfig`
(the default settings), each its own copy of the weights. They take turns step by step in one process, so that what
else the machine does falls on both alike: a step lasts from its beginning to where the next could begin, and so has
the logging, the probes and the checkpoints of ours in it. The ratio is that of the sums
over all steps; its interval is by bootstrap over blocks of `probes.every * log_every` steps, in which the probes
repeat. To hold: 1.10. Both end with the same weights, or it was not the same training.
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from transformers import PrinterCallback, TrainerCallback
from trl import DPOTrainer

from oneaxis.config import compose
from oneaxis.config.schema import TrainDpo
from oneaxis.preference.dpo import fitting, sampled
from oneaxis.preference.dpo_config import dpo_config
from oneaxis.preference.evidence import Subjects
from oneaxis.preference.forward import device, load
from oneaxis.preference.trainer import Checkpoints, Training, make_trainer, trl_dataset
from oneaxis.preference.watch import ESCAPES, Watch

WITHIN = 1.10


class Turns:
    """Whose step it is: two threads, of which one runs at a time."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names, self.turn, self.done = names, names[0], set[str]()
        self.changed = threading.Condition()

    def take(self, name: str) -> None:
        """Wait for the turn of `name`."""
        with self.changed:
            self.changed.wait_for(lambda: self.turn == name)

    def give(self, name: str, *, done: bool = False) -> None:
        """Pass the turn to the other, unless that one has ended."""
        with self.changed:
            if done:
                self.done.add(name)
            other = self.names[1 - self.names.index(name)]
            if other not in self.done:
                self.turn = other
            self.changed.notify_all()


class Clock(TrainerCallback):
    """Times the steps of one trainer, each in its turn."""

    def __init__(self, name: str, turns: Turns) -> None:
        self.name, self.turns = name, turns
        self.seconds: list[float] = []
        self.since: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.since is not None:
            self.seconds.append(time.perf_counter() - self.since)
            self.turns.give(self.name)
        self.turns.take(self.name)
        self.since = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.since is not None
        self.seconds.append(time.perf_counter() - self.since)


def interval(bare: list[float], ours: list[float], block: int) -> tuple[float, float]:
    """95% interval of sum(ours) / sum(bare) by bootstrap over blocks of steps."""
    blocks = [slice(start, start + block) for start in range(0, len(bare), block)]
    sums = np.array([(sum(bare[part]), sum(ours[part])) for part in blocks])
    drawn = sums[np.random.default_rng(0).integers(len(sums), size=(10_000, len(sums)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 1] / drawn[:, 0], [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="settings, as for `oneaxis run`")
    arguments = parser.parse_args()

    conf = Path(__file__).parent.parent / "conf"
    # Turns double the time on the clock, by which checkpoints are saved.
    settings = ["train.checkpoint_s=90", f"train.steps={arguments.steps}"]
    config = compose(conf, [*settings, *arguments.set]).train
    assert isinstance(config, TrainDpo)
    source = arguments.artifacts / "fetch_model" / "checkpoint"
    pairs = pl.read_parquet(arguments.artifacts / "filter_pairs" / "pairs.parquet")
    probes = pl.read_parquet(arguments.artifacts / "prepare_data" / "probes.parquet")
    scratch = Path(tempfile.mkdtemp(prefix="oneaxis-overhead-"))

    model, tokenizer = load(source)
    kept, _, _ = fitting(pairs.filter((pl.col("split") == "train") & pl.col("kept")), tokenizer, config)
    _, heldout, _ = fitting(pairs.filter(pl.col("split") == "heldout"), tokenizer, config)
    sample = sampled(kept, config.steps * config.batch_size * config.gradient_accumulation, 0)
    subjects = Subjects(model, tokenizer, heldout, probes, config)
    watch = Watch(subjects.watched(subjects.measure(model, "before")), config, None)

    turns = Turns(("bare", "ours"))
    clocks = {name: Clock(name, turns) for name in turns.names}
    for name in turns.names:
        trl_dataset(sample, scratch / name / "pairs")
    bare_model, bare_tokenizer = load(source)
    bare = DPOTrainer(
        model=bare_model, processing_class=bare_tokenizer, callbacks=[clocks["bare"]],
        args=dpo_config(config, seed=0, output_dir=scratch / "bare" / "trainer", cpu=device().type == "cpu"),
        train_dataset=trl_dataset(sample, scratch / "bare" / "pairs"),
    )  # fmt: skip
    checkpoints = Checkpoints(scratch / "ours" / "trainer", watch.rows, config.checkpoint_s, probed=ESCAPES)
    ours = make_trainer(Training("dpo", source, source, config, 0), model, tokenizer, scratch / "ours",
                        [clocks["ours"], watch, checkpoints])  # fmt: skip
    failures: list[BaseException] = []

    def train(name: str, trainer: Any) -> None:
        try:
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        except BaseException as error:
            failures.append(error)
        finally:
            turns.give(name, done=True)

    threads = [threading.Thread(target=train, args=given) for given in (("bare", bare), ("ours", ours))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    weights = zip(bare.model.parameters(), ours.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in weights)
    saved = checkpoints.newest()
    shutil.rmtree(scratch)

    # The first steps warm up memory and caches.
    block = config.log_every * config.probes.every
    seconds = {name: clock.seconds[block:] for name, clock in clocks.items()}
    ratio = sum(seconds["ours"]) / sum(seconds["bare"])
    low, high = interval(seconds["bare"], seconds["ours"], block)
    saving = f"the last took {checkpoints.saving_s:.1f} s of {sum(clocks['ours'].seconds):.0f}" if saved else "none"
    lines = [
        f"{arguments.steps} steps of {config.batch_size} pairs, of which the first {block} are not counted; "
        f"{torch.get_num_threads()} threads, {device().type}. Logged every {config.log_every} steps; "
        f"{len(config.probes.texts)} texts on {config.probes.watched} prompts every {block} steps.",
        "",
        "| trainer | mean, s a step | median |",
        "|---|---|---|",
        *(f"| {name} | {statistics.mean(found):.3f} | {statistics.median(found):.3f} |"
          for name, found in seconds.items()),
        "",
        f"Ours / bare: {ratio:.3f} (95% interval {low:.3f} to {high:.3f}); to hold: {WITHIN:.2f}. Checkpoints of ours: "
        f"{saving}. Weights at the end: {'equal' if same else 'DIFFERENT'}.",
        "",
        *(f"{name}: {' '.join(f'{second:.2f}' for second in clock.seconds)}" for name, clock in clocks.items()),
    ]  # fmt: skip
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
