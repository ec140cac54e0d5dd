"""Oracle: a t interval worked by hand from the printed table of t quantiles, and its coverage under repetition."""

import numpy as np
import pytest

from oneaxis.judge.paired import paired_difference


def test_worked_by_hand() -> None:
    # Differences 1, 2, 3, 4, 5: mean 3, sample variance 10/4 = 2.5, standard error sqrt(2.5 / 5) = 0.70711.
    # t(0.975; 4 degrees of freedom) = 2.77645, so the margin is 1.96324.
    effect = paired_difference([10, 20, 30, 40, 50], [11, 22, 33, 44, 55])
    assert effect.effect == 3
    assert effect.ci_low == pytest.approx(3 - 1.96324, abs=1e-5)
    assert effect.ci_high == pytest.approx(3 + 1.96324, abs=1e-5)
    assert effect.n == 5
    # t(0.95; 4) = 2.13185: the 90% interval is narrower.
    assert paired_difference([0] * 5, [1, 2, 3, 4, 5], confidence=0.9).ci_low == pytest.approx(3 - 1.50744, abs=1e-5)


def test_sign_is_after_minus_before_and_pairing_removes_what_is_shared() -> None:
    shared = np.array([1000.0, -400.0, 3.0, 77.0])
    effect = paired_difference(shared, shared - 2)
    assert (effect.effect, effect.ci_low, effect.ci_high) == (-2, -2, -2)


def test_covers_at_its_confidence_with_few_pairs() -> None:
    random = np.random.default_rng(5)
    draws = random.normal(0.7, 2.0, size=(4000, 5))
    covered = sum(e.ci_low <= 0.7 <= e.ci_high for e in (paired_difference(np.zeros(5), row) for row in draws))
    assert covered / 4000 == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([1, 2], [1, 2, 3], "one length"),
        ([1], [2], "2 or more"),
        ([1, float("nan")], [1, 2], "finite"),
        ([1, 2], [1, float("inf")], "finite"),
    ],
)
def test_refuses(before: list[float], after: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(before, after)
