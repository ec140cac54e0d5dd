"""Intervals against worked numbers, and against their promised coverage on drawn samples."""

import numpy as np
import pytest
from scipy.stats import binom

from oneaxis.judge.shares import share_interval
from oneaxis.report.statistics import binomial_quantile, quantile_interval


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
