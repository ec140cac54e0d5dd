"""Negative log-likelihood per token on held-out text; perplexity is exp of its mean.

Windows do not overlap: a token's context is what stands before it in its own sequence. The head is applied to a few
hundred positions at a time, so the logits of a whole batch never exist at once.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import torch
from scipy.special import stdtrit
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from oneaxis.quantize.text import Sequences

HEAD_ROWS = 256
CONFIDENCE = 0.95


@torch.inference_mode()
def hidden_nll(logits: Callable[[Tensor], Tensor], hidden_STD: Tensor, sequences: Sequences) -> pl.DataFrame:
    """One row per predicted token: sequence i64, position i64 (of the token), source str, nll f64 (nats).

    Args:
        logits: the output head, [N, D] -> [N, V]. hidden_STD: what it is given, after the final norm.
    """
    hidden_ND, target_N = hidden_STD[:, :-1].flatten(0, 1), sequences.token_ids_ST[:, 1:].flatten()
    pieces = zip(hidden_ND.split(HEAD_ROWS), target_N.split(HEAD_ROWS), strict=True)
    return _table([_nll(logits(piece_ND), ids_N) for piece_ND, ids_N in pieces], sequences)


@torch.inference_mode()
def whole_model_nll(model: PreTrainedModel, sequences: Sequences) -> pl.DataFrame:
    """The same from the model's own logits, whatever it does to them, one sequence at a time."""
    bar = tqdm(sequences.token_ids_ST, desc="held-out text", unit="sequence", delay=3)
    return _table([_nll(model(ids_T[None], use_cache=False).logits[0, :-1], ids_T[1:]) for ids_T in bar], sequences)


def _nll(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_NV.float(), target_N, reduction="none").double()


def _table(pieces: list[Tensor], sequences: Sequences) -> pl.DataFrame:
    """From the NLL of every token but the first of each sequence, in order."""
    nll_ST = torch.full(sequences.token_ids_ST.shape, float("nan"), dtype=torch.float64)
    nll_ST[:, 1:] = torch.cat(pieces).view(len(nll_ST), -1)
    table = sequences.frame().with_columns(nll=pl.Series(nll_ST.flatten().numpy()))
    return table.filter("predicted").select("sequence", "position", "source", "nll")


def perplexity(table: pl.DataFrame) -> float:
    """exp of the mean NLL over all tokens."""
    return math.exp(float(table["nll"].mean()))  # type: ignore[arg-type]


def compare(before: pl.DataFrame, after: pl.DataFrame) -> dict[str, Any]:
    """perplexity.json: before, after, their ratio, and the difference in NLL per token, paired by sequence.

    The interval is Student's t over the sequences (tokens of one sequence are not independent); one sequence has none.
    """
    keys = ["sequence", "position"]
    assert before.select(keys).equals(after.select(keys)), "before and after are not of the same tokens"
    delta = clustered_mean((after["nll"] - before["nll"]).to_numpy(), before["sequence"].to_numpy())
    return {
        "before": perplexity(before),
        "after": perplexity(after),
        "ratio": perplexity(after) / perplexity(before),
        "delta_nll": delta,
        "n": before["sequence"].n_unique(),
        "num_tokens": before.height,
        "confidence": CONFIDENCE,
    }


def clustered_mean(values: np.ndarray, clusters: np.ndarray, confidence: float = CONFIDENCE) -> dict[str, Any]:
    """Mean of all values as effect, with the interval ci_low, ci_high that counts clusters, not values.

    Values of one cluster (tokens of a sequence) are not independent. The interval is Student's t on what each of the m
    clusters adds to the mean (Cochran, Sampling Techniques, 1977, section 9A: ratio of cluster totals); for clusters
    of one size this is the t interval of the clusters' means. One cluster has none.

    Args:
        values: n finite numbers, n >= 1. clusters: the cluster of each, any integers.
    """
    _, cluster = np.unique(clusters, return_inverse=True)
    sizes, sums = np.bincount(cluster), np.bincount(cluster, weights=values)
    m, mean = len(sizes), float(values.mean())
    if m == 1:
        return {"effect": mean, "ci_low": None, "ci_high": None}
    spread = float((sums - mean * sizes).std(ddof=1) / sizes.mean())
    margin = float(stdtrit(m - 1, (1 + confidence) / 2)) * spread / math.sqrt(m)
    return {"effect": mean, "ci_low": mean - margin, "ci_high": mean + margin}
