"""The statistics of a verdict: paired tests, their intervals, and the correction for several claims.

Sources: sign-flip (randomisation) test, Fisher, The Design of Experiments, 1935, section 21; score interval of a paired
difference of proportions, Tango, Statistics in Medicine 17, 1998; Holm, Scandinavian Journal of Statistics 6, 1979.

These stand apart from `paired.py`, on which the training and quantisation stages depend: what only verdicts need must
not run a stage again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

EXACT_PAIRS = 20
"""Up to here all 2^n sign assignments are enumerated."""
RANDOM_FLIPS = 200_000


def sign_flip(differences: Sequence[float] | np.ndarray) -> float:
    """Two-sided p-value of the sign-flip test of paired differences; exact up to 20 pairs.

    Under the null each difference is as likely to have the other sign; p is the share of the 2^n assignments whose
    mean is at least as far from zero as the one seen. It can be no smaller than 2^(1-n): five pairs cannot reach 0.05.

    Args:
        differences: n finite numbers, n >= 1.
    """
    d = np.asarray(differences, dtype=np.float64)
    assert d.ndim == 1
    assert len(d) >= 1
    assert np.isfinite(d).all()
    seen = abs(float(d.sum()))
    # Sums that are equal but for rounding count as equal: the observed assignment is one of them.
    bound = seen - 1e-9 * float(np.abs(d).sum())
    if len(d) <= EXACT_PAIRS:
        # A global change of sign leaves |sum| as it is, so the first difference keeps its sign.
        sums = d[:1]
        for value in d[1:]:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= bound).mean())
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(RANDOM_FLIPS, len(d)))
    return float(((np.abs(signs @ d) >= bound).sum() + 1) / (RANDOM_FLIPS + 1))


def fewest_pairs(confidence: float) -> int:
    """The fewest pairs with which the sign-flip test can reach `1 - confidence` at all (95%: 6)."""
    return math.ceil(1 - math.log2(1 - confidence) - 1e-12)


def paired_t_p(differences: Sequence[float] | np.ndarray) -> float:
    """Two-sided p-value of the paired t test; n >= 2. Differences that are all equal give 0, or 1 where they are 0."""
    d = np.asarray(differences, dtype=np.float64)
    assert len(d) >= 2
    mean, spread = float(d.mean()), float(d.std(ddof=1))
    if spread == 0:
        return 0.0 if mean else 1.0
    return float(2 * stdtr(len(d) - 1, -abs(mean) / (spread / math.sqrt(len(d)))))


def pairs_needed(deviation: float, margin: float, confidence: float) -> int | None:
    """The fewest pairs whose t interval is narrower than `margin` on either side; None beyond 100,000.

    Args:
        deviation: standard deviation of the paired differences. margin: half the width that is wanted, > 0.
    """
    n = 2
    while n <= 100_000:
        if float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation / math.sqrt(n) < margin:
            return n
        n += 1 if n < 100 else n // 50
    return None


def paired_share_interval(gained: int, lost: int, n: int, confidence: float) -> tuple[float, float]:
    """Tango's score interval of (gained - lost) / n, the change of a share on the same n items.

    At a difference of zero its statistic is McNemar's, so interval and test agree but for the exact tail. With no
    discordant item at all it still has a width, where a bootstrap would claim certainty.

    Args:
        gained, lost: items right only in the candidate, only in the baseline.
    """
    assert min(gained, lost) >= 0
    assert n >= max(gained + lost, 1)
    critical = float(ndtri((1 + confidence) / 2))

    def statistic(difference: float) -> float:
        b = -gained - lost + (2 * n - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * q + difference * (1 - difference))
        top = gained - lost - n * difference
        if variance <= 0:
            return math.copysign(math.inf, top) if top else 0.0
        return top / math.sqrt(variance)

    estimate = (gained - lost) / n
    return (
        _bisect(statistic, critical, -1.0, estimate),
        _bisect(statistic, -critical, estimate, 1.0),
    )


def no_narrower_share(effect: float, low: float, high: float, n: int, confidence: float) -> tuple[float, float]:
    """An interval of a change of a share, widened to Tango's of n items without a difference, within -1 to 1.

    The same answers twice do not prove the next one: differences that do not vary give an interval of no width.
    """
    least = paired_share_interval(0, 0, n, confidence)
    return max(min(low, effect + least[0]), -1.0), min(max(high, effect + least[1]), 1.0)


def _bisect(statistic: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the falling `statistic` passes `target`, between `low` and `high`."""
    for _ in range(80):
        middle = (low + high) / 2
        if statistic(middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Difference:
    """Of two samples: an interval of `candidate - baseline`, and what a test says."""

    ci_low: float
    ci_high: float
    p_value: float
    deviation: float
    """Of the difference of one unit of each."""
    p_welch: float = math.nan


def two_samples(baseline: np.ndarray, candidate: np.ndarray, confidence: float) -> Difference:
    """Two samples that are not paired: Welch's t interval of the difference of means, and a permutation test of it.

    The permutation test is exact up to `RANDOM_FLIPS` ways to share the values out (so for 10 against 10), else of
    random ones. Source: Welch, Biometrika 34, 1947; Fisher, The Design of Experiments, 1935.

    Args:
        baseline, candidate: two finite numbers each or more.
    """
    sizes = (len(baseline), len(candidate))
    assert min(sizes) >= 2
    variances = [float(np.var(each, ddof=1)) / len(each) for each in (baseline, candidate)]
    effect, error = float(candidate.mean() - baseline.mean()), math.sqrt(sum(variances))
    pooled = np.concatenate([baseline, candidate])
    p = _permutation(pooled, sizes[1], effect)
    deviation = math.sqrt(variances[0] * sizes[0] + variances[1] * sizes[1])
    if error == 0:
        return Difference(effect, effect, p, 0.0, 0.0 if effect else 1.0)
    freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v, n in zip(variances, sizes, strict=True))
    margin = float(stdtrit(freedom, (1 + confidence) / 2)) * error
    return Difference(effect - margin, effect + margin, p, deviation, float(2 * stdtr(freedom, -abs(effect) / error)))


def _permutation(pooled: np.ndarray, num_candidate: int, effect: float) -> float:
    """Share of the ways to choose the candidate's values whose difference of means is as far from zero."""
    n, total = len(pooled), float(pooled.sum())
    bound = abs(effect) - 1e-9 * float(np.abs(pooled).max())

    def as_far(sums: np.ndarray) -> np.ndarray:
        return np.abs(sums / num_candidate - (total - sums) / (n - num_candidate)) >= bound

    if math.comb(n, num_candidate) <= RANDOM_FLIPS:
        sums = np.fromiter((sum(chosen) for chosen in combinations(pooled.tolist(), num_candidate)), np.float64)
        return float(as_far(sums).mean())
    draw = np.random.default_rng(0)
    sums = np.array([draw.permutation(pooled)[:num_candidate].sum() for _ in range(20_000)])
    return float((as_far(sums).sum() + 1) / (len(sums) + 1))


RESAMPLES = 2_000


def bootstrap_difference(
    baseline: Callable[[np.ndarray], float],
    candidate: Callable[[np.ndarray], float],
    sizes: tuple[int, int],
    *,
    paired: bool,
    confidence: float,
) -> Difference | None:
    """Percentile bootstrap of the difference of a figure between two sets of units; None where it is not bounded.

    Args:
        baseline, candidate: from the places of units, some of them repeated, to the figure; infinite: not reached.
        sizes: number of units of each.
        paired: whether unit k is the same in both: both are then drawn alike.
    """
    draw = np.random.default_rng(0)
    differences = np.empty(RESAMPLES)
    for place in range(RESAMPLES):
        rows = draw.integers(sizes[0], size=sizes[0])
        others = rows if paired else draw.integers(sizes[1], size=sizes[1])
        one, other = baseline(rows), candidate(others)
        differences[place] = other - one if math.isfinite(one) or math.isfinite(other) else math.nan
    known = differences[~np.isnan(differences)]
    # Infinite ones stand at the ends, where the interval reaches them or does not.
    if len(known) < RESAMPLES * (1 + confidence) / 2:
        return None
    low, high = (
        float(np.quantile(known, end, method="nearest")) for end in ((1 - confidence) / 2, (1 + confidence) / 2)
    )
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    beyond = min(float((known <= 0).mean()), float((known >= 0).mean()))
    finite = known[np.isfinite(known)]
    return Difference(low, high, min(1.0, max(2 * beyond, 1 / RESAMPLES)), float(finite.std()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: below alpha, all of them hold together with error alpha."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def spread(values: Sequence[float]) -> float:
    """(max - min) / max |value|: how far the repetitions of one arm lie apart; 0 when all are zero."""
    top = max(abs(value) for value in values)
    return (max(values) - min(values)) / top if top else 0.0
