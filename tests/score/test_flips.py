"""Which items changed, by hand; what they share, on items whose flips are made to follow one feature or none."""

import random
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

from oneaxis.errors import UserError
from oneaxis.score.flips import features, flips, kind_test, rank_test, shared
from oneaxis.score.table import SCHEMA


def items(predicted: list[int | None], answer: int = 1) -> pl.DataFrame:
    """Scored items of one scorer, `acc`."""
    rows = [{"task": "t", "item_id": f"i{place:03}", "answer": answer, "acc_predicted": one,
             "acc_correct": None if one is None else one == answer} for place, one in enumerate(predicted)]  # fmt: skip
    return pl.DataFrame(rows, schema={"task": pl.String, "item_id": pl.String, "answer": pl.Int64,
                                      "acc_predicted": pl.Int64, "acc_correct": pl.Boolean})  # fmt: skip


def test_lost_gained_moved_same() -> None:
    """The answer is 1. 1 -> 0 lost, 0 -> 1 gained, 0 -> 2 moved, 2 -> 2 and 1 -> 1 the same; unanswered: left out."""
    found = flips(items([1, 0, 0, 2, 1, None]), items([0, 1, 2, 2, 1, 1]), "acc")
    assert found["change"].to_list() == ["lost", "gained", "moved", "same", "same"]
    assert found["flipped"].to_list() == [True, True, True, False, False]
    with pytest.raises(UserError, match="no item that acc answered is in both runs"):
        flips(items([None]), items([1]), "acc")


def test_one_right_answer_for_another_flips_and_loses_nothing() -> None:
    before, after = items([1]), items([2]).with_columns(acc_correct=pl.lit(True))
    (found,) = flips(before, after, "acc").to_dicts()
    assert (found["change"], found["flipped"]) == ("same", True)


def test_features_by_hand() -> None:
    """Log-probabilities -3, -1.5, -2: option 1 leads by half a nat. It is the answer, 7 bytes, after 11 tokens."""
    rows: list[dict[str, Any]] = [
        {"item_id": "i", "task": "t", "topic": "birds", "answer": 1, "answers": [1], "option": option,
         "context": context, "rotation": 0, "variant": 0, "letter": None, "prompt": "?", "continuation": " x",
         "token_ids": [7], "logprobs": [value], "logprob": value, "chars": 4, "bytes": 6 + option, "tokens": 1,
         "prompt_tokens": 11, "boundary": "clean", "truncated": 0}
        for context, values in (("question", (-3.0, -1.5, -2.0)), ("premise", (-1.0, -1.0, -1.0)))
        for option, value in enumerate(values)
    ]  # fmt: skip
    table = pl.DataFrame(rows, schema=SCHEMA)
    (known,) = features(table, "acc").to_dicts()
    assert known == {"task": "t", "item_id": "i", "prompt_tokens": 11, "answer_bytes": 7, "answer_position": 1,
                     "topic": "birds", "margin": 0.5}  # fmt: skip
    assert features(table, "letter")["margin"].to_list() == [None]


def made_up(which: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """200 items, a quarter flipped by `which` (a feature, or none of them), and their features."""
    draw = random.Random(5)
    known = pl.DataFrame([
        {"task": "t", "item_id": f"i{place:03}", "prompt_tokens": draw.randint(10, 90), "answer_position": place % 4,
         "answer_bytes": draw.randint(3, 30), "topic": draw.choice(["birds", "ships", "trees"]),
         "margin": draw.expovariate(1.0)}
        for place in range(200)
    ])  # fmt: skip
    rule = {"margin": pl.col("margin") < 0.3, "topic": (pl.col("topic") == "ships") & (pl.col("prompt_tokens") % 4 > 0),
            "nothing": pl.Series([draw.random() < 0.25 for _ in range(200)])}[which]  # fmt: skip
    return known.select("task", "item_id", flipped=rule), known


@pytest.mark.parametrize("which", ["margin", "topic"])
def test_the_planted_feature_is_found_and_no_other(which: str) -> None:
    rows = shared(*made_up(which))
    assert len(rows) == 5
    assert [row["feature"] for row in rows if row["p_holm"] < 0.05] == [which]


def test_flips_at_random_share_nothing() -> None:
    rows = shared(*made_up("nothing"))
    assert min(row["p_holm"] for row in rows) > 0.05
    assert {row["num_tests"] for row in rows} == {5}
    topics = next(row for row in rows if row["feature"] == "topic")["levels"]
    assert sum(level["n"] for level in topics.values()) == 200
    assert sum(level["flipped"] for level in topics.values()) == rows[0]["num_flipped"]


def test_nothing_is_said_where_none_or_all_flipped() -> None:
    flipped, known = made_up("margin")
    for value in (True, False):
        assert shared(flipped.with_columns(flipped=pl.lit(value)), known) == []
    same = known.with_columns(topic=pl.lit("one"), answer_position=pl.lit(0))
    assert [row["feature"] for row in shared(flipped, same)] == ["prompt_tokens", "answer_bytes", "margin"]


def test_permutation_agrees_with_scipys_tests() -> None:
    draw = np.random.default_rng(1)
    values = np.round(draw.normal(size=120), 1)
    flipped = draw.random(120) < 0.3 + 0.1 * (values > 0)
    expected = stats.mannwhitneyu(values[flipped], values[~flipped], use_continuity=False).pvalue
    assert rank_test(values, flipped, 0) == pytest.approx(expected, abs=0.03)
    kinds = draw.integers(0, 3, size=120)
    counts = [[int(((kinds == kind) & (flipped == one)).sum()) for one in (True, False)] for kind in range(3)]
    expected = stats.chi2_contingency(counts, correction=False).pvalue
    assert kind_test(kinds.tolist(), flipped, 0) == pytest.approx(expected, abs=0.03)
