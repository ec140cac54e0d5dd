"""Negative log-likelihood per token on held-out text; perplexity is exp of its mean.

Windows do not overlap: a token's context is what stands before it in its own sequence. The head is applied to a few
hundred positions at a time, so the logits of a whole batch never exist at once.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import polars as pl
import torch
from scipy import stats
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from oneaxis.quantize.text import Sequences

HEAD_ROWS = 512
CONFIDENCE = 0.95


@torch.inference_mode()
def heldout_nll(
    model: PreTrainedModel,
    sequences: Sequences,
    batch_size: int,
    watch: AbstractContextManager[Any] | None = None,
) -> pl.DataFrame:
    """One row per predicted token: sequence i64, position i64 (of the token), source str, nll f64 (nats).

    Args:
        watch: hooks to keep on the decoder while it runs.
    """
    nll_ST = torch.full(sequences.token_ids_ST.shape, float("nan"), dtype=torch.float64)
    row = 0
    total = sequences.token_ids_ST.numel()
    with watch or nullcontext(), tqdm(total=total, unit="tok", desc="held-out NLL", delay=3) as bar:
        for batch in sequences.token_ids_ST.split(batch_size):
            hidden_BTD = model.model(input_ids=batch, use_cache=False).last_hidden_state
            nll = token_nll(model, hidden_BTD[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            nll_ST[row : row + len(batch), 1:] = nll.view(len(batch), -1)
            row += len(batch)
            bar.update(batch.numel())
    table = sequences.frame().with_columns(nll=pl.Series(nll_ST.flatten().numpy()))
    return table.filter("predicted").select("sequence", "position", "source", "nll")


def token_nll(model: PreTrainedModel, hidden_ND: Tensor, target_N: Tensor) -> Tensor:
    """-log p(target) of each of N positions, in nats, float64."""
    head = model.get_output_embeddings()
    pieces = [
        torch.nn.functional.cross_entropy(head(hidden).float(), target, reduction="none").double()
        for hidden, target in zip(hidden_ND.split(HEAD_ROWS), target_N.split(HEAD_ROWS), strict=True)
    ]
    return torch.cat(pieces)


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
    margin = float(stats.t.ppf((1 + confidence) / 2, m - 1)) * spread / math.sqrt(m)
    return {"effect": mean, "ci_low": mean - margin, "ci_high": mean + margin}
