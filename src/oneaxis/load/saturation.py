"""Whether a cell was beyond capacity: did its queue grow all through it? From the request table alone.

An engine that cannot keep up with an open loop builds a queue as long as the load lasts, so its latency percentiles are
a matter of how long that was, and no property of the engine. Two slopes over the time of the cell tell:

- of the requests in flight (intended and not yet answered), in requests a second: offered less answered.
- of TTFT against the intended time, in seconds a second: how much longer each second's arrivals wait.

Each is a straight line through the means of `BINS` equal parts of the time, with the t interval of its slope: parts
rather than single moments, since a queue's neighbouring moments say the same. The first answer takes its time, and
until then the number in flight grows in any engine: the time begins after one median E2E (at the latest at half).

**Saturated** is a cell whose number in flight grew with an interval above zero, by `LEAST_SHARE` of the offered rate
and by `LEAST_GROWTH` requests at least. Simulated, a queue with constant service and 300 Poisson arrivals is found in
100 of 100 draws at 1.3 times its capacity and in none at 0.7. Near capacity a burst alone can do it: at 0.9 with 100
arrivals in one draw of seven. Fewer than `LEAST_REQUESTS` requests tell nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl
from scipy.special import stdtrit

BINS = 10
LEAST_REQUESTS = 20
LEAST_SHARE = 0.05
LEAST_GROWTH = 4
NEVER_SERVED = ("timeout", "unfinished")
"""Statuses of requests that the engine still owed an answer. One that it refused did not stay in its queue."""


@dataclass(frozen=True)
class Slope:
    """Of a straight line, with its 95% t interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Saturation:
    """What was seen."""

    saturated: bool
    queue_growth_rps: Slope
    ttft_growth: Slope | None
    """Seconds a second; None where too few requests were spread over the time."""


def saturation(requests: pl.DataFrame) -> Saturation | None:
    """Whether an open-loop cell was beyond capacity; None where it is too short to tell.

    Args:
        requests: the request table of one cell: intended_s, first_token_s, done_s, ended_s, status.
    """
    if requests.height < LEAST_REQUESTS:
        return None
    arrived = requests["intended_s"].to_numpy()
    end = float(arrived.max())
    ok = pl.col("status") == "ok"
    never = pl.lit(math.inf)
    left = requests.select(
        pl.when(ok).then("done_s").when(pl.col("status").is_in(NEVER_SERVED)).then(never).otherwise("ended_s")
    ).to_series().fill_null(math.inf).to_numpy()  # fmt: skip
    begin = min(float(np.median(left - arrived)), end / 2)
    if not end > begin >= 0:
        return None
    edges = np.linspace(begin, end, BINS + 1)
    in_flight = [
        float(np.clip(np.minimum(left, high) - np.maximum(arrived, low), 0, None).sum()) / (high - low)
        for low, high in pairwise(edges)
    ]
    growth = slope((edges[:-1] + edges[1:]) / 2, in_flight)
    assert growth is not None
    rate = int(((arrived >= begin) & (arrived <= end)).sum()) / (end - begin)
    grown = growth.low > 0 and growth.value > LEAST_SHARE * rate and growth.value * (end - begin) > LEAST_GROWTH
    return Saturation(grown, growth, _ttft_growth(requests, begin, end))


def _ttft_growth(requests: pl.DataFrame, begin: float, end: float) -> Slope | None:
    """Of the mean TTFT of each part's arrivals; one that never came counts as long as it was waited for."""
    waited = requests.with_columns(
        ttft_s=pl.coalesce(pl.when(pl.col("status") == "ok").then("first_token_s"), "ended_s") - pl.col("intended_s"),
        part=((pl.col("intended_s") - begin) / (end - begin) * BINS).floor().clip(None, BINS - 1),
    ).filter((pl.col("part") >= 0) & pl.col("ttft_s").is_not_null())
    parts = waited.group_by("part").agg(pl.col("intended_s", "ttft_s").mean()).sort("part")
    return slope(parts["intended_s"].to_numpy(), parts["ttft_s"].to_list())


def slope(x: np.ndarray, y: Sequence[float], confidence: float = 0.95) -> Slope | None:
    """Least-squares slope with its t interval; None for fewer than five points or one x."""
    values = np.asarray(y, dtype=float)
    centred = x - x.mean() if len(x) else x
    spread = float(centred @ centred) if len(x) else 0.0
    if len(x) < 5 or spread == 0:
        return None
    value = float(centred @ values) / spread
    residual = values - values.mean() - value * centred
    half = float(stdtrit(len(x) - 2, (1 + confidence) / 2)) * math.sqrt(
        float(residual @ residual) / (len(x) - 2) / spread
    )
    return Slope(value, value - half, value + half)
