"""A sweep of cells (shape x level) against a running engine: from the plan to one row per request and server counters.

Each cell: its own warm-up, a reset of the prefix cache, the server's counters, the load, the drain, the counters again.
A cell ends when its last request has ended, at the latest `request_timeout_s` after the last was to be sent. Where
shapes go together, all cells of a level run at once. An engine that dies ends the sweep at once.
"""

import asyncio
import gc
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import polars as pl
import uvloop
from tqdm import tqdm

from oneaxis.errors import RunError
from oneaxis.load.client import Record, Request, request_table, requests_of, send_all
from oneaxis.load.plan import Plan
from oneaxis.load.server import (
    ALIVE_EVERY_S,
    HISTOGRAM_SCHEMA,
    SAMPLE_SCHEMA,
    SETTLE_S,
    Target,
    answering,
    read_account,
    require_alive_for,
    sample_state,
    settle,
)


@dataclass(frozen=True)
class Sweep:
    """What was recorded."""

    requests: pl.DataFrame
    """One row per request that was sent, in the order of the plan."""
    samples: pl.DataFrame
    """`SAMPLE_SCHEMA`; where shapes go together `shape` is null, since the server's state is of the level."""
    counters: dict[tuple[str, str], dict[str, float | None]]
    """Per cell what the server counted (`Account.counters`); None where it has no such counter. Where shapes go
    together, each of them has what was counted over the level."""
    conditions: list[dict[str, Any]]
    """Per cell: warm-up requests that succeeded, whether the prefix cache was reset, and when it began."""
    histograms: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=HISTOGRAM_SCHEMA))
    """`HISTOGRAM_SCHEMA`; `shape` as in `samples`."""


def run_sweep(target: Target, plan: Plan, *, duration_s: float, timeout_s: float) -> Sweep:
    """Run every cell of the plan, in its order.

    Raises:
        RunError: when the engine dies, with its last words; or when no request at all succeeded.
    """
    # A full garbage collection over the libraries' objects takes longer than the send lag that is allowed.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sweep = runner.run(run_cells(target, plan, duration_s, timeout_s))
    finally:
        gc.unfreeze()
    if not (sweep.requests["status"] == "ok").any():
        failures = Counter(sweep.requests["status"].to_list())
        listed = ", ".join(f"{status} {count}" for status, count in sorted(failures.items()))
        first = f": {sweep.requests['error'][0]}" if failures else ""
        raise RunError(f"all {sweep.requests.height} requests failed ({listed}){first}")
    return sweep


async def run_cells(target: Target, plan: Plan, duration_s: float, timeout_s: float) -> Sweep:
    """The same within a running event loop, whatever came of the requests."""
    records: list[Record] = []
    samples: list[dict[str, Any]] = []
    counters: dict[tuple[str, str], dict[str, float | None]] = {}
    conditions: list[dict[str, Any]] = []
    histograms: list[dict[str, Any]] = []
    started = time.perf_counter()
    keys = ["level"] if plan.together else ["shape", "level"]
    async with _open_session(target.headers) as session:
        with tqdm(
            total=plan.arrivals["intended_s"].count() or None, desc="sweep", unit="request", file=sys.stderr
        ) as bar:
            for key, arrivals in plan.arrivals.group_by(keys, maintain_order=True):
                bar.set_description_str(f"sweep {' '.join(map(str, key))}")
                level = str(key[-1])
                rates = {shape: own["rate_rps"][0] for (shape,), own in arrivals.group_by("shape")}
                named = {"shape": None if plan.together else key[0], "level": level,
                         "rate_rps": None if None in rates.values() else sum(rates.values())}  # fmt: skip
                warmups = plan.warmups.filter(*(pl.col(name) == value for name, value in zip(keys, key, strict=True)))
                warm = await _watched(target, requests_of(warmups, target.model_name), timeout_s)
                await settle(target, session)
                reset = await _reset_prefix_cache(target, session)
                before = await read_account(target, session)
                began = time.time()
                cell_started = time.perf_counter()
                sampler = asyncio.create_task(sample_state(target, session, samples, named, cell_started, started))
                try:
                    requests = requests_of(arrivals, target.model_name)
                    cell = await _watched(target, requests, timeout_s, until_s=duration_s, ended=bar.update)
                    await asyncio.sleep(max(0.0, duration_s - (time.perf_counter() - cell_started)))
                finally:
                    sampler.cancel()
                    with suppress(asyncio.CancelledError):
                        await sampler
                idle = await settle(target, session)
                gained = (await read_account(target, session)).since(before)
                records.extend(cell)
                histograms.extend(gained.histogram_rows(named))
                for shape in dict.fromkeys(record.shape for record in cell):
                    counters[shape, level] = gained.counters
                    conditions.append(
                        {
                            "shape": shape,
                            "level": level,
                            "rate_rps": rates[shape],
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


def _open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """For the server's own pages; requests have connections of their own."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    )


async def _watched(
    target: Target,
    requests: Sequence[Request],
    timeout_s: float,
    *,
    until_s: float = math.inf,
    ended: Callable[[], object] = lambda: None,
) -> list[Record]:
    """Send the requests, and stop at once when the engine dies.

    Raises:
        RunError: when the engine died, also when it is seen only after the last request.
    """
    load = asyncio.create_task(
        send_all(
            target.base_url,
            requests,
            timeout_s=timeout_s,
            alive=target.alive,
            ended=ended,
            until_s=until_s,
            headers=target.headers,
        )
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


async def _reset_prefix_cache(target: Target, session: aiohttp.ClientSession) -> bool:
    """Empty the prefix cache; False when the engine does not offer it, or does not do it.

    Raises:
        RunError: when the engine is gone, or does not answer.
    """
    async with answering(target, "/reset_prefix_cache") as url, session.post(url) as response:
        if response.status != 200:
            return False
        answer = await response.json(content_type=None)
    return not isinstance(answer, dict) or bool(answer.get("success", True))
