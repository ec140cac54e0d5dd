"""Guard 9: calls that took far longer than their like, and whether the headline rests on them. Pure functions.

A call is a request's time from its intended start to its last token. It is *stalled* when all hold:

- it lies beyond a robust bound of its cell: the median plus `STALL_MADS` scaled median absolute deviations, and half
  the median again at least, since calls that are all alike have a deviation of nearly zero;
- it waited at one place: its longest wait for a token lies beyond the same bound of all longest waits. A call that is
  long because its answer is long waits for no token in particular. Of a prompt longer than the median, the wait for the
  first token is taken in proportion;
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
HEADLINE = (f"ttft_p{HEADLINE_PERCENTILE}_ms", f"tpot_p{HEADLINE_PERCENTILE}_ms", "goodput_tok_s")
"""What the stalls of one run must not carry."""


def stalled(requests: pl.DataFrame, load: Mapping[str, Any]) -> pl.Series:
    """Whether each call is stalled; a failed one is none (it counts as a miss already).

    Args:
        requests: the request table, of any number of cells.
        load: the `load` section, for its service class.
    """
    timed = per_request(requests, service_classes(load)).with_row_index("row")
    found = np.zeros(requests.height, dtype=bool)
    for _, cell in timed.group_by("shape", "level", maintain_order=True):
        found[cell["row"].to_numpy()] = stalled_in_cell(cell)
    return pl.Series("stalled", found)


def stalled_in_cell(cell: pl.DataFrame) -> np.ndarray:
    """Of one cell.

    Args:
        cell: `intended_s`, `ended_s`, `e2e_ms` (infinite: failed), `asked_prompt_tokens`, and `token_times` in seconds
            on the clock of `intended_s`.
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
    waits = _longest_waits(cell)
    return known & (took > bound) & (waits > _bound(waits[known])) & ((share > _bound(share[known])) | silent)


def _longest_waits(cell: pl.DataFrame) -> np.ndarray:
    """Per call, in ms: for the first token, or between two arrivals; 0 where nothing came."""
    first = pl.col("token_times").list.first() - pl.col("intended_s")
    as_long = (pl.col("asked_prompt_tokens").median() / pl.col("asked_prompt_tokens")).clip(upper_bound=1.0)
    between = pl.col("token_times").list.diff().list.max()
    waits = cell.select(1000 * pl.max_horizontal(first * as_long.fill_null(1.0), between).fill_null(0.0))
    return waits.to_series().to_numpy()


def _bound(values: np.ndarray) -> float:
    median = float(np.median(values))
    return median + max(STALL_MADS * 1.4826 * float(np.median(np.abs(values - median))), STALL_LEAST * median)


def _longest_silence(tokens: np.ndarray, start: float, end: float) -> float:
    """Longest time in [start, end] in which nobody got a token, in seconds."""
    within = tokens[(tokens > start) & (tokens < end)]
    return float(np.diff(np.concatenate([[start], within, [end]])).max())


def without_stalls(requests: pl.DataFrame, load: Mapping[str, Any]) -> pl.DataFrame:
    """The requests but for the stalled calls of each cell; failed ones stay, since they count as misses."""
    return requests.filter(~stalled(requests, load))


def stalls(requests: pl.DataFrame, load: Mapping[str, Any], max_shift: float) -> Guard:
    """Guard 9 of one run: no figure of the headline of any cell rests on stalled calls.

    Args:
        load: the `load` section (`service_class`, `duration_s`).
        max_shift: largest relative change of a headline figure when the stalled calls are left out.
    """
    wanted = service_classes(load)
    found = stalled(requests, load)
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
