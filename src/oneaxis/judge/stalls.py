"""Guard 9: calls that took far longer than their like, and whether the headline rests on them. Pure functions.

A call is a request's time from its intended start to its last token. It is *stalled* when all hold:

- it lies beyond a robust bound of its cell: the median plus `STALL_MADS` scaled median absolute deviations, and half
  the median again at least, since calls that are all alike have a deviation of nearly zero;
- it waited at one place: its longest wait for a token lies beyond the same bound of all longest waits. A call that is
  long because its answer is long waits for no token in particular. Where a prompt was computed meanwhile, its own or
  another's, of more tokens than the median one, the wait is taken in proportion. Such is a longer prompt, and the first
  of a declared start (`load.shapes.*.shared_prefix`), which finds nothing in the prefix cache where the others do;
- it did not wait its turn. That is: divided by the number of calls that it found in flight, itself among them, it still
  lies beyond the same bound of all calls so divided; or for longer than the first bound nobody in its cell got a token
  while it waited. A burst of arrivals makes a queue, and calls in it are long for a reason that belongs to the load.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from oneaxis.config.schema import service_classes
from oneaxis.judge.guards import Guard, judged
from oneaxis.load.metrics import HEADLINE_PERCENTILE, per_request, summarise_cell

STALL_MADS = 10.0
"""A call this many scaled median absolute deviations above the median of its cell is a stall."""
STALL_LEAST = 0.5
"""And no call is a stall that is not above the median by this share of it."""
SAME_STEP = 0.1
"""Tokens of one step reach the client one after the other: within this share of a wait after its end."""
HEADLINE = (f"ttft_p{HEADLINE_PERCENTILE}_ms", f"tpot_p{HEADLINE_PERCENTILE}_ms", "goodput_tok_s")
"""What the stalls of one run must not carry."""


def stalled(requests: pl.DataFrame, load: Mapping[str, Any], reused: Mapping[str, int] | None = None) -> pl.Series:
    """Whether each call is stalled; a failed one is none (it counts as a miss already).

    Args:
        requests: the request table, of any number of cells.
        load: the `load` section, for its service class.
        reused: prompt tokens that the prefix cache had, by request id (`load.plan.reused_tokens`); else none.
    """
    timed = per_request(requests, service_classes(load)).with_row_index("row")
    if reused:
        had = pl.col("request_id").replace_strict(reused, default=0, return_dtype=pl.Int64)
        timed = timed.with_columns(asked_prompt_tokens=(pl.col("asked_prompt_tokens") - had).clip(lower_bound=1))
    found = np.zeros(requests.height, dtype=bool)
    for (_, level), cell in timed.group_by("shape", "level", maintain_order=True):
        beside = timed.filter(pl.col("level") == level) if load.get("together") else cell
        found[cell["row"].to_numpy()] = stalled_in_cell(cell, beside)
    return pl.Series("stalled", found)


def stalled_in_cell(cell: pl.DataFrame, beside: pl.DataFrame | None = None) -> np.ndarray:
    """Of one cell.

    Args:
        cell: `intended_s`, `ended_s`, `e2e_ms` (infinite: failed), `asked_prompt_tokens` (less those that the prefix
            cache had), and `token_times` in seconds on the clock of `intended_s`.
        beside: all that the engine had meanwhile, where that is more than the cell.
    """
    took = cell["e2e_ms"].to_numpy()
    known = np.isfinite(took)
    if not known.any():
        return known
    began = cell["intended_s"].to_numpy()
    ended = np.sort(cell["ended_s"].fill_null(strategy="max").to_numpy())
    # Arrived no later, itself among them, less those that had ended.
    in_flight = np.searchsorted(np.sort(began), began, side="right") - np.searchsorted(ended, began, side="right")
    share = took / np.maximum(in_flight, 1)
    bound = _bound(took[known])
    tokens = np.sort(cell["token_times"].explode().drop_nulls().to_numpy())
    silent = np.array([
        1000 * _longest_silence(tokens, start, start + length / 1000) > bound if long else False
        for start, length, long in zip(began, took, known & (took > bound), strict=True)
    ])  # fmt: skip
    waits = _longest_waits(cell, cell if beside is None else beside)
    return known & (took > bound) & (waits > _bound(waits[known])) & ((share > _bound(share[known])) | silent)


def _longest_waits(cell: pl.DataFrame, beside: pl.DataFrame) -> np.ndarray:
    """Per call, in ms: for the first token, or between two arrivals; 0 where nothing came."""
    moments = pl.concat_list("intended_s", "token_times")
    waits = (
        cell.with_row_index("call")
        .select("call", until=moments)
        .explode("until")
        .with_columns(since=pl.col("until").shift().over("call"))
        .drop_nulls()
    )
    since, until = waits["since"].to_numpy(), waits["until"].to_numpy()
    median = cell["asked_prompt_tokens"].median()
    computed = _largest_prompts(beside, since, until + SAME_STEP * (until - since))
    usual = 1.0 if median is None else float(median)  # type: ignore[arg-type]
    longest = np.zeros(cell.height)
    np.maximum.at(longest, waits["call"].to_numpy(), 1000 * (until - since) * np.minimum(usual / computed, 1.0))
    return longest


def _largest_prompts(calls: pl.DataFrame, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Per interval, the tokens of the largest prompt whose first token came within it; 1 where none did."""
    prompts = (
        calls.select(first=pl.col("token_times").list.first(), tokens="asked_prompt_tokens").drop_nulls().sort("first")
    )
    first, tokens = prompts["first"].to_numpy(), prompts["tokens"].to_numpy().astype(float)
    start, end = (np.searchsorted(first, moments, side="right") for moments in (since, until))
    # `reduceat` takes every part between two places; those between one interval and the next are not wanted.
    parts = np.maximum.reduceat(np.append(tokens, 1.0), np.stack([start, end], axis=1).ravel())[::2]
    return np.where(end > start, parts, 1.0)


def _bound(values: np.ndarray) -> float:
    median = float(np.median(values))
    return median + max(STALL_MADS * 1.4826 * float(np.median(np.abs(values - median))), STALL_LEAST * median)


def _longest_silence(tokens: np.ndarray, start: float, end: float) -> float:
    """Longest time in [start, end] in which nobody got a token, in seconds."""
    within = tokens[(tokens > start) & (tokens < end)]
    return float(np.diff(np.concatenate([[start], within, [end]])).max())


def without_stalls(
    requests: pl.DataFrame, load: Mapping[str, Any], reused: Mapping[str, int] | None = None
) -> pl.DataFrame:
    """The requests but for the stalled calls of each cell; failed ones stay, since they count as misses."""
    return requests.filter(~stalled(requests, load, reused))


def stalls(
    requests: pl.DataFrame, load: Mapping[str, Any], max_shift: float, reused: Mapping[str, int] | None = None
) -> Guard:
    """Guard 9 of one run: no figure of the headline of any cell rests on stalled calls.

    Args:
        load: the `load` section (`service_class`, `duration_s`).
        max_shift: largest relative change of a headline figure when the stalled calls are left out.
        reused: as of `stalled`.
    """
    wanted = service_classes(load)
    found = stalled(requests, load, reused)
    problems = []
    largest = 0.0
    with_flag = requests.with_columns(stalled=found)
    for (shape, level), cell in with_flag.group_by("shape", "level", maintain_order=True):
        count = int(cell["stalled"].sum())
        if not count:
            continue
        kept = cell.filter(~pl.col("stalled")).drop("stalled")
        before = summarise_cell(cell.drop("stalled"), wanted, load["duration_s"])
        after = summarise_cell(kept, wanted, load["duration_s"])
        for name in HEADLINE:
            one, other = before[name], after[name]
            if one is None or other is None or not max(one, other):
                continue
            shift = abs(one - other) / max(one, other)
            largest = max(largest, shift)
            if shift > max_shift:
                problems.append(
                    f"{shape} {level}: {count} of {cell.height} calls stalled, and without them {name} is {other:.4g}, "
                    f"not {one:.4g} (guards.max_stall_shift {max_shift:.0%})"
                )
    evidence = {
        "calls": requests.height,
        "stalled": int(found.sum()),
        "largest_shift": largest,
        "shift_allowed": max_shift,
    }
    return judged(
        9, "stalls", evidence, problems,
        "find what stalled (artifacts/sweep/requests.parquet, server_samples.parquet), and measure again",
    )  # fmt: skip
