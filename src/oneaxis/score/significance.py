"""What a difference of accuracies is worth: between two scorers of one run, and between one scorer in two runs.

Always item by item, since the items that both answer alike say nothing. Two tests and an interval:

- McNemar's exact test on the items that only one of the two has right (`paired`).
- The percentile bootstrap of the difference over items. A pair of right/wrong answers differs by -1, 0 or +1, so that a
  resample of n items is one draw of the multinomial (n; lost, same, gained), and thousands of them cost nothing. With
  no discordant item every resample is 0, which claims certainty: then Tango's score interval stands in its place, and
  `interval` says so.
- Where items come in clusters (questions of one topic, or on one passage), items are no independent draws: the standard
  error is the clustered one (Miller, 2024, arXiv 2411.00640), the bootstrap draws whole clusters, and in
  place of McNemar's test the sign-flip test is made on the clusters' sums.

Differences that are read together are corrected together by Holm's method, and each row says over how many.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.statistics import holm, paired_share_interval, sign_flip
from oneaxis.score.calibration import ITEM
from oneaxis.score.metrics import SCORERS, accuracy
from oneaxis.score.paired import mcnemar_exact

RESAMPLES = 20_000
CONFIDENCE = 0.95
FEWEST_CLUSTERS = 6
"""Below so many clusters the sign-flip test cannot reach p = 0.05 at all: items are then taken as independent."""


def clustered_stderr(correct: Sequence[bool], clusters: Sequence[str]) -> float:
    """Standard error of a mean of right and wrong answers that come in clusters.

    sqrt(sum over clusters of (sum of x - mean)^2) / n: within a cluster deviations add up before they are squared, so
    answers that are alike within a cluster count as fewer items. With one item in each it is sqrt(p (1 - p) / n).
    """
    assert len(correct) == len(clusters)
    n = len(correct)
    mean = sum(correct) / n
    sums: dict[str, float] = {}
    for right, cluster in zip(correct, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + right - mean
    return math.sqrt(math.fsum(value * value for value in sums.values())) / n


def with_error(correct: pl.Series, clusters: pl.Series | None = None) -> dict[str, Any]:
    """n, accuracy and standard error (`metrics.accuracy`), and the clustered one where every item has a cluster."""
    found = accuracy(correct)
    known = correct.is_not_null()
    if clusters is None or clusters.filter(known).null_count():
        return {**found, "clusters": None, "stderr_clustered": None}
    own = clusters.filter(known)
    error = clustered_stderr(list(correct.filter(known)), list(own))
    return {**found, "clusters": own.n_unique(), "stderr_clustered": error}


def paired(
    first: Sequence[bool],
    second: Sequence[bool],
    clusters: Sequence[str | None] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> dict[str, Any]:
    """Two columns of right and wrong on the same items, compared: effect = accuracy of second - accuracy of first.

    Args:
        first, second: n answers each, n >= 1.
        clusters: of the items, where they come in clusters. Fewer than FEWEST_CLUSTERS, one that is not known, or as
            many as items: items are taken as independent, and `clusters` of the result is null.
        seed, resamples: of the bootstrap.
        confidence: coverage of the interval.

    Returns:
        n, only_first, only_second, effect, low, high, interval (bootstrap | clustered_bootstrap | score), p_value, test
        (mcnemar_exact | sign_flip_of_clusters), clusters.
    """
    n = len(first)
    assert n == len(second) >= 1
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    lost, gained = int((differences < 0).sum()), int((differences > 0).sum())
    facts: dict[str, Any] = {"n": n, "only_first": lost, "only_second": gained, "effect": (gained - lost) / n}
    draw = np.random.default_rng(seed)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    grouped = _sums(differences, clusters)
    if grouped is not None:
        sums, sizes = grouped
        num = len(sums)
        counts = draw.multinomial(num, np.full(num, 1 / num), size=resamples)
        low, high = np.quantile((counts @ sums) / (counts @ sizes), tails)
        test = {"interval": "clustered_bootstrap", "p_value": sign_flip(sums), "test": "sign_flip_of_clusters",
                "clusters": num}  # fmt: skip
        return {**facts, "low": float(low), "high": float(high), **test}
    if lost + gained:
        drawn = draw.multinomial(n, [lost / n, gained / n, (n - lost - gained) / n], size=resamples)
        low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / n, tails)
        interval = "bootstrap"
    else:
        low, high = paired_share_interval(0, 0, n, confidence)
        interval = "score"
    return {**facts, "low": float(low), "high": float(high), "interval": interval,
            "p_value": mcnemar_exact(lost, gained), "test": "mcnemar_exact", "clusters": None}  # fmt: skip


def _sums(differences: np.ndarray, clusters: Sequence[str | None] | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Sum of the differences and number of items per cluster; None where there are no clusters to speak of."""
    if clusters is None or any(cluster is None for cluster in clusters):
        return None
    names, place = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    if not FEWEST_CLUSTERS <= len(names) < len(differences):
        return None
    return np.bincount(place, weights=differences), np.bincount(place).astype(np.float64)


def corrected(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `p_holm` (Holm over all of them) and `num_tests`: give it what a reader sees together."""
    adjusted = holm([row["p_value"] for row in rows])
    return [{**row, "p_holm": p, "num_tests": len(rows)} for row, p in zip(rows, adjusted, strict=True)]


def compare_scorers(
    items: pl.DataFrame, base: str, others: Sequence[str] = SCORERS, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Every scorer against `base`, per task, on the items that both answered; corrected over all rows.

    Args:
        items: `metrics.score_items` of a run.
        base: the scorer that the others are compared with.
        others: theirs; `base` itself, and those that scored none of a task's items, are left out.
        seed: of the bootstrap.
    """
    rows = []
    for task in sorted(items["task"].unique()):
        own = items.filter(pl.col("task") == task)
        for name in others:
            both = own.select("topic", one=f"{base}_correct", other=f"{name}_correct").drop_nulls(["one", "other"])
            if name == base or both.is_empty():
                continue
            found = paired(list(both["one"]), list(both["other"]), list(both["topic"]), seed=seed)
            rows.append({"task": task, "first": base, "second": name, **found})
    return corrected(rows)


def compare_runs(
    before: pl.DataFrame, after: pl.DataFrame, scorers: Sequence[str] = ("acc_bytes",), *, seed: int = 0
) -> list[dict[str, Any]]:
    """One scorer in two runs (checkpoints, precisions), per task; corrected over all rows.

    `left_out` counts the items of a task that only one of the runs has.

    Args:
        before, after: `metrics.score_items` of the runs.
        scorers: which to compare.
        seed: of the bootstrap.

    Raises:
        UserError: when the runs share no item, or an item's right answers differ between them.
    """
    both = before.join(after, on=ITEM, suffix="_after", validate="1:1").sort(ITEM)
    if both.is_empty():
        raise UserError("items_scored.parquet: the two runs share no item; allowed: runs of the same items")
    other = both.filter(pl.col("answers").list.sort() != pl.col("answers_after").list.sort())
    if other.height:
        raise UserError(f"items_scored.parquet: item {other['item_id'][0]}: answers is {list(other['answers'][0])} in "
                        f"one run and {list(other['answers_after'][0])} in the other; allowed: the same")  # fmt: skip
    rows = []
    for task in sorted(both["task"].unique()):
        here = pl.col("task") == task
        own = both.filter(here)
        left_out = before.filter(here).height + after.filter(here).height - 2 * own.height
        for name in scorers:
            known = own.select("topic", one=f"{name}_correct", other=f"{name}_correct_after").drop_nulls(
                ["one", "other"]
            )
            if known.is_empty():
                continue
            found = paired(list(known["one"]), list(known["other"]), list(known["topic"]), seed=seed)
            rows.append({"task": task, "scorer": name, "left_out": left_out, **found})
    return corrected(rows)


def pmi_words(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where dividing by the premise did not help, in a sentence per task; nothing where it helped.

    Args:
        rows: of `compare_scorers`; those whose second scorer is `pmi_dc` are read.
    """
    said = []
    for row in rows:
        if row["second"] != "pmi_dc":
            continue
        points = f"{100 * row['effect']:+.1f} points against {row['first']}".replace("-", "−")
        evidence = f"{points}, p {row['p_holm']:.2g} by Holm over {row['num_tests']}, n {row['n']}"
        if row["effect"] < 0 and row["p_holm"] < 1 - CONFIDENCE:
            said.append(f"{row['task']}: PMI hurts here ({evidence}).")
        elif row["effect"] <= 0:
            said.append(f"{row['task']}: PMI does not help here, and whether it hurts is not shown ({evidence}).")
        elif row["p_holm"] >= 1 - CONFIDENCE:
            said.append(f"{row['task']}: PMI is ahead by no more than chance gives ({evidence}).")
    return said
