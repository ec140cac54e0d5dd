"""The server's own account of a sweep: its Prometheus counters over a cell, and its gauges sampled through it."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
import polars as pl

from oneaxis.errors import RunError
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
        "level": pl.String(),
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


async def read_metrics(target: Target, session: aiohttp.ClientSession) -> dict[str, float]:
    """The samples of `COUNTERS` and `GAUGES` on the server's Prometheus page; parsing all of it would cost send lag.

    Raises:
        RunError: when the engine is gone, or does not answer.
    """
    try:
        async with session.get(f"{target.base_url}/metrics", timeout=aiohttp.ClientTimeout(total=30)) as response:
            response.raise_for_status()
            page = await response.text()
    except (aiohttp.ClientError, OSError) as error:
        await require_alive_for(target, SETTLE_S)
        raise RunError(f"the engine does not answer /metrics: {type(error).__name__}: {error}") from error
    names = (*COUNTERS.values(), *GAUGES.values())
    return parse_metrics("".join(line for line in page.splitlines(keepends=True) if line.startswith(names)))


async def require_alive_for(target: Target, seconds: float) -> None:
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


async def read_counters(target: Target, session: aiohttp.ClientSession) -> dict[str, float | None]:
    metrics = await read_metrics(target, session)
    return {name: _total(metrics, metric) for name, metric in COUNTERS.items()}


def increase_of(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> dict[str, float | None]:
    increase: dict[str, float | None] = {}
    for name, value in after.items():
        earlier = before[name]
        increase[name] = None if value is None or earlier is None else value - earlier
    return increase


async def settle(target: Target, session: aiohttp.ClientSession) -> bool:
    """Wait until the engine has nothing to do: only then are its counters complete. False when it still has."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        metrics = await read_metrics(target, session)
        busy = [_total(metrics, GAUGES[state]) for state in ("running", "waiting")]
        if not any(busy):
            return True
        if time.perf_counter() > deadline:
            return False
        await asyncio.sleep(0.05)


async def sample_state(
    target: Target,
    session: aiohttp.ClientSession,
    samples: list[dict[str, Any]],
    cell_name: Mapping[str, Any],
    cell_started: float,
    started: float,
) -> None:
    """Append the server's state to `samples` until cancelled. A page that does not come is a sample that is missing.

    Args:
        cell_name: the cell's shape, level and rate_rps, for every sample.
    """
    while True:
        with suppress(RunError):
            metrics = await read_metrics(target, session)
            now = time.perf_counter()
            samples.append(
                {
                    **cell_name,
                    "time_s": now - cell_started,
                    "elapsed_s": now - started,
                    **{name: _total(metrics, metric) for name, metric in GAUGES.items()},
                }
            )
        await asyncio.sleep(SAMPLE_EVERY_S)
