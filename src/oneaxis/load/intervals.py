"""Intervals of what a cell measures, none of which assumes a distribution.

- A percentile: from two order statistics (Conover, Practical Nonparametric Statistics, 3.2).
- A share: Clopper and Pearson, Biometrika 26, 1934. It covers at least as often as it says.
- A sum over requests: bootstrap over the requests, seeded.

The first two are exact for requests that have nothing to do with each other. Neighbours in a queue share their fate,
and the gaps of one request theirs: an **effective number** then stands for n (Woodruff, JASA 47, 1952). Of requests it
comes from the means of `BATCHES` batches in the order of time, where these differ by more than chance has it (the 95%
point of chi-square), and is then lowered by what so few batches leave unknown (the ratio of t to normal, squared). Of
gaps it comes from the spread of the requests about the share below the percentile.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr, betaincinv, chdtri, ndtri, stdtrit

CONFIDENCE = 0.95
RESAMPLES = 2000
BATCHES = 10


def binomial_quantile(probability: float, n: int, share: float) -> int:
    """The smallest k with P(B <= k) >= probability, for B ~ Binomial(n, share).

    By the distribution function: `scipy.stats` alone takes half a second to import, at every run's report.
    """
    return bisect_left(range(n + 1), probability, key=lambda k: float(bdtr(k, n, share)))


def effective_number(flags: Sequence[bool] | np.ndarray) -> float:
    """How many independent trials this series is worth, at most its length.

    Args:
        flags: one per request, in the order of time. Fewer than three a batch, or all alike, say nothing: they count in
            full.
    """
    series = np.asarray(flags, dtype=float)
    n, share = len(series), float(series.mean()) if len(series) else 0.0
    if n < 3 * BATCHES or share in (0.0, 1.0):
        return float(n)
    means = [float(batch.mean()) for batch in np.array_split(series, BATCHES)]
    inflation = float(np.var(means, ddof=1)) / BATCHES / (share * (1 - share) / n)
    if inflation <= chdtri(BATCHES - 1, 0.05) / (BATCHES - 1):
        return float(n)
    unknown = (float(stdtrit(BATCHES - 1, 0.975)) / float(ndtri(0.975))) ** 2
    return max(n / (inflation * unknown), float(BATCHES))


def quantile_interval(
    values: Sequence[float], quantile: float, confidence: float = CONFIDENCE
) -> tuple[float | None, float | None]:
    """A distribution-free interval for a quantile; a side that so few values cannot bound is None.

    Args:
        values: one per request, in the order of time; a request that failed counts as infinity. quantile: in (0, 1).
    """
    if not values:
        return None, None
    ordered = np.sort(np.asarray(values, dtype=float))
    below = np.asarray(values, dtype=float) <= _at(ordered, quantile)
    return _order_statistics(ordered, quantile, effective_number(below), confidence)


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
    n, value = len(samples), _at(samples, quantile)
    # The variance of the share below `value`, as a ratio of sums over clusters.
    off = np.array([float((cluster <= value).sum()) - quantile * len(cluster) for cluster in filled])
    variance = m / (m - 1) * float(((off - off.mean()) ** 2).sum()) / n**2
    # No more certain than independent samples would be, no less than one sample a request.
    effective = min(max(quantile * (1 - quantile) / variance if variance > 0 else n, m), n)
    return _order_statistics(samples, quantile, effective, confidence)


def _at(ordered: np.ndarray, quantile: float) -> float:
    """The nearest-rank quantile."""
    return float(ordered[max(math.ceil(quantile * len(ordered) - 1e-9) - 1, 0)])


def _order_statistics(
    ordered: np.ndarray, quantile: float, effective: float, confidence: float
) -> tuple[float | None, float | None]:
    """The ranks of a binomial of `effective` trials, in proportion among all."""
    n, trials, tail = len(ordered), int(effective), (1 - confidence) / 2
    low, high = binomial_quantile(tail, trials, quantile), binomial_quantile(1 - tail, trials, quantile) + 1
    bottom = ordered[max(low * n // trials - 1, 0)] if low >= 1 else None
    top = ordered[min(-(-high * n // trials) - 1, n - 1)] if high <= trials else None
    return _finite(bottom), _finite(top)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def exact_share_interval(hits: float, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share; `n` > 0 may be an effective number, and `hits` its share of it."""
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
