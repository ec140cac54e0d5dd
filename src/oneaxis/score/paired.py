"""McNemar's test: do two scorers differ on the same items, or is it a tie?"""

import math


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p-value of McNemar's test, exact at every size (McNemar, 1947; the binomial form).

    Under the null each discordant item falls either way with probability 1/2. The exact sum is cheap at any size met
    here, so there is no switch to the chi-squared approximation.

    Args:
        only_first, only_second: items that only the first, or only the second, answered correctly.

    Returns:
        p in (0, 1]; 1 when no item is discordant.
    """
    assert only_first >= 0
    assert only_second >= 0
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**total)
