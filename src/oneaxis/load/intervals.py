"""Intervals of what a cell measures, none of which assumes a distribution. Requests count as independent.

- A percentile: from two order statistics (Conover, Practical Nonparametric Statistics, 3.2).
- A percentile of samples that come in clusters, as the token gaps of a request do: the same with the effective number
  of samples, from the spread of the clusters about the share below it (Woodruff, JASA 47, 1952).
- A share: Clopper and Pearson, Biometrika 26, 1934. It covers at least as often as it says.
- A sum over requests: bootstrap over the requests, seeded.

Neighbours in a queue share their fate, so near capacity true intervals are wider than these; repeated runs tell.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr, betaincinv

CONFIDENCE = 0.95
RESAMPLES = 2000


def binomial_quantile(probability: float, n: int, share: float) -> int:
    """The smallest k with P(B <= k) >= probability, for B ~ Binomial(n, share).

    By the distribution function: `scipy.stats` alone takes half a second to import, at every run's report.
    """
    return bisect_left(range(n + 1), probability, key=lambda k: float(bdtr(k, n, share)))


def quantile_interval(
    values: Sequence[float], quantile: float, confidence: float = CONFIDENCE
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
    return _finite(bottom), _finite(top)


def clustered_quantile_interval(
    clusters: Sequence[Sequence[float]], quantile: float, confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """An interval for a quantile of all samples, which come in clusters (the token gaps of one request).

    Args:
        clusters: one list of samples a request; what never came is infinity.
    """
    filled = [np.asarray(cluster, dtype=float) for cluster in clusters if len(cluster)]
    m = len(filled)
    if m < 2:
        return None, None
    samples = np.sort(np.concatenate(filled))
    n = len(samples)
    value = samples[max(math.ceil(quantile * n - 1e-9) - 1, 0)]
    # The variance of the share below `value`, as a ratio of sums over clusters.
    off = np.array([float((cluster <= value).sum()) - quantile * len(cluster) for cluster in filled])
    variance = m / (m - 1) * float(((off - off.mean()) ** 2).sum()) / n**2
    # No more certain than independent samples would be, no less than one sample a request.
    effective = min(max(quantile * (1 - quantile) / variance if variance > 0 else n, m), n)
    trials, tail = int(effective), (1 - confidence) / 2
    low, high = binomial_quantile(tail, trials, quantile), binomial_quantile(1 - tail, trials, quantile) + 1
    bottom = samples[max(math.floor(low / trials * n) - 1, 0)] if low >= 1 else None
    top = samples[min(math.ceil(high / trials * n) - 1, n - 1)] if high <= trials else None
    return _finite(bottom), _finite(top)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def exact_share_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share; n >= 1."""
    assert 0 <= hits <= n
    assert n > 0
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, n - hits + 1, tail))
    high = 1.0 if hits == n else float(betaincinv(hits + 1, n - hits, 1 - tail))
    return low, high


def sum_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Percentile bootstrap of a sum over requests, with the number of requests as it is; the same each time."""
    array = np.asarray(values, dtype=float)
    n = len(array)
    assert n > 0
    kinds, counts = np.unique(array, return_counts=True)
    draws = np.random.default_rng(0).multinomial(n, counts / n, size=RESAMPLES) @ kinds
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)
