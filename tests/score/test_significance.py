"""Comparisons of right and wrong, worked by hand, and against data that are made up to be tied, clustered or apart."""

import math
import random
from typing import Any

import polars as pl
import pytest

from oneaxis.errors import UserError
from oneaxis.score.metrics import SCORERS
from oneaxis.score.significance import (
    clustered_stderr,
    compare_runs,
    compare_scorers,
    corrected,
    paired,
    pmi_words,
    with_error,
)


def scored(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows of `metrics.score_items`: scorers that a row does not name answered nothing."""
    schema = {"task": pl.String, "item_id": pl.String, "topic": pl.String, "answer": pl.Int64,
              "answers": pl.List(pl.Int64), **{f"{name}_correct": pl.Boolean for name in SCORERS}}  # fmt: skip
    default = {"task": "t", "topic": None, "answer": 0, "answers": [0]}
    return pl.DataFrame([{**default, **row} for row in rows], schema=schema)


def column(name: str, right: list[bool], **facts: Any) -> list[dict[str, Any]]:
    """One row per item, with one scorer's answers."""
    return [{"item_id": f"i{place}", f"{name}_correct": value, **facts} for place, value in enumerate(right)]


def test_clustered_error_by_hand() -> None:
    """Answers 1 1 0 0, mean 1/2. Clusters ab, cd: sums 1 and -1, sqrt(2) / 4. Each its own: sqrt(4 / 4) / 4 = 1/4."""
    right = [True, True, False, False]
    assert clustered_stderr(right, ["x", "x", "y", "y"]) == pytest.approx(math.sqrt(2) / 4)
    assert clustered_stderr(right, list("abcd")) == pytest.approx(1 / 4)
    assert clustered_stderr(right, ["x", "y", "x", "y"]) == 0
    facts = with_error(pl.Series(right), pl.Series(["x", "x", "y", "y"]))
    assert facts == {"n": 4, "accuracy": 0.5, "stderr": math.sqrt(1 / 12), "clusters": 2,
                     "stderr_clustered": pytest.approx(math.sqrt(2) / 4)}  # fmt: skip
    assert with_error(pl.Series(right), pl.Series(["x", None, "y", "y"]))["stderr_clustered"] is None
    assert with_error(pl.Series([True, None, False]), pl.Series(["x", None, "y"]))["clusters"] == 2


def test_five_items_lost_and_none_gained_by_hand() -> None:
    """5 of 20 lost: -1/4, McNemar 2 / 2^5. A resample's mean is -Binomial(20, 1/4) / 20: its 2.5% and 97.5% quantiles
    are 9 and 2 of 20 (P(B <= 1) = .024, P(B <= 2) = .091; P(B <= 8) = .959, P(B <= 9) = .986)."""
    found = paired([True] * 20, [False] * 5 + [True] * 15)
    assert (found["n"], found["only_first"], found["only_second"], found["effect"]) == (20, 5, 0, -0.25)
    assert (found["p_value"], found["test"], found["interval"]) == (1 / 16, "mcnemar_exact", "bootstrap")
    assert (found["low"], found["high"]) == (pytest.approx(-9 / 20), pytest.approx(-2 / 20))
    assert paired([True] * 20, [False] * 5 + [True] * 15, seed=7)["low"] == pytest.approx(-9 / 20)


def test_no_discordant_item_is_no_certainty() -> None:
    """Tango's interval of 0 of n is -+ z^2 / (n + z^2): 3.8415 / 103.8415."""
    found = paired([True] * 100, [True] * 100)
    assert found["p_value"] == 1
    assert found["interval"] == "score"
    assert (found["low"], found["high"]) == (pytest.approx(-0.0370, abs=1e-4), pytest.approx(0.0370, abs=1e-4))


def test_one_item_of_276_is_a_tie() -> None:
    found = paired([True] * 247 + [False] * 29, [True] * 230 + [False] * 17 + [True] * 16 + [False] * 13)
    assert (found["effect"], found["p_value"]) == (-1 / 276, 1)
    assert found["low"] < 0 < found["high"]


def test_clusters_that_flip_as_one_count_as_one() -> None:
    """Eight topics of 25; in one of them every item is lost. By items that is certain, by topics it is one of eight."""
    first, second = [True] * 200, [False] * 25 + [True] * 175
    topics = [f"topic {place // 25}" for place in range(200)]
    by_item, by_topic = paired(first, second), paired(first, second, topics)
    assert by_item["p_value"] < 1e-6
    assert by_item["high"] < 0
    assert (by_topic["test"], by_topic["interval"], by_topic["clusters"]) == (
        "sign_flip_of_clusters", "clustered_bootstrap", 8,
    )  # fmt: skip
    # The one difference that is not 0 has either sign: both assignments lie as far out.
    assert (by_topic["p_value"], by_topic["high"]) == (1, 0)
    assert by_topic["effect"] == by_item["effect"] == -1 / 8


@pytest.mark.parametrize("topics", [[None] * 12, [str(n % 5) for n in range(12)], [str(n) for n in range(12)]])
def test_too_few_clusters_or_one_for_each_item_are_none(topics: list[str | None]) -> None:
    assert paired([True] * 12, [False] + [True] * 11, topics)["test"] == "mcnemar_exact"


def test_holm_is_over_all_rows_and_says_so() -> None:
    """p .01, .04, .03 of three: 3 * .01, then 2 * .03, then max(.06, .04)."""
    rows = corrected([{"p_value": 0.01}, {"p_value": 0.04}, {"p_value": 0.03}])
    assert [row["p_holm"] for row in rows] == pytest.approx([0.03, 0.06, 0.06])
    assert {row["num_tests"] for row in rows} == {3}


def test_of_twenty_ties_none_is_called_different() -> None:
    """Twenty tasks of coin flips: without correction some p is below .05, with it none is."""
    draw = random.Random(3)
    rows = [{"task": f"t{task}", "item_id": str(item), "acc_correct": draw.random() < 0.5,
             "acc_bytes_correct": draw.random() < 0.5} for task in range(20) for item in range(60)]  # fmt: skip
    found = compare_scorers(scored(rows), "acc")
    assert len(found) == 20
    assert min(row["p_value"] for row in found) < 0.05 < min(row["p_holm"] for row in found)


def test_scorers_are_compared_on_the_items_that_both_answered() -> None:
    rows = column("acc", [True] * 10)
    for place, row in enumerate(rows[:6]):
        row |= {"letter_correct": place >= 5}
    (found,) = compare_scorers(scored(rows), "acc")
    assert (found["first"], found["second"], found["n"], found["only_first"]) == ("acc", "letter", 6, 5)
    assert (found["p_value"], found["num_tests"]) == (1 / 16, 1)


def test_runs_are_joined_by_item_and_what_only_one_has_is_counted() -> None:
    before, after = scored(column("acc", [True] * 10)), scored(column("acc", [False] * 6 + [True] * 3)[::-1])
    (found,) = compare_runs(before, after, ["acc", "letter"])
    assert (found["n"], found["only_first"], found["left_out"], found["p_value"]) == (9, 6, 1, 1 / 32)
    with pytest.raises(UserError, match="share no item"):
        compare_runs(before, scored(column("acc", [True], task="other")))
    with pytest.raises(UserError, match=r"item i0: answers is \[0\] in one run and \[1\] in the other"):
        compare_runs(before, scored(column("acc", [True], answers=[1])))


def test_pmi_is_said_to_hurt_only_where_it_does() -> None:
    def row(effect: float, p: float, second: str = "pmi_dc") -> dict[str, Any]:
        return {"task": "t", "first": "acc", "second": second, "effect": effect, "p_holm": p, "num_tests": 4, "n": 90}

    assert pmi_words([row(0.1, 0.01), row(-0.1, 0.01, "acc_norm")]) == []
    (hurts,) = pmi_words([row(-0.1, 0.01)])
    assert hurts == "t: PMI hurts here (−10.0 points against acc, p 0.01 by Holm over 4, n 90)."
    assert "does not help here, and whether it hurts is not shown" in pmi_words([row(-0.02, 0.6)])[0]
    assert "ahead by no more than chance gives" in pmi_words([row(0.02, 0.6)])[0]
