"""What a quantised checkpoint says otherwise than the model it was made of, each measure paired, with its interval.

    perplexity          held-out text in windows that do not overlap, over all of it and by source
    KL(base || it)      per token, in nats: how far the whole distribution moved, not only the next word's probability
    top-1 agreement     share of tokens for which both hold the same next token most likely
    exact copies        `copying`: strings repeated to the last character

"Before" is float32 of the policy, which `calibrate` left: hidden states after the final norm, to which the head of the
checkpoint itself is applied (a head is never quantised). The checkpoint is run layer by layer, once, over both the
held-out text and the copies. A ratio of scores is nowhere: a recovery of 99% of a noisy score is no statement, its
difference with an interval is one. Tokens of one sequence are not independent, so intervals count sequences.

Dims: S sequences, T tokens, D hidden size, N rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from oneaxis.artifacts import read_json, write_json
from oneaxis.checkpoint.layerwise import Layerwise
from oneaxis.dvc_plots import copies_by_kind
from oneaxis.quantize.copying import CopyTasks, compare_copies, score_hidden
from oneaxis.quantize.nll import CONFIDENCE, clustered_mean, compare, perplexity
from oneaxis.quantize.text import Sequences, sequences_from_frame

BATCH_TOKENS = 2048
HEAD_ROWS = 128
"""Positions whose two distributions exist at once."""


def measure_quality(model: Layerwise, calibrated: Path, out: Path) -> dict[str, float]:
    """Measure a checkpoint against what `calibrate` measured of the policy.

    Writes heldout_nll.parquet (as calibrate's), quality.parquet (a row per predicted token: sequence i64, position i64,
    source str, kl f64 nats, same_top1 bool), perplexity.json, quality.json; where there are copies, copy.parquet and
    copies.csv (for `dvc plots`).

    Args:
        model: the written checkpoint. calibrated: the folder of `calibrate`. out: an existing folder.

    Returns:
        metrics without `quantize/` before their names; those of copies are missing where there are none.
    """
    unseen = sequences_from_frame(pl.read_parquet(calibrated / "heldout_tokens.parquet"))
    before = pl.read_parquet(calibrated / "heldout_nll.parquet")
    base_STD = load_file(calibrated / "heldout_hidden.safetensors")["hidden"]
    copies = calibrated / "copy_tokens.parquet"
    tasks = CopyTasks(pl.read_parquet(copies)) if copies.is_file() else None
    groups = [unseen.token_ids_ST, *(tasks.groups if tasks else [])]
    hidden_STD, *of_copies = run_together(model, groups)

    after, moved = compare_distributions(base_STD, hidden_STD, model.logits, unseen)
    after.write_parquet(out / "heldout_nll.parquet")
    moved.write_parquet(out / "quality.parquet")
    report = summarise(before, after, moved)
    write_json(out / "perplexity.json", report["perplexity"])
    if tasks is not None:
        scored = score_hidden(of_copies, model.logits, tasks)
        scored.write_parquet(out / "copy.parquet")
        base = pl.read_parquet(calibrated / "copy.parquet")
        copies_by_kind(base, scored).write_csv(out / "copies.csv")
        report["copies"] = compare_copies(base, scored)
        report["suite"] = read_json(calibrated / "copying.json")
    write_json(out / "quality.json", report)
    return quality_metrics(report)


def unchanged_quality(calibrated: Path, out: Path) -> dict[str, float]:
    """The same tables and names for a policy that is served as it is, so that it can be the baseline of any other.

    Writes heldout_nll.parquet, and copy.parquet and copies.csv where `calibrate` had copies.

    Returns:
        metrics without `quantize/` before their names: what has a value before and after.
    """
    nll = pl.read_parquet(calibrated / "heldout_nll.parquet")
    nll.write_parquet(out / "heldout_nll.parquet")
    metrics = {f"perplexity_{side}": perplexity(nll) for side in ("before", "after")}
    if (calibrated / "copy.parquet").is_file():
        scored = pl.read_parquet(calibrated / "copy.parquet")
        scored.write_parquet(out / "copy.parquet")
        copies_by_kind(scored, scored).write_csv(out / "copies.csv")
        if scored.height:
            metrics |= {f"copy_exact_{side}": float(scored["exact"].mean()) for side in ("before", "after")}  # type: ignore[arg-type]
    return metrics


def run_together(model: Layerwise, groups: Sequence[Tensor]) -> list[Tensor]:
    """Hidden states after the final norm [S, T, D] of several tensors of token ids; each layer is read once for all."""
    running = [model.start(ids_ST, max(1, BATCH_TOKENS // ids_ST.shape[1])) for ids_ST in groups]
    for index in tqdm(range(model.num_layers), desc="quality", unit="layer", delay=3):
        layer = model.layer(index)
        for hidden in running:
            model.advance(hidden, index, layer)
    return [model.outputs(hidden) for hidden in running]


@torch.inference_mode()
def compare_distributions(
    base_STD: Tensor, other_STD: Tensor, logits: Callable[[Tensor], Tensor], sequences: Sequences
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Two models on the same text, from their hidden states after the final norm.

    Args:
        logits: the output head, [N, D] -> [N, V], the same for both.

    Returns:
        the other's NLL, a row per predicted token: sequence i64, position i64 (of the token), source str, nll f64;
        the same rows with kl f64 = KL(base || other) in nats, and same_top1 bool.
    """
    target_N = sequences.token_ids_ST[:, 1:].flatten()
    base_ND, other_ND = (states_STD[:, :-1].flatten(0, 1) for states_STD in (base_STD, other_STD))
    nll, kl, same = [], [], []
    pieces = zip(base_ND.split(HEAD_ROWS), other_ND.split(HEAD_ROWS), target_N.split(HEAD_ROWS), strict=True)
    for base, other, target in tqdm(pieces, total=-(-len(target_N) // HEAD_ROWS), desc="KL", unit="piece", delay=3):
        base_NV, other_NV = _log_softmax(logits(torch.cat([base, other])).float()).split(len(base))
        nll.append(-other_NV.gather(1, target[:, None]).squeeze(1).double())
        same.append(base_NV.argmax(dim=-1) == other_NV.argmax(dim=-1))
        # At -inf both agree that it cannot be. In place: a piece is 25 MB at 49,152 tokens.
        alike_NV = base_NV == other_NV
        moved_NV = other_NV.neg_().add_(base_NV).masked_fill_(alike_NV, 0.0)
        kl.append(moved_NV.mul_(base_NV.exp_()).sum(dim=-1, dtype=torch.float64).clamp_min(0.0))
    S = len(sequences.token_ids_ST)
    columns = {
        name: torch.cat([torch.zeros(S, 1, dtype=parts[0].dtype), torch.cat(parts).view(S, -1)], dim=1).flatten()
        for name, parts in (("nll", nll), ("kl", kl), ("same_top1", same))
    }
    table = sequences.frame().with_columns(**{name: pl.Series(column.numpy()) for name, column in columns.items()})
    table = table.filter("predicted")
    return table.select("sequence", "position", "source", "nll"), table.select(
        "sequence", "position", "source", "kl", "same_top1"
    )


def _log_softmax(logits_NV: Tensor) -> Tensor:
    """In place, unlike torch's."""
    return logits_NV.sub_(logits_NV.logsumexp(dim=-1, keepdim=True))


def summarise(before: pl.DataFrame, after: pl.DataFrame, moved: pl.DataFrame) -> dict[str, Any]:
    """quality.json of the held-out text: perplexity (as `nll.compare`) of all and by source, KL and agreement.

    Args:
        before, after: tables of NLL. moved: the second table of `compare_distributions`. All of the same rows.
    """
    sources = {}
    for source in sorted(before["source"].unique()):
        own = [table.filter(pl.col("source") == source) for table in (before, after)]
        sources[source] = compare(*own)
    clusters = moved["sequence"].to_numpy()
    return {
        "perplexity": compare(before, after),
        "sources": sources,
        "kl": {**clustered_mean(moved["kl"].to_numpy(), clusters),
               "p50": moved["kl"].quantile(0.5), "p99": moved["kl"].quantile(0.99)},
        "top1_agreement": clustered_mean(moved["same_top1"].to_numpy().astype(float), clusters),
        "confidence": CONFIDENCE,
    }  # fmt: skip


METRICS = ("kl", "top1_agreement")
COPY_METRICS = ("copy_exact_before", "copy_exact_after", "copy_exact_delta", "copy_nll_delta")
"""Names of `quality_metrics` beside those of perplexity; all but the first two copies also with _ci_low, _ci_high."""


def quality_metrics(report: dict[str, Any]) -> dict[str, float]:
    """The numbers of quality.json that are metrics of the run; what is undefined (an interval of one) is left out."""
    whole = report["perplexity"]
    metrics: dict[str, float | None] = {
        "perplexity_before": whole["before"],
        "perplexity_after": whole["after"],
        "perplexity_ratio": whole["ratio"],
        **_with_interval("delta_nll", whole["delta_nll"]),
        **_with_interval("kl", report["kl"]),
        **_with_interval("top1_agreement", report["top1_agreement"]),
    }
    if copies := report.get("copies"):
        found = copies["all"]
        metrics |= {
            "copy_exact_before": found["exact_base"],
            "copy_exact_after": found["exact_other"],
            **_with_interval("copy_exact_delta", found["exact"]),
            **_with_interval("copy_nll_delta", found["nll"]),
        }
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _with_interval(name: str, effect: dict[str, Any]) -> dict[str, float | None]:
    return {name: effect["effect"], f"{name}_ci_low": effect["ci_low"], f"{name}_ci_high": effect["ci_high"]}
