"""A sweep of cells (shape x rate) against a running engine: from the plan to one row per request and server counters.

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

from oneaxis.errors import RunError
from oneaxis.load.client import Record, Request, open_session, request_table, requests_of, send_all
from oneaxis.load.plan import Plan, rate_label
from oneaxis.serve.metrics import metric_total, parse_metrics

ALIVE_EVERY_S = 0.1
SAMPLE_EVERY_S = 0.5
SETTLE_S = 2.0
"""How long an engine may take to be idle, or to be seen dead, after the last request of a cell.

vLLM does not update its gauges after the last request was aborted, so a cell that ends in timeouts waits for all of it.
"""

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
