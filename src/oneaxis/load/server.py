"""The server's own account of a sweep: counters and histograms over each cell, and its state sampled through it.

Counters and histograms are read before a cell's first request and after its last, so that what they gained is what the
cell did. The state is sampled about twice a second while the load runs. Reading a whole page (600 lines, 50 kB) takes
10 ms of a process that has requests to send; a sample picks its few lines, which takes 0.3 ms.

vLLM's histograms, by its source (v1/metrics/stats.py, v1/engine/output_processor.py of 0.32):

- TTFT runs from when its API server has read and checked the request to when that process has the first token back from
  the engine core. Connecting, HTTP, the JSON of the request, and sending the answer are not in it: a client's own TTFT
  is longer by these, a few milliseconds where neither process is short of a core.
- ITL is one sample a request and step, by the engine core's clock, whatever the number of tokens: their sum is that of
  the decode times, and with the number of tokens it gives the mean gap of a token also under speculation.
"""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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

COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", {}),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", {}),
    "prompt_tokens": ("vllm:prompt_tokens_total", {}),
    "prompt_tokens_computed": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "prompt_tokens_cached": ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    "prompt_tokens_transferred": ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    "output_tokens": ("vllm:generation_tokens_total", {}),
    "preemptions": ("vllm:num_preemptions_total", {}),
    "finished": ("vllm:request_success_total", {"finished_reason": "length"}),
    "steps": ("vllm:iteration_tokens_total_count", {}),
    "drafts": ("vllm:spec_decode_num_drafts_total", {}),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", {}),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total", {}),
}
"""Name -> metric and the labels of those samples that are summed. `steps`: engine steps that gave tokens."""

ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
"""Name -> histogram, in seconds. Their sums and counts are counters too: `ttft_sum_s`, `ttft_count`."""

GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}

SAMPLED = ("output_tokens", "prompt_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits")
"""Counters that are sampled too, as they stand: since the server's start."""

SAMPLE_SCHEMA = pl.Schema(
    {
        "shape": pl.String(),
        "level": pl.String(),
        "rate_rps": pl.Float64(),
        "time_s": pl.Float64(),
        "elapsed_s": pl.Float64(),
        **{name: pl.Float64() for name in (*GAUGES, *SAMPLED)},
    }
)
"""The server's state about twice a second; `time_s` from the cell's start, `elapsed_s` from the sweep's."""

HISTOGRAM_SCHEMA = pl.Schema(
    {
        "shape": pl.String(),
        "level": pl.String(),
        "rate_rps": pl.Float64(),
        "histogram": pl.String(),
        "le_s": pl.Float64(),
        "count": pl.Float64(),
    }
)
"""What each bucket gained over a cell: observations up to `le_s` and above the bound before it (not cumulated)."""


@dataclass(frozen=True)
class Account:
    """What the server had counted at one moment, or between two."""

    counters: dict[str, float | None]
    """By the names of `COUNTERS`, of `HISTOGRAMS` with `_sum_s` and `_count`, and `accepted_at_1`, `accepted_at_2` ...
    where it speculates: drafts whose first, second ... token was accepted. None: the server has no such counter."""
    buckets: dict[tuple[str, float], float]
    """(histogram, upper bound in s) -> observations up to it."""

    def since(self, before: "Account") -> "Account":
        """What was gained; None where either has none."""
        gained: dict[str, float | None] = {}
        for name, value in self.counters.items():
            earlier = before.counters.get(name)
            gained[name] = None if value is None or earlier is None else value - earlier
        buckets = {key: value - before.buckets.get(key, 0.0) for key, value in self.buckets.items()}
        return Account(gained, buckets)

    def histogram_rows(self, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Rows of `HISTOGRAM_SCHEMA`. `cell`: shape, level and rate_rps."""
        rows = []
        below: dict[str, float] = {}
        for (name, bound), count in sorted(self.buckets.items()):
            rows.append({**cell, "histogram": name, "le_s": bound, "count": count - below.get(name, 0.0)})
            below[name] = count
        return rows


class Target(Protocol):
    """What the sweep needs of an engine (`oneaxis.serve.Engine`)."""

    base_url: str
    model_name: str
    headers: Mapping[str, str]
    """Sent with every request: a key, where one is needed."""

    def alive(self) -> bool:
        """Whether its process is there."""

    def require_alive(self) -> None:
        """Raise RunError with its last words when it is not."""


async def read_page(target: Target, session: aiohttp.ClientSession) -> str:
    """The server's Prometheus page; empty where it has none.

    Raises:
        RunError: when the engine is gone, or does not answer.
    """
    page = ""
    async with (
        answering(target, "/metrics") as url,
        session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response,
    ):
        if response.status != 404:
            response.raise_for_status()
            page = await response.text()
    return page


@asynccontextmanager
async def answering(target: Target, page: str) -> AsyncIterator[str]:
    """The address of one of the server's own pages, for a request in the block.

    Raises:
        RunError: when the engine is gone, with its last words, or does not answer.
    """
    try:
        yield f"{target.base_url}{page}"
    except (aiohttp.ClientError, OSError) as error:
        await require_alive_for(target, SETTLE_S)
        raise RunError(f"the engine does not answer {page}: {type(error).__name__}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{target.base_url}{page} answered what cannot be read: {error}") from error


def parse_lines(page: str, names: tuple[str, ...], where: str = "/metrics") -> dict[str, float]:
    """The samples of these metrics alone: the parser takes longer for a whole page than a request may be late."""
    return parse_metrics("".join(line for line in page.splitlines(keepends=True) if line.startswith(names)), where)


async def require_alive_for(target: Target, seconds: float) -> None:
    """Raise its last words when the engine ends within this time: a dying one still answers, with errors."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        target.require_alive()
        await asyncio.sleep(ALIVE_EVERY_S)


def _total(metrics: Mapping[str, float], name: str, **labels: str) -> float | None:
    try:
        return metric_total(metrics, name, **labels)
    except KeyError:
        return None


async def read_account(target: Target, session: aiohttp.ClientSession) -> Account:
    """All counters and histograms as they stand. Not while a load runs: it takes 10 ms.

    Raises:
        RunError: when the engine is gone, or does not answer.
    """
    page = await read_page(target, session)
    try:
        return account_of(page, f"{target.base_url}/metrics")
    except ValueError as error:
        raise RunError(f"{target.base_url}/metrics has a histogram without bounds: {error}") from error


def account_of(page: str, where: str = "/metrics") -> Account:
    """The counters and histograms of a Prometheus page, summed over engines."""
    names = (*(metric for metric, _ in COUNTERS.values()), *HISTOGRAMS.values(), ACCEPTED_PER_POSITION)
    metrics = parse_lines(page, names, where)
    counters = {name: _total(metrics, metric, **labels) for name, (metric, labels) in COUNTERS.items()}
    for name, metric in HISTOGRAMS.items():
        counters |= {
            f"{name}_sum_s": _total(metrics, f"{metric}_sum"),
            f"{name}_count": _total(metrics, f"{metric}_count"),
        }
    buckets: dict[tuple[str, float], float] = {}
    short = {f"{metric}_bucket": name for name, metric in HISTOGRAMS.items()}
    for key, value in metrics.items():
        metric = key.partition("{")[0]
        if metric in short and (bound := re.search(r'[{,]le="([^"]+)"', key)):
            place = short[metric], math.inf if bound[1] == "+Inf" else float(bound[1])
            buckets[place] = buckets.get(place, 0.0) + value
        elif metric == ACCEPTED_PER_POSITION and (position := re.search(r'[{,]position="(\d+)"', key)):
            name = f"accepted_at_{int(position[1]) + 1}"
            counters[name] = (counters.get(name) or 0.0) + value
    return Account(counters, buckets)


async def _state(target: Target, session: aiohttp.ClientSession) -> dict[str, float | None]:
    """`GAUGES` and `SAMPLED` as they stand."""
    sought = {**GAUGES, **{name: COUNTERS[name][0] for name in SAMPLED}}
    page = await read_page(target, session)
    metrics = parse_lines(page, tuple(sought.values()), f"{target.base_url}/metrics")
    return {name: _total(metrics, metric) for name, metric in sought.items()}


async def settle(target: Target, session: aiohttp.ClientSession) -> bool:
    """Wait until the engine has nothing to do: only then are its counters complete. False when it still has."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        state = await _state(target, session)
        if not (state["running"] or state["waiting"]):
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
            state = await _state(target, session)
            now = time.perf_counter()
            samples.append(
                {
                    **cell_name,
                    "time_s": now - cell_started,
                    "elapsed_s": now - started,
                    **state,
                }
            )
        await asyncio.sleep(SAMPLE_EVERY_S)
