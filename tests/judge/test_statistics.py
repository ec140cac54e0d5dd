"""Oracles: scipy's permutation and t tests, brute force, the score equations solved by number, closed forms."""

import itertools

import numpy as np
import pytest
from scipy import optimize, stats

from oneaxis.judge.statistics import (
    fewest_pairs,
    holm,
    paired_share_interval,
    paired_t_p,
    pairs_needed,
    sign_flip,
    spread,
)
from oneaxis.score.paired import mcnemar_exact


def test_sign_flip_worked_by_hand() -> None:
    # 1, 2, 3: |sum| is 6 in 2 of 8 assignments. 1, 2, -3: |sum| 0 is reached by all. Six of one sign: 2/64.
    assert sign_flip([1, 2, 3]) == 0.25
    assert sign_flip([1, 2, -3]) == 1
    assert sign_flip([0.1] * 6) == 2 / 64
    assert sign_flip([0.0, 0.0]) == 1


@pytest.mark.parametrize("n", [2, 5, 6, 9])
def test_sign_flip_is_scipys_permutation_test(n: int) -> None:
    d = np.random.default_rng().normal(0.5, 1, n)
    exact = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(d) == pytest.approx(exact.pvalue, abs=1e-12)


def test_sign_flip_is_brute_force_with_ties() -> None:
    d = np.random.default_rng().integers(-3, 4, 11) * 0.1
    sums = [abs(float(np.dot(signs, d))) for signs in itertools.product((1, -1), repeat=11)]
    assert sign_flip(d) == np.mean([s >= abs(d.sum()) - 1e-9 for s in sums])


def test_sign_flip_beyond_twenty_pairs_is_close_to_the_t_test() -> None:
    d = np.random.default_rng(4).normal(0.3, 1, 40)
    assert sign_flip(d) == pytest.approx(paired_t_p(d), abs=0.01)


def test_fewest_pairs() -> None:
    # 2^(1-n) <= 0.05 first at n = 6 (1/32), <= 0.1 at 5 (1/16), <= 0.01 at 8 (1/128); 0.5: n = 2, exactly.
    assert [fewest_pairs(c) for c in (0.95, 0.9, 0.99, 0.5)] == [6, 5, 8, 2]
    assert sign_flip([1.0] * 6) <= 0.05 < sign_flip([1.0] * 5)


def test_paired_t_is_scipys() -> None:
    draw = np.random.default_rng()
    a, b = draw.normal(size=9), draw.normal(size=9)
    assert paired_t_p(b - a) == pytest.approx(stats.ttest_rel(b, a).pvalue, rel=1e-9)
    assert (paired_t_p([2, 2, 2]), paired_t_p([0, 0, 0])) == (0, 1)


def test_pairs_needed_is_the_first_that_is_narrow_enough() -> None:
    n = pairs_needed(2.0, 0.9, 0.95)
    assert n is not None

    def half(n: int) -> float:
        return float(stats.t.ppf(0.975, n - 1)) * 2.0 / n**0.5

    assert half(n) < 0.9 <= half(n - 1)
    assert pairs_needed(1.0, 1e-9, 0.95) is None


def score_bound(gained: int, lost: int, n: int, side: float) -> float:
    """Tango's bound the long way: the restricted likelihood is maximised by number, and the score equation solved."""

    def z(d: float) -> float:
        def minus_log(p_lost: float) -> float:
            p_gained = p_lost + d
            rest = 1 - p_lost - p_gained
            # x log p, and 0 where x is 0
            terms = ((gained, p_gained), (lost, p_lost), (n - gained - lost, rest))
            return -sum(x * np.log(p) if x else 0.0 for x, p in terms)

        low, high = max(0.0, -d) + 1e-12, (1 - d) / 2 - 1e-12
        q = optimize.minimize_scalar(minus_log, bounds=(low, high), method="bounded", options={"xatol": 1e-13}).x
        return (gained - lost - n * d) / np.sqrt(n * (2 * q + d - d * d))

    estimate = (gained - lost) / n
    ends = (-0.999, estimate) if side > 0 else (estimate, 0.999)
    return float(optimize.brentq(lambda d: z(d) - side * stats.norm.ppf(0.975), *ends))


@pytest.mark.parametrize(("gained", "lost", "n"), [(12, 2, 50), (3, 9, 200), (30, 31, 276), (1, 4, 40)])
def test_share_interval_solves_the_score_equations(gained: int, lost: int, n: int) -> None:
    low, high = paired_share_interval(gained, lost, n, 0.95)
    assert low == pytest.approx(score_bound(gained, lost, n, +1), abs=2e-4)
    assert high == pytest.approx(score_bound(gained, lost, n, -1), abs=2e-4)


def test_share_interval_holds_zero_exactly_when_mcnemars_statistic_is_small() -> None:
    draw = np.random.default_rng()
    for _ in range(200):
        n = int(draw.integers(20, 300))
        gained = int(draw.integers(0, n // 2))
        lost = int(draw.integers(0, n // 2))
        if gained + lost == 0:
            continue
        low, high = paired_share_interval(gained, lost, n, 0.95)
        z = abs(gained - lost) / (gained + lost) ** 0.5
        assert (low < 0 < high) == (z < stats.norm.ppf(0.975))
        swapped = paired_share_interval(lost, gained, n, 0.95)
        assert swapped == pytest.approx((-high, -low), abs=1e-9)


def test_share_interval_without_discordant_items_still_has_a_width() -> None:
    # z at a difference d with nothing discordant is -n d / sqrt(n d (1 - d)): its bound is z^2 / (n + z^2).
    z2 = stats.norm.ppf(0.975) ** 2
    low, high = paired_share_interval(0, 0, 200, 0.95)
    assert high == pytest.approx(z2 / (200 + z2), abs=1e-9)
    assert low == pytest.approx(-high, abs=1e-9)


def test_share_interval_covers() -> None:
    draw = np.random.default_rng(11)
    counts = draw.multinomial(120, [0.10, 0.05, 0.85], size=1500)
    bounds = {
        tuple(row): paired_share_interval(int(row[0]), int(row[1]), 120, 0.95) for row in np.unique(counts, axis=0)
    }
    covered = np.mean([bounds[tuple(row)][0] <= 0.05 <= bounds[tuple(row)][1] for row in counts])
    assert covered == pytest.approx(0.95, abs=0.018)


def test_247_against_246_of_276_is_a_tie_at_any_discordance() -> None:
    for lost in range(30):
        low, high = paired_share_interval(lost + 1, lost, 276, 0.95)
        assert low < 0 < high
        assert mcnemar_exact(lost + 1, lost) == 1


def test_holm_worked_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04 times 3, 2, 1: 0.03, 0.04, 0.04; order kept. Steps never fall: 0.02 x 2 over 0.03.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.01, 0.011]) == pytest.approx([0.02, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_keeps_the_family_error_where_single_tests_do_not() -> None:
    p = np.random.default_rng(6).uniform(size=(4000, 5))
    assert np.mean([min(holm(list(row))) <= 0.05 for row in p]) == pytest.approx(0.05, abs=0.012)
    assert (p.min(axis=1) <= 0.05).mean() > 0.2


def test_spread() -> None:
    assert spread([90.0, 100.0, 95.0]) == pytest.approx(0.1)
    assert spread([0.0, 0.0]) == 0
