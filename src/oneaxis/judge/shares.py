"""The interval of one share (Wilson, 1927).

Apart from `statistics`: `sample_pairs` and `train_dpo` depend on this, and what only verdicts need must not run a stage
again.
"""

import math

from scipy.special import ndtri


def share_interval(hits: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share; `n` may be an effective number of units."""
    assert 0 <= hits <= n
    assert n > 0
    z = float(ndtri((1 + confidence) / 2))
    centre = (hits + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(hits * (n - hits) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)
