"""CHES, the centered hidden embedding similarity of a preference pair: how much DPO is expected to displace it.

Razin et al., 2024, "Unintentional Unalignment: Likelihood Displacement in Direct Preference Optimization". With h the
hidden state after the final norm that predicts a token, and S = sum of h over the tokens of a response (from the last
prompt token to the second-to-last token of prompt + response):

    CHES(x, y+, y-)    = <S+, S-> - ||S+||^2
    ln-CHES(x, y+, y-) = <S+, S-> / (|y+| |y-|) - ||S+||^2 / |y+|^2

Higher expects more displacement. CHES follows the length difference of the responses; the length-normalised form is
the one that ranks pairs of unequal length. "Centered" means minus the preferred response's own term, and nothing else:
a version in circulation subtracts the pair's mean from both vectors and takes their cosine, which is -1 for every pair.
Plain cosine of the two sums is reported beside the scores.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ches:
    """Scores of N pairs, each float64 (N,)."""

    ches: np.ndarray
    ln_ches: np.ndarray
    cosine: np.ndarray


def ches_scores(
    chosen_sums: np.ndarray, rejected_sums: np.ndarray, chosen_tokens: np.ndarray, rejected_tokens: np.ndarray
) -> Ches:
    """Scores from the summed hidden states.

    Args:
        chosen_sums, rejected_sums: float64 (N, D), S+ and S-.
        chosen_tokens, rejected_tokens: (N,) number of summed positions, each at least 1.
    """
    cross = (chosen_sums * rejected_sums).sum(axis=1)
    chosen_square = (chosen_sums * chosen_sums).sum(axis=1)
    rejected_square = (rejected_sums * rejected_sums).sum(axis=1)
    chosen_tokens, rejected_tokens = chosen_tokens.astype(np.float64), rejected_tokens.astype(np.float64)
    norms = np.sqrt(chosen_square * rejected_square)
    return Ches(
        ches=cross - chosen_square,
        ln_ches=cross / (chosen_tokens * rejected_tokens) - chosen_square / chosen_tokens**2,
        cosine=np.divide(cross, norms, out=np.zeros_like(cross), where=norms > 0),
    )
