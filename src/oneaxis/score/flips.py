"""Which items changed between two runs of one scorer, and what those have in common.

Two runs with the same accuracy may answer many items otherwise (Dutta et al., 2024, arXiv 2407.09141). An item is lost
(right before, wrong after), gained, moved (wrong before and after, with another option), or the same.

Items that flipped are compared with those that did not, in what is known of an item before it is asked again: the
length of its prompt and of its right answer, where the right answer stands, its topic, and how close the decision was.
Every feature has the same test, by permutation of which items flipped; they are corrected together by Holm's method.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from oneaxis.errors import UserError
from oneaxis.score.calibration import ITEM
from oneaxis.score.metrics import CLOZE, option_scores
from oneaxis.score.significance import corrected

PERMUTATIONS = 2_000
NUMBERS = ("prompt_tokens", "answer_bytes", "margin")
KINDS = ("answer_position", "topic")
FEATURES = {"prompt_tokens": "tokens of the prompt", "answer_bytes": "bytes of the right answer",
            "margin": "lead of the chosen option before", "answer_position": "place of the right answer",
            "topic": "topic"}  # fmt: skip
"""What an item is known by, in words. `margin` is in the scorer's unit (nats, nats a byte, ...)."""


def flips(before: pl.DataFrame, after: pl.DataFrame, scorer: str) -> pl.DataFrame:
    """One row per item that both runs answered with `scorer`.

    Columns task, item_id, answer, before, after (the chosen options), change (lost | gained | moved | same), flipped
    (whether the choice changed).

    Args:
        before, after: `metrics.score_items` of two runs.
        scorer: its name.

    Raises:
        UserError: when the runs share no item that the scorer answered.
    """

    def own(items: pl.DataFrame, end: str) -> pl.DataFrame:
        columns = [pl.col(f"{scorer}_predicted").alias(end), pl.col(f"{scorer}_correct").alias(f"right_{end}")]
        return items.select(*ITEM, *(["answer"] if end == "before" else []), *columns).drop_nulls([end])

    both = own(before, "before").join(own(after, "after"), on=ITEM, validate="1:1").sort(ITEM)
    if both.is_empty():
        raise UserError(f"items_scored.parquet: no item that {scorer} answered is in both runs; allowed: runs of the "
                        "same items")  # fmt: skip
    right, still = pl.col("right_before"), pl.col("right_after")
    flipped = pl.col("before") != pl.col("after")
    change = (
        pl.when(right & ~still).then(pl.lit("lost")).when(still & ~right).then(pl.lit("gained"))
        .when(flipped & ~right).then(pl.lit("moved")).otherwise(pl.lit("same"))
    )  # fmt: skip
    return both.select(*ITEM, "answer", "before", "after", change.alias("change"), flipped.alias("flipped"))


def features(table: pl.DataFrame, scorer: str) -> pl.DataFrame:
    """What is known of each item from the first run's table: task, item_id and the columns of FEATURES.

    `margin` is the chosen option's score less the next one's; null for a letter scorer.
    """
    asked = table.filter(pl.col("context") == "question")
    right = pl.col("option") == pl.col("answer")
    known = asked.group_by(ITEM, maintain_order=True).agg(
        pl.col("prompt_tokens").first(),
        pl.col("bytes").filter(right).first().alias("answer_bytes"),
        pl.col("answer").first().alias("answer_position"),
        pl.col("topic").first(),
    )
    if scorer not in CLOZE:
        return known.with_columns(margin=pl.lit(None, dtype=pl.Float64))
    ordered = pl.col(scorer).sort(descending=True)
    margins = option_scores(table).group_by(ITEM).agg((ordered.first() - ordered.get(1)).alias("margin"))
    return known.join(margins, on=ITEM, how="left", maintain_order="left")


def shared(flipped: pl.DataFrame, known: pl.DataFrame, *, seed: int = 0) -> list[dict[str, Any]]:
    """What the flipped items have in common, a row per feature that varies; none where all or none flipped.

    Rows of numbers: feature, flipped and kept (medians), p_value. Rows of kinds: feature, levels (per value its n and
    flipped), p_value. All: p_holm, num_tests. n and num_flipped count the items that the feature is known of.

    Args:
        flipped: of `flips`; known: of `features`; seed: of the permutations.
    """
    both = flipped.join(known.drop("answer", strict=False), on=ITEM, how="left", validate="1:1", maintain_order="left")
    rows: list[dict[str, Any]] = []
    for name in (*NUMBERS, *KINDS):
        own = both.select("flipped", value=name).drop_nulls()
        moved = own["flipped"].to_numpy()
        if own["value"].n_unique() < 2 or moved.all() or not moved.any():
            continue
        facts = {"feature": name, "n": len(moved), "num_flipped": int(moved.sum())}
        if name in NUMBERS:
            values = own["value"].to_numpy().astype(np.float64)
            rows.append({**facts, "flipped": float(np.median(values[moved])), "kept": float(np.median(values[~moved])),
                         "p_value": rank_test(values, moved, seed)})  # fmt: skip
        else:
            levels = own.group_by("value").agg(pl.len().alias("n"), pl.col("flipped").sum()).sort("value")
            shown = {str(value): {"n": n, "flipped": count} for value, n, count in levels.iter_rows()}
            rows.append({**facts, "levels": shown, "p_value": kind_test(own["value"].to_list(), moved, seed)})
    return corrected(rows)


def rank_test(values: np.ndarray, flipped: np.ndarray, seed: int) -> float:
    """Two-sided p-value of the rank-sum statistic under permutation of which items flipped; ties share their rank.

    Args:
        values: one per item; flipped: the same, true or false; seed: of the permutations.
    """
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    centred = ranks - ranks.mean()
    seen = abs(float(centred[flipped].sum()))
    return _p_value(seen, np.abs(_permuted(flipped, seed) @ centred))


def kind_test(values: Sequence[Any], flipped: np.ndarray, seed: int) -> float:
    """p-value of the chi-squared statistic of kind against flipped, under permutation of which items flipped."""
    _, place = np.unique(np.asarray(values, dtype=str), return_inverse=True)
    members = np.eye(int(place.max()) + 1)[place]
    sizes, share = members.sum(axis=0), flipped.mean()

    def statistic(rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = ((rows @ members - sizes * share) ** 2 / sizes).sum(axis=-1)
        return found

    return _p_value(float(statistic(flipped.astype(np.float64))), statistic(_permuted(flipped, seed)))


def _permuted(flipped: np.ndarray, seed: int) -> np.ndarray:
    rows = np.tile(flipped.astype(np.float64), (PERMUTATIONS, 1))
    return np.random.default_rng(seed).permuted(rows, axis=1)


def _p_value(seen: float, drawn: np.ndarray) -> float:
    """The share of permutations that lie at least as far out; what was seen is one of them."""
    return (int((drawn >= seen - 1e-9).sum()) + 1) / (len(drawn) + 1)
