"""The interval that the page adds to what the stages measured: of a percentile.

Source: order-statistic interval of a quantile (Conover, Practical Nonparametric Statistics, 3.2).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from scipy.special import bdtr


def quantile_interval(
    values: Sequence[float], quantile: float, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """A distribution-free interval for a quantile; a side that so few values cannot bound is None.

    Args:
        values: one per request; a request that failed counts as infinity. quantile: in (0, 1).
    """
    ordered, n, tail = sorted(values), len(values), (1 - confidence) / 2
    if not n:
        return None, None
    low, high = binomial_quantile(tail, n, quantile), binomial_quantile(1 - tail, n, quantile) + 1
    bottom = ordered[low - 1] if low >= 1 else None
    top = ordered[high - 1] if high <= n else None
    return bottom, top if top is None or math.isfinite(top) else None


def binomial_quantile(probability: float, n: int, share: float) -> int:
    """The smallest k with P(B <= k) >= probability, for B ~ Binomial(n, share).

    By the distribution function: `scipy.stats` alone takes half a second to import, at every run's report.
    """
    return bisect_left(range(n + 1), probability, key=lambda k: float(bdtr(k, n, share)))
