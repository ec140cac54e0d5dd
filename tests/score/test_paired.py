"""McNemar against hand-worked binomials, and against scipy's binomial test on random counts."""

import random

import pytest
from scipy import stats

from oneaxis.score.paired import mcnemar_exact


@pytest.mark.parametrize("common", [0, 1, 10, 29])
def test_247_against_246_of_276_is_a_tie(common: int) -> None:
    """Right by one item of 276: b = c + 1, whatever the number of discordant items (at most 29 + 30)."""
    assert mcnemar_exact(common + 1, common) == 1


def test_hand_worked() -> None:
    # 5 discordant, all one way: 2 * (1/2)^5 = 1/16. 1 of 7: 2 * (1 + 7) / 128 = 1/8. None: no evidence.
    assert mcnemar_exact(5, 0) == 1 / 16
    assert mcnemar_exact(1, 6) == mcnemar_exact(6, 1) == 1 / 8
    assert mcnemar_exact(0, 0) == 1
    assert mcnemar_exact(4, 4) == 1


def test_scipys_binomial_test_agrees_at_any_size() -> None:
    draw = random.Random(0)
    for high in (30, 300, 5000):
        for _ in range(10):
            b, c = draw.randint(1, high), draw.randint(1, high)
            assert mcnemar_exact(b, c) == pytest.approx(stats.binomtest(b, b + c).pvalue, rel=1e-9)
