"""A sweep of cells (shape x rate) against a running engine: from the plan to tables, summary, guards and metrics.

Each cell: its own warm-up, a reset of the prefix cache, the server's counters, the load, the drain, the counters again.
A cell ends when its last request has ended, at the latest `request_timeout_s` after the last was to be sent. An engine
that dies ends the sweep at once.
"""

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import polars as pl
from tqdm import tqdm

from oneaxis.config.schema import Gate, Load
from oneaxis.errors import RunError
from oneaxis.judge import guards
from oneaxis.load.client import Record, Request, open_session, request_table, requests_of, send_all
from oneaxis.load.metrics import (
    CAPACITY_ATTAINMENT,
    HEADLINE_PERCENTILE,
    LATENCIES,
    PERCENTILES,
    capacity,
    requests_needed,
    summarise_cell,
)
from oneaxis.load.plan import Plan, rate_label
from oneaxis.serve.metrics import metric_total, parse_metrics

ALIVE_EVERY_S = 0.1
SAMPLE_EVERY_S = 0.5
SETTLE_S = 2.0
"""How long an engine may take to be idle, or to be seen dead, after the last request of a cell."""

COUNTERS = {
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}

GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}

SAMPLE_SCHEMA = pl.Schema(
    {
        "shape": pl.String(),
        "rate_rps": pl.Float64(),
        "time_s": pl.Float64(),
        "elapsed_s": pl.Float64(),
        "running": pl.Float64(),
        "waiting": pl.Float64(),
        "kv_cache_usage": pl.Float64(),
    }
)
"""The server's state about twice a second; `time_s` from the cell's start, `elapsed_s` from the sweep's."""


class Target(Protocol):
    """What the sweep needs of an engine (`oneaxis.serve.Engine`)."""

    base_url: str
    model_name: str

    def alive(self) -> bool:
        """Whether its process is there."""

    def require_alive(self) -> None:
        """Raise RunError with its last words when it is not."""


@dataclass(frozen=True)
class Sweep:
    """What was recorded."""

    requests: pl.DataFrame
    """One row per request, in the order of the plan."""
    samples: pl.DataFrame
    """`SAMPLE_SCHEMA`."""
    counters: dict[tuple[str, float], dict[str, float | None]]
    """Increase of each of `COUNTERS` over a cell; None where the server has no such counter."""
    conditions: list[dict[str, Any]]
    """Per cell: warm-up requests that succeeded, whether the prefix cache was reset, and when it began."""


def run_sweep(target: Target, plan: Plan, *, duration_s: float, timeout_s: float) -> Sweep:
    """Run every cell of the plan, in its order.

    Raises:
        RunError: when the engine dies, with its last words; or when no request at all succeeded.
    """
    # A full garbage collection over the libraries' objects takes longer than the send lag that is allowed.
    gc.collect()
    gc.freeze()
    try:
        sweep = asyncio.run(_run_sweep(target, plan, duration_s, timeout_s))
    finally:
        gc.unfreeze()
    if not (sweep.requests["status"] == "ok").any():
        failures = Counter(sweep.requests["status"].to_list())
        listed = ", ".join(f"{status} {count}" for status, count in sorted(failures.items()))
        raise RunError(f"all {sweep.requests.height} requests failed ({listed}): {sweep.requests['error'][0]}")
    return sweep


async def _run_sweep(target: Target, plan: Plan, duration_s: float, timeout_s: float) -> Sweep:
    records: list[Record] = []
    samples: list[dict[str, Any]] = []
    counters: dict[tuple[str, float], dict[str, float | None]] = {}
    conditions: list[dict[str, Any]] = []
    started = time.perf_counter()
    async with open_session() as session:
        with tqdm(total=plan.arrivals.height, desc="sweep", unit="request", file=sys.stderr) as bar:
            for (shape, rate), arrivals in plan.arrivals.group_by("shape", "rate_rps", maintain_order=True):
                bar.set_description(f"sweep {shape} {rate_label(rate)}")
                in_cell = (pl.col("shape") == shape) & (pl.col("rate_rps") == rate)
                warmups = requests_of(plan.warmups.filter(in_cell), target.model_name)
                warm = await _watched(target, session, warmups, timeout_s, lambda record: None)
                await _settle(target, session)
                reset = await _reset_prefix_cache(session, target.base_url)
                before = await _counters(target, session)
                began = time.time()
                cell_started = time.perf_counter()
                sampler = asyncio.create_task(_sample(target, session, samples, shape, rate, cell_started, started))
                try:
                    requests = requests_of(arrivals, target.model_name)
                    cell = await _watched(target, session, requests, timeout_s, lambda record: bar.update() and None)
                    await asyncio.sleep(max(0.0, duration_s - (time.perf_counter() - cell_started)))
                finally:
                    sampler.cancel()
                    with suppress(asyncio.CancelledError):
                        await sampler
                idle = await _settle(target, session)
                after = await _counters(target, session)
                records.extend(cell)
                counters[shape, rate] = _increase(before, after)
                conditions.append(
                    {
                        "shape": shape,
                        "rate_rps": rate,
                        "began_at_s": began,
                        "warmup_requests": len(warm),
                        "warmup_ok": sum(record.status == "ok" for record in warm),
                        "prefix_cache_reset": reset,
                        "idle_at_end": idle,
                    }
                )
    return Sweep(request_table(records), pl.DataFrame(samples, schema=SAMPLE_SCHEMA), counters, conditions)


async def _watched(
    target: Target,
    session: aiohttp.ClientSession,
    requests: Sequence[Request],
    timeout_s: float,
    ended: Callable[[Record], None],
) -> list[Record]:
    """Send the requests, and stop at once when the engine dies.

    Raises:
        RunError: when the engine died, also when it is seen only after the last request.
    """
    load = asyncio.create_task(
        send_all(session, target.base_url, requests, timeout_s=timeout_s, alive=target.alive, ended=ended)
    )
    try:
        while not load.done():
            target.require_alive()
            await asyncio.wait([load], timeout=ALIVE_EVERY_S)
    finally:
        load.cancel()
        await asyncio.wait([load])
    records = load.result()
    if any(record.status in ("engine_died", "refused", "server_error", "unfinished") for record in records):
        await _require_alive_for(target, SETTLE_S)
    return records


async def _metrics(target: Target, session: aiohttp.ClientSession) -> dict[str, float]:
    """The samples of `COUNTERS` and `GAUGES` on the server's Prometheus page; parsing all of it would cost send lag.

    Raises:
        RunError: when the engine is gone, or does not answer.
    """
    try:
        async with session.get(f"{target.base_url}/metrics", timeout=aiohttp.ClientTimeout(total=30)) as response:
            response.raise_for_status()
            page = await response.text()
    except (aiohttp.ClientError, OSError) as error:
        await _require_alive_for(target, SETTLE_S)
        raise RunError(f"the engine does not answer /metrics: {type(error).__name__}: {error}") from error
    names = (*COUNTERS.values(), *GAUGES.values())
    return parse_metrics("".join(line for line in page.splitlines(keepends=True) if line.startswith(names)))


async def _require_alive_for(target: Target, seconds: float) -> None:
    """Raise its last words when the engine ends within this time: a dying one still answers, with errors."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        target.require_alive()
        await asyncio.sleep(ALIVE_EVERY_S)


def _total(metrics: Mapping[str, float], name: str) -> float | None:
    try:
        return metric_total(metrics, name)
    except KeyError:
        return None


async def _counters(target: Target, session: aiohttp.ClientSession) -> dict[str, float | None]:
    metrics = await _metrics(target, session)
    return {name: _total(metrics, metric) for name, metric in COUNTERS.items()}


def _increase(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> dict[str, float | None]:
    increase: dict[str, float | None] = {}
    for name, value in after.items():
        earlier = before[name]
        increase[name] = None if value is None or earlier is None else value - earlier
    return increase


async def _settle(target: Target, session: aiohttp.ClientSession) -> bool:
    """Wait until the engine has nothing to do: only then are its counters complete. False when it still has."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        metrics = await _metrics(target, session)
        busy = [_total(metrics, GAUGES[state]) for state in ("running", "waiting")]
        if not any(busy):
            return True
        if time.perf_counter() > deadline:
            return False
        await asyncio.sleep(0.05)


async def _reset_prefix_cache(session: aiohttp.ClientSession, base_url: str) -> bool:
    """Empty the prefix cache; False when the engine does not offer it, or does not do it."""
    async with session.post(f"{base_url}/reset_prefix_cache") as response:
        if response.status != 200:
            return False
        answer = await response.json(content_type=None)
    return not isinstance(answer, dict) or bool(answer.get("success", True))


async def _sample(
    target: Target,
    session: aiohttp.ClientSession,
    samples: list[dict[str, Any]],
    shape: str,
    rate: float,
    cell_started: float,
    started: float,
) -> None:
    """Append the server's state to `samples` until cancelled. A page that does not come is a sample that is missing."""
    while True:
        with suppress(RunError):
            metrics = await _metrics(target, session)
            now = time.perf_counter()
            samples.append(
                {
                    "shape": shape,
                    "rate_rps": rate,
                    "time_s": now - cell_started,
                    "elapsed_s": now - started,
                    **{name: _total(metrics, metric) for name, metric in GAUGES.items()},
                }
            )
        await asyncio.sleep(SAMPLE_EVERY_S)


# --- what was recorded, summed up ----------------------------------------------------------------------------


def summarise(sweep: Sweep, load: Load) -> pl.DataFrame:
    """One row per cell: `summarise_cell`, the increases of the server's counters, and `prefix_hit_rate`."""
    rows = []
    for (shape, rate), requests in sweep.requests.group_by("shape", "rate_rps", maintain_order=True):
        counted = sweep.counters[shape, rate]
        rows.append(
            {
                "shape": shape,
                "rate_rps": rate,
                **summarise_cell(requests, load.service_class, load.duration_s),
                "prefix_hit_rate": hit_rate(counted["prefix_cache_hits"], counted["prefix_cache_queries"]),
                **{f"server_{name}": value for name, value in counted.items()},
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def hit_rate(hits: float | None, queries: float | None) -> float | None:
    """Cached prompt tokens / prompt tokens looked up; 0 when nothing was looked up, None without the counters."""
    if hits is None or queries is None:
        return None
    return hits / queries if queries else 0.0


def judge(plan: Plan, sweep: Sweep, cells: pl.DataFrame, differences: Sequence[Any], gate: Gate) -> list[guards.Guard]:
    """The validity guards of a sweep, in their order.

    Args:
        differences: what the engine runs otherwise than asked (`realised_config`).
    """
    labels = [f"{shape} {rate_label(rate)}" for shape, rate in cells.select("shape", "rate_rps").iter_rows()]
    prompts = [*plan.arrivals["prompt_token_ids"].to_list(), *plan.warmups["prompt_token_ids"].to_list()]
    planned = plan.arrivals.group_by("shape", "rate_rps", maintain_order=True).len()
    scheduled = {f"{shape} {rate_label(rate)}": count for shape, rate, count in planned.iter_rows()}
    return [
        guards.unique_prompts(
            prompts, dict(zip(labels, cells["prefix_hit_rate"], strict=True)), gate.max_prefix_hit_rate
        ),
        guards.token_truth(
            sweep.requests,
            _sum(cells["server_prompt_tokens"].to_list()),
            _sum(cells["server_output_tokens"].to_list()),
            gate.max_token_disagreement,
        ),
        guards.realised_as_asked(differences),
        guards.load_fidelity(sweep.requests, scheduled, gate.max_send_lag_p99_ms),
        guards.survivors(plan.arrivals["request_id"].to_list(), sweep.requests, cells),
        guards.output_limit(sweep.requests),
    ]


def _sum(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if len(present) == len(values) else None


def summary_document(cells: pl.DataFrame, verdicts: Sequence[guards.Guard], sweep: Sweep, load: Load) -> dict[str, Any]:
    """`summary.json`: the cells with what their numbers support, capacity per shape, and the verdict.

    `not_reached` names percentiles that fall on a request that failed; `supported` says whether n is enough to claim
    each percentile with 95% confidence; `judged_on` what the service class asked of the shape.
    """
    one_token = {shape.name for shape in load.shapes if shape.output_tokens == 1}
    documents = []
    for row, condition in zip(cells.to_dicts(), sweep.conditions, strict=True):
        asked = [name for name in LATENCIES if row["shape"] not in one_token or name in ("ttft", "e2e")]
        names = [f"{name}_p{percent}_ms" for name in asked for percent in PERCENTILES]
        documents.append(
            {
                **row,
                "not_reached": [name for name in names if row[name] is None],
                "supported": {f"p{percent}": row["n"] >= requests_needed(percent) for percent in PERCENTILES},
                "judged_on": ["ttft"] if row["shape"] in one_token else ["ttft", "tpot"],
                "warmup_ok": condition["warmup_ok"],
                "prefix_cache_reset": condition["prefix_cache_reset"],
            }
        )
    return {
        "valid": all(guard.valid for guard in verdicts),
        "invalid": [f"guard {guard.number} ({guard.name}): {guard.reason}" for guard in verdicts if not guard.valid],
        "headline_percentile": HEADLINE_PERCENTILE,
        "requests_needed": {f"p{percent}": requests_needed(percent) for percent in PERCENTILES},
        "service_class": load.service_class.model_dump(),
        "capacity_attainment": CAPACITY_ATTAINMENT,
        "capacity": capacity(cells),
        "cells": documents,
    }


def flat_metrics(cells: pl.DataFrame, verdicts: Sequence[guards.Guard]) -> dict[str, float]:
    """Metrics `sweep/...`; what is undefined or not reached is left out."""
    metrics: dict[str, float | None] = {
        "sweep/valid": float(all(guard.valid for guard in verdicts)),
        "sweep/requests": float(cells["n"].sum()),
        "sweep/failed": float(cells["failed"].sum()),
        "sweep/prefix_hit_rate": hit_rate(
            _sum(cells["server_prefix_cache_hits"].to_list()), _sum(cells["server_prefix_cache_queries"].to_list())
        ),
    }
    for cell in cells.iter_rows(named=True):
        prefix = f"sweep/{cell['shape']}/{rate_label(cell['rate_rps'])}"
        metrics.update({f"{prefix}/{name}": cell[name] for name in cell if name not in ("shape", "rate_rps")})
    for shape, best in capacity(cells).items():
        metrics[f"sweep/{shape}/capacity_tok_s"] = best["goodput_tok_s"] if best else None
    return {name: float(value) for name, value in metrics.items() if value is not None}


def report_lines(document: Mapping[str, Any], verdicts: Sequence[guards.Guard]) -> list[str]:
    """What a person reads at the end: a line per cell, then VALID, or INVALID with why and what to do."""
    lines = []
    for cell in document["cells"]:
        supported = "" if cell["supported"][f"p{HEADLINE_PERCENTILE}"] else (
            f" (n too small for a p{HEADLINE_PERCENTILE}: {requests_needed(HEADLINE_PERCENTILE)} needed)"
        )  # fmt: skip
        on = " (on TTFT alone: one output token)" if cell["judged_on"] == ["ttft"] else ""
        lines.append(
            f"{cell['shape']} at {cell['rate_rps']:g} req/s: n {cell['n']}, failed {cell['failed']}, "
            f"TTFT p{HEADLINE_PERCENTILE} {_ms(cell, 'ttft')}, TPOT p{HEADLINE_PERCENTILE} {_ms(cell, 'tpot')}, "
            f"goodput {cell['goodput_tok_s']:.1f} tok/s, attainment {cell['attainment']:.0%}{on}{supported}"
        )
    failed = [guard for guard in verdicts if not guard.valid]
    lines.append("load: INVALID" if failed else f"load: VALID ({len(verdicts)} guards)")
    lines.extend(f"  guard {guard.number}, {guard.name}: {guard.reason}. {guard.recommendation}" for guard in failed)
    return lines


def _ms(cell: Mapping[str, Any], latency: str) -> str:
    name = f"{latency}_p{HEADLINE_PERCENTILE}_ms"
    if cell[name] is None:
        return "not reached" if name in cell["not_reached"] else "undefined"
    return f"{cell[name]:.0f} ms"
