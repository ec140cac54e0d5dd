"""Surface-form competition made visible: what a scorer makes of an answer that can be said in two ways.

A model spreads the probability of one answer over all its surface forms ("car", "automobile"), and a multiple-choice
item lists one of them (Holtzman et al., 2021, arXiv 2104.08315). Here both are known: every item has a right option, a
rival that says the same in other words, and distractors that are wrong. One table of log-probabilities holds them all,
and leaving an option out of it is the same as not having asked:

- alone: the right option and the distractors.
- rival_alone: the rival and the distractors. The same question with the same answer, said otherwise: whatever a scorer
  changes here is surface form, and nothing else.
- beside: all of them, with the right option as the one key, as a data set would have it.
- either: all of them, with both right.

Pure functions of the table (`table.SCHEMA`). The set is `data/competition.jsonl`: among an item's `answers` the first
is the right option and the second its rival. Only scorers that read an option by itself can be asked like this; the
letter format shows all options in its prompt.
"""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.score.calibration import ITEM
from oneaxis.score.metrics import CLOZE, accuracy, score_items
from oneaxis.score.significance import corrected, paired

BASE = "acc_bytes"
"""The scorer whose survival the others' is held against."""
VIEWS = ("alone", "rival_alone", "beside", "either")


def has_rivals(table: pl.DataFrame) -> bool:
    """Whether every item of the table has two right answers and a wrong one."""
    items = table.filter(pl.col("context") == "question").group_by(ITEM).agg(pl.len(), pl.col("answers").first())
    return not items.is_empty() and bool(((pl.Series(items["answers"]).list.len() == 2) & (items["len"] > 2)).all())


def views(table: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The table as each of VIEWS asks it: rows left out, and other options right.

    Raises:
        UserError: when an item has not two right answers, naming it.
    """
    other = table.filter(pl.col("answers").list.len() != 2)
    if other.height:
        raise UserError(f"item {other['item_id'][0]}: {len(other['answers'][0])} right answers; allowed in a set of "
                        "rivals: 2, the right one and its rival")  # fmt: skip
    cloze = table.filter(pl.col("letter").is_null())
    right, rival = pl.col("answers").list.get(0), pl.col("answers").list.get(1)
    return {
        "alone": _keyed(cloze.filter(pl.col("option") != rival), right),
        "rival_alone": _keyed(cloze.filter(pl.col("option") != right), rival),
        "beside": _keyed(cloze, right),
        "either": cloze,
    }


def _keyed(table: pl.DataFrame, key: pl.Expr) -> pl.DataFrame:
    return table.with_columns(answer=key, answers=pl.concat_list(key))


def outcomes(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item: task, item_id, topic, and for each view and scorer whether it was right (`<view>_<scorer>`)."""
    joined: pl.DataFrame | None = None
    for view, asked in views(table).items():
        found = score_items(asked)
        columns = [pl.col(f"{name}_correct").alias(f"{view}_{name}") for name in CLOZE]
        own = found.select(*ITEM, *(["topic"] if joined is None else []), *columns)
        joined = own if joined is None else joined.join(own, on=ITEM, validate="1:1", maintain_order="left")
    assert joined is not None
    return joined


def mass(table: pl.DataFrame) -> pl.DataFrame:
    """One row per item: how its answer's probability after the question is split.

    Columns: task, item_id, topic, `right` and `rival` (log-probabilities, nats), `wrong` (of the likeliest distractor),
    `together` (of right or rival), `share` (the right option's share of the two), `costs` (right and rival together are
    likelier than every distractor, and neither is by itself: the answer loses for being split).
    """
    asked = table.filter(pl.col("context") == "question")
    first, second = (pl.col("answers").list.get(place) for place in (0, 1))
    logprob, option = pl.col("logprob"), pl.col("option")
    found = asked.group_by(ITEM, maintain_order=True).agg(
        pl.col("topic").first(),
        logprob.filter(option == first).first().alias("right"),
        logprob.filter(option == second).first().alias("rival"),
        logprob.filter((option != first) & (option != second)).max().alias("wrong"),
    )
    higher, lower = pl.max_horizontal("right", "rival"), pl.min_horizontal("right", "rival")
    together = higher + (1 + (lower - higher).exp()).log()
    return found.with_columns(
        together.alias("together"),
        (1 / (1 + (pl.col("rival") - pl.col("right")).exp())).alias("share"),
        ((together > pl.col("wrong")) & (higher <= pl.col("wrong"))).alias("costs"),
    )


def summary(table: pl.DataFrame, scorers: Sequence[str] = CLOZE, *, seed: int = 0) -> dict[str, Any]:
    """The whole of it for one set of items.

    Returns:
        `mass`: n, median share of the commoner of the two forms, and how many items lose for being split.
        `scorers`: per scorer the accuracy of each view, `both` (right with either form in the list: what survives the
        wording), `turned` (right with one form, wrong with the other), `swing` (rival_alone against alone, paired) and
        `lost_beside` (beside against alone, paired: an option more can only take answers away), each corrected over
        the scorers; `survival` (`both` against that of BASE, paired; null for BASE); in the order of who survives best.
    """
    items, split = outcomes(table), mass(table)
    commoner = pl.max_horizontal("share", 1 - pl.col("share"))
    found: dict[str, Any] = {
        "mass": {
            "n": split.height,
            "share_of_the_commoner": float(split.select(commoner.median()).item()),
            "tenfold": split.filter((pl.col("right") - pl.col("rival")).abs() > math.log(10)).height,
            "costs": int(split["costs"].sum()),
        }
    }
    rows, swings, losses = [], [], []
    for name in scorers:
        own = items.select("topic", *(pl.col(f"{view}_{name}").alias(view) for view in VIEWS)).drop_nulls(VIEWS)
        if own.is_empty():
            continue
        alone, rival = own["alone"], own["rival_alone"]
        rows.append({"scorer": name, **{view: accuracy(own[view]) for view in VIEWS},
                     "both": accuracy(alone & rival), "turned": int((alone != rival).sum())})  # fmt: skip
        swings.append(paired(list(alone), list(rival), seed=seed))
        losses.append(paired(list(alone), list(own["beside"]), seed=seed))
    merged = zip(rows, corrected(swings), corrected(losses), strict=True)
    ranked = [{**row, "swing": swing, "lost_beside": lost} for row, swing, lost in merged]
    survival = _survival(items, [str(row["scorer"]) for row in rows], seed)
    ranked = [{**row, "survival": survival.get(str(row["scorer"]))} for row in ranked]
    found["scorers"] = sorted(ranked, key=lambda row: (-row["both"]["accuracy"], row["turned"], row["scorer"]))
    return found


def _survival(items: pl.DataFrame, scorers: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """Per scorer: being right with either form, against BASE on the same items; corrected over the scorers."""
    right = items.select((pl.col(f"alone_{name}") & pl.col(f"rival_alone_{name}")).alias(name) for name in scorers)
    others = [name for name in scorers if name != BASE and BASE in scorers]
    pairs = [right.select(BASE, name).drop_nulls() for name in others]
    found = corrected([paired(*(list(column) for column in pair), seed=seed) for pair in pairs])
    return dict(zip(others, found, strict=True))


def summary_words(found: dict[str, Any]) -> str:
    """The summary in a few sentences."""
    split, best, worst = found["mass"], found["scorers"][0], found["scorers"][-1]
    said = [
        f"In the median item the commoner of the two forms holds {split['share_of_the_commoner']:.0%} of what both "
        f"have, and {split['costs']} of {split['n']} answers lose to a distractor for being split."
    ]
    said += [
        f"{row['scorer']} {verb}: right with either form in {row['both']['accuracy']:.0%} of items, and in "
        f"{row['turned'] / row['both']['n']:.0%} the form alone decides."
        for row, verb in ((best, "survives best"), (worst, "survives worst"))
    ]
    return " ".join(said)
