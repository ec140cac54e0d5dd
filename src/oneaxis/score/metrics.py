"""Scorers: pure functions of the table (`table.SCHEMA`), each of which says which option it would choose.

With L the log-probability of an option after its question:
- acc: L; acc_norm: L / characters (what lm-eval means by the name); acc_bytes: L / UTF-8 bytes, which compares across
  tokenizers; acc_per_token: L / tokens, which does not. The space before an option counts for none of them.
- pmi_dc: L - log P(option | domain premise) (Holtzman et al., 2021).
- letter: the likeliest letter, options in their own order; letter_permuted: the option that most of the n cyclic
  rotations vote for, ties broken by its probability summed over the rotations.

Where two options score alike, the first is chosen. The standard error is sqrt(p (1 - p) / (n - 1)), as in lm-eval.
"""

import math
from itertools import combinations
from typing import Any

import polars as pl

from oneaxis.score.contexts import LETTERS
from oneaxis.score.paired import mcnemar_exact

CLOZE = ("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi_dc")
LETTER = ("letter", "letter_permuted")
SCORERS = CLOZE + LETTER
ITEM = ["task", "item_id"]


def option_scores(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item and option with its score under each cloze scorer."""
    premise = table.filter(pl.col("context") == "premise").select(*ITEM, "option", pl.col("logprob").alias("premise"))
    logprob = pl.col("logprob")
    return (
        table.filter(pl.col("context") == "question")
        .join(premise, on=[*ITEM, "option"], how="left", validate="1:1", maintain_order="left")
        .select(
            *ITEM,
            "answer",
            "option",
            logprob.alias("acc"),
            (logprob / pl.col("chars")).alias("acc_norm"),
            (logprob / pl.col("bytes")).alias("acc_bytes"),
            (logprob / pl.col("tokens")).alias("acc_per_token"),
            (logprob - pl.col("premise")).alias("pmi_dc"),
        )
    )


def letter_probabilities(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item, rotation and letter: the option it stands for and its probability among the letters.

    Column `mass` is the probability of all the letters together: how much of the model's belief the format catches.
    """
    rotation = [*ITEM, "rotation"]
    highest = pl.col("logprob").max().over(rotation)
    weight = (pl.col("logprob") - highest).exp()
    return (
        table.filter(pl.col("context") == "letter")
        .with_columns(pl.len().over(rotation).alias("num_options"))
        .with_columns(
            ((pl.col("option") - pl.col("rotation")) % pl.col("num_options")).alias("letter"),
            (weight / weight.sum().over(rotation)).alias("probability"),
            pl.col("logprob").exp().sum().over(rotation).alias("mass"),
        )
        .select(*rotation, "answer", "num_options", "letter", "option", "probability", "mass")
        .sort(*rotation, "letter")
    )


def letter_votes(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item of the letter format.

    Columns: `letter` (the option chosen at rotation 0), `letter_permuted` (the majority over rotations), `tied` (the
    vote was settled by summed probability), `moved` (not every rotation chose the same option).
    """
    letters = letter_probabilities(table)
    choices = letters.group_by([*ITEM, "rotation"], maintain_order=True).agg(
        pl.col("option").get(pl.col("probability").arg_max()).alias("choice")
    )
    votes = choices.group_by([*ITEM, "choice"]).agg(pl.len().cast(pl.Int64).alias("votes"))
    tally = (
        letters.group_by([*ITEM, "option"])
        .agg(pl.col("probability").sum())
        .join(votes, left_on=[*ITEM, "option"], right_on=[*ITEM, "choice"], how="left")
        .with_columns(pl.col("votes").fill_null(0))
        .sort(*ITEM, "votes", "probability", "option", descending=[False, False, True, True, False])
        .group_by(ITEM, maintain_order=True)
        .agg(
            pl.col("option").first().alias("letter_permuted"),
            ((pl.col("votes") == pl.col("votes").max()).sum() > 1).alias("tied"),
            (pl.col("votes").max() < pl.col("votes").sum()).alias("moved"),
        )
    )
    first = choices.filter(pl.col("rotation") == 0).select(*ITEM, pl.col("choice").alias("letter"))
    return first.join(tally, on=ITEM, validate="1:1").sort(ITEM)


def score_items(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item: the chosen option of each scorer (`<scorer>_predicted`) and whether it is right.

    Letter columns are null for items that the letter format was not asked for.
    """
    options = option_scores(table).sort(*ITEM, "option")
    predicted = options.group_by(ITEM, maintain_order=True).agg(
        pl.col("answer").first(),
        *(pl.col("option").get(pl.col(name).arg_max()).alias(f"{name}_predicted") for name in CLOZE),
    )
    votes = letter_votes(table).rename({name: f"{name}_predicted" for name in LETTER})
    joined = predicted.join(votes, on=ITEM, how="left", maintain_order="left")
    return joined.select(
        *ITEM,
        "answer",
        *(f"{name}_predicted" for name in SCORERS),
        *((pl.col(f"{name}_predicted") == pl.col("answer")).alias(f"{name}_correct") for name in SCORERS),
        pl.col("moved").alias("letter_moved"),
        pl.col("tied").alias("letter_tied"),
    )


def accuracy(correct: pl.Series) -> dict[str, Any]:
    """n, accuracy and standard error of a column of right and wrong (nulls are left out).

    The standard error is null below two items.
    """
    known = correct.drop_nulls()
    n = len(known)
    p = int(known.sum()) / n
    return {"n": n, "accuracy": p, "stderr": math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None}


def compare(items: pl.DataFrame) -> list[dict[str, Any]]:
    """McNemar's exact test of every two scorers, on the items that both answered. The p-values are not corrected."""
    rows = []
    for first, second in combinations(SCORERS, 2):
        both = items.select(one=f"{first}_correct", other=f"{second}_correct").drop_nulls()
        if both.is_empty():
            continue
        only_first = both.filter(pl.col("one") & ~pl.col("other")).height
        only_second = both.filter(pl.col("other") & ~pl.col("one")).height
        rows.append(
            {
                "first": first,
                "second": second,
                "n": both.height,
                "only_first": only_first,
                "only_second": only_second,
                "p_value": mcnemar_exact(only_first, only_second),
                "test": "mcnemar_exact",
            }
        )
    return rows


def letter_summary(table: pl.DataFrame, items: pl.DataFrame) -> dict[str, Any] | None:
    """What the letter format shows beyond its accuracy; null where no item of `items` was asked by letter.

    `prior` is the mean probability of each letter by number of options: over all rotations every option stands under
    every letter, so that a fair model's prior is flat.
    """
    asked = items.filter(pl.col("letter_moved").is_not_null())
    if asked.is_empty():
        return None
    letters = letter_probabilities(table)
    means = letters.group_by("num_options", "letter").agg(pl.col("probability").mean()).sort("num_options", "letter")
    prior: dict[str, dict[str, float]] = {}
    for num_options, letter, probability in means.iter_rows():
        prior.setdefault(str(num_options), {})[LETTERS[letter]] = probability
    return {
        "n": asked.height,
        "moved_share": int(asked["letter_moved"].sum()) / asked.height,
        "ties": int(asked["letter_tied"].sum()),
        "mass": float(letters.unique([*ITEM, "rotation"], maintain_order=True)["mass"].mean()),  # type: ignore[arg-type]
        "prior": prior,
    }


def summarise(table: pl.DataFrame, items: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Per task: n, each scorer's accuracy, the letter format's extras, and the scorers compared."""
    summary: dict[str, dict[str, Any]] = {}
    for task in sorted(items["task"].unique()):
        own = items.filter(pl.col("task") == task)
        scorers = {name: own[f"{name}_correct"] for name in SCORERS}
        summary[task] = {
            "n": own.height,
            "scorers": {
                name: accuracy(correct) for name, correct in scorers.items() if correct.null_count() < own.height
            },
            "letter": letter_summary(table.filter(pl.col("task") == task), own),
            "comparisons": compare(own),
        }
    return summary


def flat_metrics(table: pl.DataFrame, summary: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The summary as flat numbers: score/<task>/<scorer>, its standard error, and counts. What is undefined is absent.

    `score/boundary_backed_off` and `score/truncated` count items, not options.
    """
    metrics: dict[str, float] = {}
    for task, facts in summary.items():
        metrics[f"score/{task}/n"] = facts["n"]
        for name, result in facts["scorers"].items():
            metrics[f"score/{task}/{name}"] = result["accuracy"]
            if result["stderr"] is not None:
                metrics[f"score/{task}/{name}_stderr"] = result["stderr"]
        if facts["letter"]:
            metrics[f"score/{task}/letter_n"] = facts["letter"]["n"]
            metrics[f"score/{task}/letter_moved_share"] = facts["letter"]["moved_share"]
    metrics["score/boundary_backed_off"] = table.filter(pl.col("boundary") != "clean").select(ITEM).unique().height
    metrics["score/truncated"] = table.filter(pl.col("truncated") > 0).select(ITEM).unique().height
    return metrics
