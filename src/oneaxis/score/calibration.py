"""What a model thinks of the letters themselves, and scores without it. Pure functions of `letter_probabilities`.

- letter_calibrated: contextual calibration (Zhao et al., 2021, arXiv 2102.09690). The probabilities of the letters
  under texts that ask nothing, in the same template with the same options, are averaged and normalised to p_cf; an
  item's letters are then weighed by W = diag(1 / p_cf), b = 0.
- pride: a prior of the letters that is estimated on a share of the items and divided out on the others (PriDe, Zheng et
  al., 2024, arXiv 2309.03882): per item softmax of the mean log-probability of each letter over all rotations, since
  every option has then stood under every letter; then the mean over the items. It costs one prompt per scored item.
- recalls and rstd: how often the right answer is found when it stands under A, under B, ...; their standard deviation
  (RStd of the same paper, as a share and not in percent) is 0 for a model without a taste for letters.

All letters are those of rotation 0 unless said otherwise; priors are per task and number of options.
"""

import random
import statistics

import polars as pl

ITEM = ["task", "item_id"]


def content_free_prior(content_free: pl.DataFrame) -> pl.DataFrame:
    """p_cf per item and letter, from the table's rows of context content_free: columns task, item_id, letter, p_cf.

    As in the paper's code: probabilities (not log-probabilities) are averaged over the texts, then normalised.
    """
    highest = pl.col("logprob").max().over(ITEM)
    means = (
        content_free.with_columns((pl.col("logprob") - highest).exp().alias("weight"))
        .sort(*ITEM, "letter", "variant")
        .group_by([*ITEM, "letter"], maintain_order=True)
        .agg(pl.col("weight").mean())
    )
    return means.select(*ITEM, "letter", (pl.col("weight") / pl.col("weight").sum().over(ITEM)).alias("p_cf"))


def letter_calibrated(letters: pl.DataFrame, content_free: pl.DataFrame) -> pl.DataFrame:
    """The option with the highest p / p_cf per item: columns task, item_id, letter_calibrated.

    Args:
        letters: `metrics.letter_probabilities` of the table.
        content_free: the table's rows of context content_free; items without them are left out.
    """
    joined = letters.filter(pl.col("rotation") == 0).join(content_free_prior(content_free), on=[*ITEM, "letter"])
    return _choices(joined, pl.col("probability").log() - pl.col("p_cf").log(), "letter_calibrated")


def pride_prior(letters: pl.DataFrame, share: float, seed: int) -> pl.DataFrame:
    """The prior of each letter: columns task, num_options, letter, prior, items (the list of those it was taken from).

    Args:
        letters: `metrics.letter_probabilities` of the table.
        share: of the items of a task with so many options; at least one, and never all. A single item has no prior.
        seed: draws those items.
    """
    group = ["task", "num_options"]
    drawn = []
    for (task, num), own in letters.select(*group, "item_id").unique().group_by(group):
        ids = sorted(own["item_id"])
        count = min(max(1, round(share * len(ids))), len(ids) - 1)
        drawn += [
            (task, num, item_id) for item_id in sorted(random.Random(f"pride:{task}:{num}:{seed}").sample(ids, count))
        ]
    sample = pl.DataFrame(
        drawn, schema={"task": pl.String, "num_options": pl.Int64, "item_id": pl.String}, orient="row"
    )
    item_letter = [*ITEM, "num_options", "letter"]
    means = (
        letters.join(sample, on=["task", "num_options", "item_id"], how="semi")
        .sort(*item_letter, "rotation")
        .group_by(item_letter, maintain_order=True)
        .agg(pl.col("logprob").mean())
    )
    weight = (pl.col("logprob") - pl.col("logprob").max().over(ITEM)).exp()
    return (
        means.with_columns((weight / weight.sum().over(ITEM)).alias("prior"))
        .group_by([*group, "letter"], maintain_order=True)
        .agg(pl.col("prior").mean(), pl.col("item_id").alias("items"))
        .sort(*group, "letter")
    )


def pride(letters: pl.DataFrame, share: float, seed: int) -> pl.DataFrame:
    """The option with the highest p / prior per item: columns task, item_id, pride.

    The items that the prior was estimated on are left out. Arguments as of `pride_prior`.
    """
    prior = pride_prior(letters, share, seed)
    used = prior.select("task", pl.col("items").alias("item_id")).explode("item_id").unique()
    rest = letters.filter(pl.col("rotation") == 0).join(used, on=ITEM, how="anti")
    joined = rest.join(prior.drop("items"), on=["task", "num_options", "letter"])
    return _choices(joined, pl.col("probability").log() - pl.col("prior").log(), "pride")


def _choices(letters: pl.DataFrame, score: pl.Expr, name: str) -> pl.DataFrame:
    """Per item the option with the highest score; the first letter where two score alike."""
    return (
        letters.with_columns(score.alias("score"))
        .sort(*ITEM, "letter")
        .group_by(ITEM, maintain_order=True)
        .agg(pl.col("option").get(pl.col("score").arg_max()).alias(name))
    )


def recalls(letters: pl.DataFrame, items: pl.DataFrame, scorer: str) -> dict[int, float]:
    """Of the items whose right answer stands under a letter, the share that the scorer answers rightly, per letter.

    Args:
        letters: `metrics.letter_probabilities` of the table.
        items: `metrics.score_items` of it; items with several right answers stand under no one letter, and are left
            out, as are those that the scorer did not answer.
        scorer: its name.
    """
    gold = letters.filter((pl.col("rotation") == 0) & (pl.col("option") == pl.col("answer"))).select(*ITEM, "letter")
    asked = items.filter(pl.col(f"{scorer}_correct").is_not_null() & (pl.col("answers").list.len() == 1))
    shares = (
        asked.join(gold, on=ITEM)
        .group_by("letter")
        .agg(pl.col(f"{scorer}_correct").sum().alias("right"), pl.len().alias("n"))
        .sort("letter")
    )
    return {letter: right / n for letter, right, n in shares.iter_rows()}


def rstd(found: dict[int, float]) -> float | None:
    """Population standard deviation of the recalls; null where fewer than two letters hold a right answer."""
    return statistics.pstdev(found.values()) if len(found) > 1 else None
