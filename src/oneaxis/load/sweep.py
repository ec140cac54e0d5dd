"""A sweep of cells (shape x level) against a running engine: from the plan to one row per request and server counters.

Each cell: its own warm-up, a reset of the prefix cache, the server's counters, the load, the drain, the counters again.
A cell ends when its last request has ended, at the latest `request_timeout_s` after the last was to be sent. An engine
that dies ends the sweep at once.
"""

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import polars as pl
from tqdm import tqdm

from oneaxis.errors import RunError
from oneaxis.load.client import Record, Request, open_session, request_table, requests_of, send_all
from oneaxis.load.plan import Plan
from oneaxis.load.server import (
    ALIVE_EVERY_S,
    HISTOGRAM_SCHEMA,
    SAMPLE_SCHEMA,
    SETTLE_S,
    Target,
    read_account,
    require_alive_for,
    sample_state,
    settle,
)


@dataclass(frozen=True)
class Sweep:
    """What was recorded."""

    requests: pl.DataFrame
    """One row per request, in the order of the plan."""
    samples: pl.DataFrame
    """`SAMPLE_SCHEMA`."""
    counters: dict[tuple[str, str], dict[str, float | None]]
    """Per cell what the server counted (`Account.counters`); None where it has no such counter."""
    conditions: list[dict[str, Any]]
    """Per cell: warm-up requests that succeeded, whether the prefix cache was reset, and when it began."""
    histograms: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=HISTOGRAM_SCHEMA))
    """`HISTOGRAM_SCHEMA`."""


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
    counters: dict[tuple[str, str], dict[str, float | None]] = {}
    conditions: list[dict[str, Any]] = []
    histograms: list[dict[str, Any]] = []
    started = time.perf_counter()
    async with open_session() as session:
        with tqdm(total=plan.arrivals.height, desc="sweep", unit="request", file=sys.stderr) as bar:
            for (shape, level), arrivals in plan.arrivals.group_by("shape", "level", maintain_order=True):
                bar.set_description(f"sweep {shape} {level}")
                in_cell = (pl.col("shape") == shape) & (pl.col("level") == level)
                cell_name = {"shape": shape, "level": level, "rate_rps": arrivals["rate_rps"][0]}
                warmups = requests_of(plan.warmups.filter(in_cell), target.model_name)
                warm = await _watched(target, session, warmups, timeout_s, lambda record: None)
                await settle(target, session)
                reset = await _reset_prefix_cache(session, target.base_url)
                before = await read_account(target, session)
                began = time.time()
                cell_started = time.perf_counter()
                sampler = asyncio.create_task(sample_state(target, session, samples, cell_name, cell_started, started))
                try:
                    requests = requests_of(arrivals, target.model_name)
                    cell = await _watched(target, session, requests, timeout_s, lambda record: bar.update() and None)
                    await asyncio.sleep(max(0.0, duration_s - (time.perf_counter() - cell_started)))
                finally:
                    sampler.cancel()
                    with suppress(asyncio.CancelledError):
                        await sampler
                idle = await settle(target, session)
                gained = (await read_account(target, session)).since(before)
                records.extend(cell)
                counters[shape, level] = gained.counters
                histograms.extend(gained.histogram_rows(cell_name))
                conditions.append(
                    {
                        **cell_name,
                        "began_at_s": began,
                        "warmup_requests": len(warm),
                        "warmup_ok": sum(record.status == "ok" for record in warm),
                        "prefix_cache_reset": reset,
                        "idle_at_end": idle,
                    }
                )
    return Sweep(
        request_table(records),
        pl.DataFrame(samples, schema=SAMPLE_SCHEMA),
        counters,
        conditions,
        pl.DataFrame(histograms, schema=HISTOGRAM_SCHEMA),
    )


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
        await require_alive_for(target, SETTLE_S)
    return records


async def _reset_prefix_cache(session: aiohttp.ClientSession, base_url: str) -> bool:
    """Empty the prefix cache; False when the engine does not offer it, or does not do it."""
    async with session.post(f"{base_url}/reset_prefix_cache") as response:
        if response.status != 200:
            return False
        answer = await response.json(content_type=None)
    return not isinstance(answer, dict) or bool(answer.get("success", True))
