"""Scorers: pure functions of the table (`table.SCHEMA`), each of which says which option it would choose.

With L the log-probability of an option after its question:
- acc: L; acc_norm: L / characters (what lm-eval means by the name); acc_bytes: L / UTF-8 bytes, which compares across
  tokenizers; acc_per_token: L / tokens, which does not. The space before an option counts for none of them.
- pmi: L - log P(option) after no prompt, which shows a fault: rare strings win. pmi_dc: L - log P(option | domain
  premise) (Holtzman et al., 2021); with further premises, how much it moves with them.
- letter: the likeliest letter, options listed once; letter_calibrated and pride: the same less what the model thinks of
  the letters themselves (`calibration`).
- letter_permuted: the option that most of the n cyclic rotations vote for, ties broken by its probability summed over
  the rotations; letter_averaged: the option with the highest mean probability over the rotations.

An item may have several right answers: whichever of them is chosen is right, under every scorer. (lm-eval 0.4.13 asks
`np.argmax(...) == gold` for `acc_mutual_info`, and stops with a ValueError where gold is a list.) Where two options
score alike, the first is chosen. The standard error is sqrt(p (1 - p) / (n - 1)), as in lm-eval.
"""

import math
from itertools import combinations
from typing import Any

import polars as pl

from oneaxis.score.calibration import ITEM, letter_calibrated, pride, recalls, rstd
from oneaxis.score.contexts import LETTERS
from oneaxis.score.paired import mcnemar_exact

CLOZE = ("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi", "pmi_dc")
LETTER = ("letter", "letter_calibrated", "letter_permuted", "letter_averaged", "pride")
SCORERS = CLOZE + LETTER
PRIOR_SHARE = 0.25
"""Share of the items that pride's prior is estimated on, where nothing else is said."""


def scorer_label(name: str, dtype: str) -> str:
    """A scorer's name as it is shown: its numbers are of one dtype, and differ in another."""
    return f"{name} ({dtype})"


def option_scores(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item and option with its score under each cloze scorer; null where its context was not scored."""
    logprob = pl.col("logprob")

    def prior(context: str) -> pl.DataFrame:
        rows = table.filter((pl.col("context") == context) & (pl.col("variant") == 0))
        return rows.select(*ITEM, "option", logprob.alias(context))

    on = [*ITEM, "option"]
    return (
        table.filter(pl.col("context") == "question")
        .join(prior("premise"), on=on, how="left", validate="1:1", maintain_order="left")
        .join(prior("bos"), on=on, how="left", validate="1:1", maintain_order="left")
        .select(
            *ITEM,
            "topic",
            "answer",
            "answers",
            "option",
            logprob.alias("acc"),
            (logprob / pl.col("chars")).alias("acc_norm"),
            (logprob / pl.col("bytes")).alias("acc_bytes"),
            (logprob / pl.col("tokens")).alias("acc_per_token"),
            (logprob - pl.col("bos")).alias("pmi"),
            (logprob - pl.col("premise")).alias("pmi_dc"),
        )
    )


def premise_choices(table: pl.DataFrame) -> pl.DataFrame:
    """What pmi_dc chooses under each premise, for the items that several premises were scored for.

    One row per item and premise: task, item_id, variant, predicted, correct.
    """
    premises = table.filter(pl.col("context") == "premise")
    several = premises.filter(pl.col("variant").max().over(ITEM) > 0)
    asked = table.filter(pl.col("context") == "question").select(*ITEM, "option", pl.col("logprob").alias("asked"))
    return (
        several.join(asked, on=[*ITEM, "option"], validate="m:1")
        .sort(*ITEM, "variant", "option")
        .group_by([*ITEM, "variant"], maintain_order=True)
        .agg(
            pl.col("answers").first(),
            pl.col("option").get((pl.col("asked") - pl.col("logprob")).arg_max()).alias("predicted"),
        )
        .with_columns(_right("predicted").alias("correct"))
        .drop("answers")
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
        .sort(*rotation, "letter")
        .with_columns(
            pl.len().cast(pl.Int64).over(rotation).alias("num_options"),
            (weight / weight.sum().over(rotation)).alias("probability"),
            pl.col("logprob").exp().sum().over(rotation).alias("mass"),
        )
        .select(*rotation, "answer", "num_options", "letter", "option", "logprob", "probability", "mass")
    )


def letter_votes(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item of the letter format, from its rotations.

    Columns: `letter` (the option chosen at rotation 0), `letter_permuted` (the majority over rotations),
    `letter_averaged` (the highest mean probability over rotations), `tied` (the vote was settled by summed
    probability), `moved` (not every rotation chose the same option).
    """
    letters = letter_probabilities(table)
    choices = letters.group_by([*ITEM, "rotation"], maintain_order=True).agg(
        pl.col("option").get(pl.col("probability").arg_max()).alias("choice")
    )
    votes = choices.group_by([*ITEM, "choice"]).agg(pl.len().cast(pl.Int64).alias("votes"))
    tally = (
        letters.group_by([*ITEM, "option"], maintain_order=True)
        .agg(pl.col("probability").sum())
        .join(votes, left_on=[*ITEM, "option"], right_on=[*ITEM, "choice"], how="left")
        .with_columns(pl.col("votes").fill_null(0))
        .sort(*ITEM, "votes", "probability", "option", descending=[False, False, True, True, False])
        .group_by(ITEM, maintain_order=True)
        .agg(
            pl.col("option").first().alias("letter_permuted"),
            pl.col("option")
            .filter(pl.col("probability") == pl.col("probability").max())
            .min()
            .alias("letter_averaged"),
            ((pl.col("votes") == pl.col("votes").max()).sum() > 1).alias("tied"),
            (pl.col("votes").max() < pl.col("votes").sum()).alias("moved"),
        )
    )
    first = choices.filter(pl.col("rotation") == 0).select(*ITEM, pl.col("choice").alias("letter"))
    return first.join(tally, on=ITEM, validate="1:1").sort(ITEM)


def score_items(table: pl.DataFrame, *, prior_share: float = PRIOR_SHARE, seed: int = 0) -> pl.DataFrame:
    """One row per item: the chosen option of each scorer (`<scorer>_predicted`) and whether it is right.

    A scorer's columns are null for items whose contexts it was not scored in: letters, unconditional, the items that
    pride's prior was estimated on.

    Args:
        table: of a run.
        prior_share, seed: which share of the items gives pride's prior, and what draws them.
    """
    options = option_scores(table).sort(*ITEM, "option")
    predicted = options.group_by(ITEM, maintain_order=True).agg(
        *(pl.col(name).first() for name in ("topic", "answer", "answers")),
        *(pl.col("option").get(pl.col(name).arg_max()).alias(f"{name}_predicted") for name in CLOZE),
    )
    letters = letter_probabilities(table)
    calibrated = letter_calibrated(letters, table.filter(pl.col("context") == "content_free"))
    joined = predicted
    for chosen in (letter_votes(table), calibrated, pride(letters, prior_share, seed)):
        renamed = chosen.rename({name: f"{name}_predicted" for name in LETTER if name in chosen.columns})
        joined = joined.join(renamed, on=ITEM, how="left", maintain_order="left", validate="1:1")
    moved = premise_choices(table).group_by(ITEM).agg((pl.col("predicted").n_unique() > 1).alias("premise_moved"))
    return joined.join(moved, on=ITEM, how="left", maintain_order="left").select(
        *ITEM,
        "topic",
        "answer",
        "answers",
        *(f"{name}_predicted" for name in SCORERS),
        *(_right(f"{name}_predicted").alias(f"{name}_correct") for name in SCORERS),
        pl.col("moved").alias("letter_moved"),
        pl.col("tied").alias("letter_tied"),
        "premise_moved",
    )


def _right(predicted: str) -> pl.Expr:
    """Whether a chosen option is one of the right ones; null where none was chosen."""
    chosen = pl.col(predicted)
    return pl.when(chosen.is_not_null()).then(pl.col("answers").list.contains(chosen))


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
    every letter, so that a fair model's prior is flat. `recalls` and `rstd` are by scorer (`calibration`).
    """
    asked = items.filter(pl.col("letter_moved").is_not_null())
    if asked.is_empty():
        return None
    letters = letter_probabilities(table)
    means = (
        letters.group_by("num_options", "letter", maintain_order=True)
        .agg(pl.col("probability").mean())
        .sort("num_options", "letter")
    )
    prior: dict[str, dict[str, float]] = {}
    for num_options, letter, probability in means.iter_rows():
        prior.setdefault(str(num_options), {})[LETTERS[letter]] = probability
    by_scorer = {name: recalls(letters, asked, name) for name in LETTER}
    return {
        "n": asked.height,
        "moved_share": int(asked["letter_moved"].sum()) / asked.height,
        "ties": int(asked["letter_tied"].sum()),
        "mass": float(letters.unique([*ITEM, "rotation"], maintain_order=True)["mass"].mean()),  # type: ignore[arg-type]
        "prior": prior,
        "recalls": {
            name: {LETTERS[letter]: share for letter, share in found.items()}
            for name, found in by_scorer.items()
            if found
        },
        "rstd": {name: value for name, found in by_scorer.items() if (value := rstd(found)) is not None},
    }


def premise_summary(table: pl.DataFrame, items: pl.DataFrame) -> dict[str, Any] | None:
    """How much pmi_dc depends on its premise; null where no item of `items` was scored after several.

    Each premise with its accuracy, on the same items; `spread` is the highest accuracy less the lowest, `moved_share`
    the share of these items whose chosen option is not the same under all premises.
    """
    choices = premise_choices(table)
    if choices.is_empty():
        return None
    texts = dict(table.filter(pl.col("context") == "premise").select("variant", "prompt").unique().iter_rows())
    found = [
        {"premise": texts[variant], **accuracy(choices.filter(pl.col("variant") == variant)["correct"])}
        for variant in sorted(choices["variant"].unique())
    ]
    moved = items["premise_moved"].drop_nulls()
    accuracies = [one["accuracy"] for one in found]
    return {
        "n": len(moved),
        "premises": found,
        "spread": max(accuracies) - min(accuracies),
        "moved_share": int(moved.sum()) / len(moved),
    }


def summarise(table: pl.DataFrame, items: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Per task: n, each scorer's accuracy, the extras of letters and premises, and the scorers compared."""
    summary: dict[str, dict[str, Any]] = {}
    for task in sorted(items["task"].unique()):
        own = items.filter(pl.col("task") == task)
        rows = table.filter(pl.col("task") == task)
        scorers = {name: own[f"{name}_correct"] for name in SCORERS}
        summary[task] = {
            "n": own.height,
            "several_answers": own.filter(pl.col("answers").list.len() > 1).height,
            "scorers": {
                name: accuracy(correct) for name, correct in scorers.items() if correct.null_count() < own.height
            },
            "letter": letter_summary(rows, own),
            "premises": premise_summary(rows, own),
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
        if "pmi" in facts["scorers"]:
            metrics[f"score/{task}/pmi_n"] = facts["scorers"]["pmi"]["n"]
        if facts["letter"]:
            metrics[f"score/{task}/letter_n"] = facts["letter"]["n"]
            metrics[f"score/{task}/letter_moved_share"] = facts["letter"]["moved_share"]
            metrics |= {f"score/{task}/{name}_rstd": value for name, value in facts["letter"]["rstd"].items()}
        if "pride" in facts["scorers"]:
            metrics[f"score/{task}/pride_n"] = facts["scorers"]["pride"]["n"]
        if facts["premises"]:
            for name in ("spread", "moved_share"):
                metrics[f"score/{task}/pmi_dc_{name}"] = facts["premises"][name]
    metrics["score/boundary_backed_off"] = table.filter(pl.col("boundary") != "clean").select(ITEM).unique().height
    metrics["score/truncated"] = table.filter(pl.col("truncated") > 0).select(ITEM).unique().height
    return metrics
