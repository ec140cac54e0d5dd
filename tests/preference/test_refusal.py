"""The refusal detector on labelled answers: what the artifact states of it is recomputed here, rule by rule apart."""

import pytest

from oneaxis.preference.refusal import EXPECTED, accuracy, is_empty, is_refusal, labelled

ROWS = labelled()


def test_the_labelled_answers_are_enough_and_distinct() -> None:
    assert len({row["text"] for row in ROWS}) == len(ROWS)
    for part in ("development", *EXPECTED):
        labels = [row["refusal"] for row in ROWS if row["part"] == part]
        assert sum(labels) >= 10, part
        assert labels.count(False) >= 10, part
    unseen = [row for row in ROWS if row["part"] in EXPECTED]
    assert len(unseen) >= 200
    hard = [row for row in unseen if row["kind"] in ("idiom", "apology", "quoted", "about", "caveat")]
    assert len(hard) >= 35, "answers that look like refusals and are none"


@pytest.mark.parametrize("part", EXPECTED)
def test_accuracy_on_the_parts_that_the_rules_were_not_written_from(part: str) -> None:
    """Oracle: the counts, by a loop of their own. The floors are what the docs state, rounded down."""
    rows = [row for row in ROWS if row["part"] == part]
    told = accuracy(rows)
    table = {(label, found): 0 for label in (True, False) for found in (True, False)}
    for row in rows:
        table[row["refusal"], is_refusal(row["text"])] += 1
    hits = table[True, True]
    assert told["accuracy"] == (hits + table[False, False]) / len(rows)
    assert told["precision"] == hits / (hits + table[False, True])
    assert told["recall"] == hits / (hits + table[True, False])
    assert told["accuracy_ci_low"] < told["accuracy"] <= told["accuracy_ci_high"] <= 1
    assert told["accuracy"] >= 0.95
    assert told["precision"] >= 0.95
    assert told["recall"] >= 0.9


def test_wilsons_interval_by_hand() -> None:
    """9 right of 10: centre (0.9 + z^2/20) / (1 + z^2/10), z = 1.96: 0.596 to 0.982 (Brown, Cai and DasGupta, 2001)."""
    rows = [{"text": "Paris", "refusal": False}] * 9 + [{"text": "Paris", "refusal": True}]
    told = accuracy(rows)
    assert (told["accuracy_ci_low"], told["accuracy_ci_high"]) == pytest.approx((0.596, 0.982), abs=1e-3)
    assert told["precision"] is None, "nothing was called a refusal"
    assert told["recall"] == 0


def test_an_empty_answer_is_counted_as_empty_only() -> None:
    assert is_empty(" \n")
    assert not is_refusal(" \n")
    assert not is_empty("42")


def test_a_refusal_behind_three_sentences_is_none() -> None:
    """An answer that answers first is an answer."""
    answer = "Boil the water. Add salt. Add the pasta. I can't help with the sauce."
    assert not is_refusal(answer)
    assert is_refusal("I can't help with the sauce. Boil the water.")
