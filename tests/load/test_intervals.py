"""Intervals against worked numbers, and against their promised coverage on drawn samples."""

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from oneaxis.judge.shares import share_interval
from oneaxis.load.intervals import (
    binomial_quantile,
    clustered_quantile_interval,
    effective_number,
    exact_share_interval,
    quantile_interval,
    sum_interval,
)


def test_median_interval_of_ten() -> None:
    """Binomial(10, 1/2): P(B <= 1) = 0.0107, P(B <= 2) = 0.0547: the interval is from the 2nd to the 9th value."""
    assert quantile_interval([float(i) for i in range(10, 0, -1)], 0.5) == (2.0, 9.0)


def test_binomial_quantile_is_that_of_scipy_stats() -> None:
    """Oracle: scipy.stats, which the report does not import."""
    for n in (1, 10, 299, 5000):
        for share in (0.5, 0.9, 0.99):
            for probability in (0.025, 0.3, 0.975):
                assert binomial_quantile(probability, n, share) == int(binom.ppf(probability, n, share))


def test_a_side_that_is_not_bounded_is_none() -> None:
    assert quantile_interval([1.0, 2.0, 3.0], 0.9)[1] is None
    assert quantile_interval([], 0.5) == (None, None)
    # Half of the requests failed: the median has no finite upper end.
    assert quantile_interval([1.0] * 10 + [float("inf")] * 10, 0.5)[1] is None


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_quantile_interval_covers(quantile: float) -> None:
    draw = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        low, high = quantile_interval(draw.uniform(size=80).tolist(), quantile)
        inside += (low is None or low <= quantile) and (high is None or quantile <= high)
    assert inside / 400 >= 0.94


def test_wilson_interval() -> None:
    """Newcombe (1998), table I: 81 of 263 -> 0.2553 to 0.3662; 0 of 20 -> 0 to 0.1611."""
    assert share_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert share_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_exact_share_interval_is_scipys_and_covers_as_it_says() -> None:
    """Oracles: scipy.stats.binomtest; and the coverage, summed over every outcome of Binomial(n, share)."""
    for hits, n in ((0, 20), (20, 20), (1, 7), (45, 50), (270, 300)):
        theirs = binomtest(hits, n).proportion_ci(0.95, method="exact")
        assert exact_share_interval(hits, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    for n, share in ((10, 0.9), (50, 0.9), (50, 0.97), (299, 0.99)):
        intervals = [exact_share_interval(hits, n) for hits in range(n + 1)]
        covered = sum(binom.pmf(k, n, share) for k, (low, high) in enumerate(intervals) if low <= share <= high)
        assert covered >= 0.95


def test_gaps_of_one_request_count_less_than_gaps_of_many() -> None:
    """Drawn requests, whose 40 gaps share a level of their own: an interval that took them as independent would cover
    the 90th percentile far too rarely. Oracle: the percentile of a million such requests."""
    draw = np.random.default_rng(3)

    def gaps(requests: int) -> np.ndarray:
        return draw.exponential(1, size=(requests, 1)) + draw.uniform(0, 0.2, size=(requests, 40))

    true = float(np.quantile(gaps(1_000_000)[:, :2], 0.9))
    clustered = independent = 0
    for _ in range(300):
        drawn = gaps(100)
        low, high = clustered_quantile_interval(drawn.tolist(), 0.9)
        clustered += low is not None and high is not None and low <= true <= high
        low, high = quantile_interval(draw.permutation(drawn.ravel()).tolist(), 0.9)
        independent += low is not None and high is not None and low <= true <= high
    assert clustered / 300 >= 0.9
    assert independent / 300 <= 0.6
    # Gaps that have nothing to do with their request: the plain interval, nearly.
    free = draw.uniform(size=(100, 40))
    plain = quantile_interval(free.ravel().tolist(), 0.9)
    assert clustered_quantile_interval(free.tolist(), 0.9) == pytest.approx(plain, abs=0.02)
    assert clustered_quantile_interval([[1.0, 2.0], []], 0.5) == (None, None)


def test_sum_interval_covers_a_sum_of_drawn_values() -> None:
    draw = np.random.default_rng(5)
    inside = 0
    for _ in range(200):
        low, high = sum_interval((draw.integers(10, 60, size=80) * (draw.uniform(size=80) < 0.8)).tolist())
        inside += low <= 80 * 34.5 * 0.8 <= high
    assert 0.9 <= inside / 200 <= 0.99
    assert sum_interval([3.0] * 10) == (30.0, 30.0)


def test_requests_of_a_queue_are_worth_fewer_than_they_are() -> None:
    """A queue with one server at 70% of its capacity, from empty; its waiting times by Lindley's recursion. Oracle: the
    share that waits at most 0.3 s in a run of two million. An interval that took the requests as independent covers it
    four times in five."""

    def waits(n: int, seed: int) -> np.ndarray:
        draw = np.random.default_rng(seed)
        steps = 0.1 - draw.exponential(1 / 7, size=n)
        walk = np.concatenate([[0.0], np.cumsum(steps)])
        return (walk - np.minimum.accumulate(walk))[:-1]

    true = float((waits(2_000_000, 0) <= 0.3).mean())
    covered = plain = 0
    for seed in range(1, 301):
        within = waits(500, seed) <= 0.3
        n = effective_number(within)
        assert 10 <= n <= 500
        low, high = exact_share_interval(within.mean() * n, n)
        covered += low <= true <= high
        low, high = exact_share_interval(int(within.sum()), 500)
        plain += low <= true <= high
    assert plain / 300 < 0.85
    assert covered / 300 >= 0.9


def test_independent_requests_count_in_full() -> None:
    draw = np.random.default_rng(8)
    full = sum(effective_number(draw.uniform(size=200) < 0.9) == 200 for _ in range(300))
    # The 95% point: one series of independent requests in twenty is taken for another.
    assert 0.9 <= full / 300 <= 0.98
    assert effective_number([True] * 40) == 40
    assert effective_number([True, False] * 10) == 20
