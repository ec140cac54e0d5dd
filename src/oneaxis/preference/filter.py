"""Score every preference pair by CHES and keep the train pairs that a rule keeps.

From a checkpoint and `pairs.parquet` to the same table with scores and `kept`. The scored strings are the pairs' own
(prompt + response, no EOS appended), so the last token of a response counts as predicted and is not itself summed.
Held-out pairs are scored and always kept. Pairs that cannot be scored (longer than `max_tokens`, no response token)
leave the table and are counted.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rapidfuzz.distance import Levenshtein
from scipy import stats

from oneaxis.config.schema import PairFilter
from oneaxis.data.sample import drawn
from oneaxis.errors import UserError
from oneaxis.preference.ches import ches_scores
from oneaxis.preference.forward import hidden_sums, load
from oneaxis.preference.pairs import Sequence, tokenize_pair

FEWEST_KEPT = 4
NUM_BINS = 24


def filter_pairs(
    checkpoint: Path, pairs: pl.DataFrame, config: PairFilter, out: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write `pairs.parquet` and `distribution.csv` to `out`; return (metrics without prefix, notes).

    Raises:
        UserError: fewer than four train pairs are kept, or a pair cannot be rendered.
    """
    model, tokenizer = load(checkpoint)
    usable, tokens, unusable = scorable(pairs, tokenizer, config.max_tokens)
    if usable.is_empty():
        raise UserError(_too_few(0, 0, unusable, config))
    table = score_pairs(model, usable, tokens, config.batch_tokens)
    train = table.filter(pl.col("split") == "train")
    kept_ids = keep(dict(train.select("pair_id", config.score).iter_rows()), config.rule, config.value)
    if config.control_seed is not None:
        kept_ids = at_random(train["pair_id"].to_list(), len(kept_ids), config.control_seed)
    if len(kept_ids) < FEWEST_KEPT:
        raise UserError(_too_few(len(kept_ids), train.height, unusable, config))
    table = table.with_columns(kept=pl.col("pair_id").is_in(list(kept_ids)) | (pl.col("split") != "train"))
    table.write_parquet(out / "pairs.parquet")
    distribution(table, config.score).write_csv(out / "distribution.csv")
    return _metrics(table, unusable, config), _notes(table, unusable, config)


def scorable(
    pairs: pl.DataFrame, tokenizer: Any, max_tokens: int
) -> tuple[pl.DataFrame, list[tuple[Sequence, Sequence]], dict[str, list[str]]]:
    """The pairs that can be scored, their tokens, and the ids of the others by reason."""
    unusable: dict[str, list[str]] = {"too_long": [], "empty_response": []}
    rows, tokens = [], []
    for index, row in enumerate(pairs.iter_rows(named=True)):
        chosen, rejected = tokenize_pair(row, tokenizer, append_eos=False)
        if chosen.degenerate or rejected.degenerate:
            unusable["empty_response"].append(row["pair_id"])
        elif max(len(chosen.ids), len(rejected.ids)) > max_tokens:
            unusable["too_long"].append(row["pair_id"])
        else:
            rows.append(index)
            tokens.append((chosen, rejected))
    return pairs[rows], tokens, unusable


def score_pairs(
    model: Any, pairs: pl.DataFrame, tokens: list[tuple[Sequence, Sequence]], batch_tokens: int
) -> pl.DataFrame:
    """`pairs` with ches, ln_ches, cosine, edit_similarity (Levenshtein, 0 to 1), and token counts."""
    both = [sequence for pair in tokens for sequence in pair]
    sums = hidden_sums(model, both, batch_tokens=batch_tokens, progress="scoring pairs")
    chosen_tokens = np.array([chosen.response_tokens for chosen, _ in tokens])
    rejected_tokens = np.array([rejected.response_tokens for _, rejected in tokens])
    scores = ches_scores(sums[0::2], sums[1::2], chosen_tokens, rejected_tokens)
    similarity = [Levenshtein.normalized_similarity(a, b) for a, b in pairs.select("chosen", "rejected").iter_rows()]
    return pairs.with_columns(
        pl.Series("ches", scores.ches),
        pl.Series("ln_ches", scores.ln_ches),
        pl.Series("cosine", scores.cosine),
        pl.Series("edit_similarity", similarity, dtype=pl.Float64),
        pl.Series("chosen_tokens", chosen_tokens, dtype=pl.Int64),
        pl.Series("rejected_tokens", rejected_tokens, dtype=pl.Int64),
        pl.Series("prompt_tokens", [chosen.start for chosen, _ in tokens], dtype=pl.Int64),
    )


def keep(scores: dict[str, float], rule: str, value: float) -> set[str]:
    """The ids that a rule keeps. Lower scores are kept first; equal scores in the order of their ids.

    Args:
        scores: pair id to score.
        rule: all; quantile (the lowest share `value`, rounded down); count (the lowest `value`); threshold
            (scores <= `value`).
    """
    ordered = sorted(scores, key=lambda pair_id: (scores[pair_id], pair_id))
    if rule == "all":
        return set(ordered)
    if rule == "threshold":
        return {pair_id for pair_id in ordered if scores[pair_id] <= value}
    # Rounded first, or 0.29 of 100 would be 28.
    count = math.floor(round(value * len(ordered), 9)) if rule == "quantile" else int(value)
    return set(ordered[:count])


def at_random(pair_ids: Iterable[str], count: int, seed: int) -> set[str]:
    """`count` of the ids, drawn by the hash of seed and id: whatever their order or scores."""
    rows = [{"pair_id": pair_id} for pair_id in pair_ids]
    return {row["pair_id"] for row in drawn(rows, lambda row: row["pair_id"], seed=seed, table="control")[:count]}


def distribution(table: pl.DataFrame, score: str) -> pl.DataFrame:
    """Histogram of a score for `dvc plots` (bar, x = the bin's centre, y = count, one colour an outcome).

    Returns:
        columns <score> (centre), bin_low, bin_high, count, outcome in {kept, dropped, heldout}.
    """
    values = table[score].to_numpy()
    edges = np.histogram_bin_edges(values, bins=NUM_BINS)
    outcome = table.select(
        pl.when(pl.col("split") != "train").then(pl.lit("heldout"))
        .when("kept").then(pl.lit("kept")).otherwise(pl.lit("dropped"))
    ).to_series()  # fmt: skip
    parts = []
    for name in ("kept", "dropped", "heldout"):
        counts, _ = np.histogram(values[(outcome == name).to_numpy()], bins=edges)
        parts.append(pl.DataFrame({
            score: (edges[:-1] + edges[1:]) / 2, "bin_low": edges[:-1], "bin_high": edges[1:],
            "count": counts.astype(np.int64), "outcome": [name] * len(counts),
        }))  # fmt: skip
    return pl.concat(parts)


def correlation(first: np.ndarray, second: np.ndarray) -> dict[str, float | None]:
    """Spearman's and Pearson's correlation; None where one side is constant or fewer than three pairs remain."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"spearman": None, "pearson": None}
    return {
        "spearman": float(stats.spearmanr(first, second).statistic),
        "pearson": float(stats.pearsonr(first, second).statistic),
    }


def _correlations(table: pl.DataFrame, score: str) -> dict[str, dict[str, float | None]]:
    values = table[score].to_numpy()
    difference = (table["chosen_tokens"] - table["rejected_tokens"]).to_numpy()
    return {
        "edit_similarity": correlation(values, table["edit_similarity"].to_numpy()),
        "length_difference": correlation(values, difference),
        "cosine": correlation(values, table["cosine"].to_numpy()),
    }


def _metrics(table: pl.DataFrame, unusable: dict[str, list[str]], config: PairFilter) -> dict[str, float]:
    train = table.filter(pl.col("split") == "train")
    kept = train.filter("kept")
    metrics = {
        "pairs": float(table.height),
        "train_pairs": float(train.height),
        "kept": float(kept.height),
        "dropped": float(train.height - kept.height),
        "unusable": float(sum(map(len, unusable.values()))),
        "ln_ches_median": float(np.median(train["ln_ches"].to_numpy())),
        "ches_median": float(np.median(train["ches"].to_numpy())),
        "edit_similarity_kept": float(np.mean(kept["edit_similarity"].to_numpy())),
    }
    if config.control_seed is None:
        metrics[f"{config.score}_cutoff"] = float(np.max(kept[config.score].to_numpy()))
    if kept.height < train.height:
        left_out = train.filter(~pl.col("kept"))
        metrics["edit_similarity_dropped"] = float(np.mean(left_out["edit_similarity"].to_numpy()))
    for name, other in (("ches_edit_correlation", "edit_similarity"), ("ches_length_correlation", "length_difference")):
        value = _correlations(table, config.score)[other]["spearman"]
        if value is not None:
            metrics[name] = value
    return metrics


def _notes(table: pl.DataFrame, unusable: dict[str, list[str]], config: PairFilter) -> dict[str, Any]:
    train = table.filter(pl.col("split") == "train")
    dropped = train.filter(~pl.col("kept"))
    least_similar = train.sort("edit_similarity", "pair_id", descending=[True, False]).head(dropped.height)
    overlap = len(set(dropped["pair_id"]) & set(least_similar["pair_id"]))
    return {
        "score": config.score,
        "rule": config.rule,
        "value": config.value,
        "control_seed": config.control_seed,
        "cutoff": float(np.max(train.filter("kept")[config.score].to_numpy())) if config.control_seed is None else None,
        "train": train.height,
        "kept": train.height - dropped.height,
        "dropped": dropped.height,
        "dropped_ids": sorted(dropped["pair_id"]),
        "dropped_also_by_edit_similarity": overlap,
        "heldout": table.height - train.height,
        "unusable": {reason: sorted(ids) for reason, ids in unusable.items()},
        "correlations": {score: _correlations(table, score) for score in ("ches", "ln_ches")},
        "scored_text": "prompt + response as given, no EOS appended; hidden states after the final norm, float32",
    }


def _too_few(kept: int, train: int, unusable: dict[str, list[str]], config: PairFilter) -> str:
    lost = ", ".join(f"{len(ids)} {reason.replace('_', ' ')}" for reason, ids in unusable.items() if ids)
    remedy = {
        "all": "more pairs (data.pairs.max_pairs)",
        "quantile": f"a larger pairs.value (now {config.value:g}) or more pairs (data.pairs.max_pairs)",
        "count": f"a larger pairs.value (now {config.value:g}) or more pairs (data.pairs.max_pairs)",
        "threshold": f"a higher pairs.value (now {config.value:g}); filter_pairs with pairs=all shows the scores",
    }[config.rule]
    longer = f", or a larger pairs.max_tokens (now {config.max_tokens})" if unusable["too_long"] else ""
    return (
        f"pairs.rule={config.rule} keeps {kept} of {train} train pairs{f' ({lost})' if lost else ''}; "
        f"allowed: at least {FEWEST_KEPT}: {remedy}{longer}"
    )
