"""Rivals by hand on one literal item; the set itself; that leaving an option out is what asking without it gives."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.data.items import parse_item
from oneaxis.errors import UserError
from oneaxis.score.competition import has_rivals, mass, outcomes, summary, summary_words, views
from oneaxis.score.metrics import score_items
from oneaxis.score.table import SCHEMA
from oneaxis.sources.records import parse_jsonl

SET = Path(__file__).parents[2] / "data" / "competition.jsonl"


def rows(
    item: str, asked: list[float], premise: list[float], answers: tuple[int, ...] = (0, 2)
) -> list[dict[str, Any]]:
    """Rows of one item in contexts question and premise; options of 4 bytes each."""
    return [
        {"item_id": item, "task": "c", "topic": "t", "answer": answers[0], "answers": list(answers), "option": option,
         "context": context, "rotation": 0, "variant": 0, "letter": None, "prompt": "?", "continuation": " x",
         "token_ids": [7], "logprobs": [value], "logprob": value, "chars": 4, "bytes": 4, "tokens": 1,
         "prompt_tokens": 1, "boundary": "clean", "truncated": 0}
        for context, values in (("question", asked), ("premise", premise))
        for option, value in enumerate(values)
    ]  # fmt: skip


# Probabilities after the question: right .2, wrong .3, rival .4, wrong .1. Raw scoring finds the rival and not the
# right option. After the premise: .02, .3, .04, .1: L - P is log 10, 0, log 10, 0, so pmi_dc finds either form.
ITEM = rows("i", [math.log(p) for p in (0.2, 0.3, 0.4, 0.1)], [math.log(p) for p in (0.02, 0.3, 0.04, 0.1)])
# Right .25, wrong .3, rival .2, wrong .15: neither form is the likeliest option, and together they are.
SPLIT = rows("j", [math.log(p) for p in (0.25, 0.3, 0.2, 0.15)], [math.log(0.25)] * 4)


def test_views_by_hand() -> None:
    table = pl.DataFrame(ITEM, schema=SCHEMA)
    found = {name: score_items(view)["acc_predicted"].item() for name, view in views(table).items()}
    assert found == {"alone": 1, "rival_alone": 2, "beside": 2, "either": 2}
    (item,) = outcomes(table).to_dicts()
    acc = {view: item[f"{view}_acc"] for view in ("alone", "rival_alone", "beside", "either")}
    assert acc == {"alone": False, "rival_alone": True, "beside": False, "either": True}
    assert (item["alone_pmi_dc"], item["rival_alone_pmi_dc"], item["either_pmi_dc"]) == (True, True, True)
    assert item["alone_pmi"] is None


def test_mass_by_hand() -> None:
    one, two = mass(pl.DataFrame(ITEM + SPLIT, schema=SCHEMA)).to_dicts()
    assert math.exp(one["together"]) == pytest.approx(0.6)
    assert (one["share"], math.exp(one["wrong"])) == (pytest.approx(1 / 3), pytest.approx(0.3))
    assert (one["costs"], two["costs"]) == (False, True)
    assert math.exp(two["together"]) == pytest.approx(0.45)
    # What one form has to itself: two of three of item i, 25 of 45 of item j.
    found = summary(pl.DataFrame(ITEM + SPLIT, schema=SCHEMA))["mass"]
    assert found == {"n": 2, "share_of_the_commoner": pytest.approx((2 / 3 + 25 / 45) / 2), "tenfold": 0, "costs": 1}


def test_the_survivor_comes_first() -> None:
    """Raw scoring answers item i by form, and pmi_dc both forms alike. Item j nobody answers."""
    found = summary(pl.DataFrame(ITEM + SPLIT, schema=SCHEMA))
    ranked = {row["scorer"]: (row["both"]["accuracy"], row["turned"]) for row in found["scorers"]}
    assert (ranked["pmi_dc"], ranked["acc"]) == ((0.5, 0), (0.0, 1))
    assert found["scorers"][0]["scorer"] == "pmi_dc"
    acc = next(row for row in found["scorers"] if row["scorer"] == "acc")
    assert (acc["swing"]["only_first"], acc["swing"]["only_second"], acc["swing"]["num_tests"]) == (0, 1, 5)
    assert "pmi" not in ranked
    survival = {row["scorer"]: row["survival"] for row in found["scorers"]}
    assert survival["acc_bytes"] is None
    assert (survival["pmi_dc"]["only_second"], survival["pmi_dc"]["n"], survival["pmi_dc"]["num_tests"]) == (1, 2, 4)
    words = summary_words(found)
    assert "1 of 2 answers lose to a distractor for being split" in words
    assert "pmi_dc survives best: right with either form in 50% of items, and in 0% the form alone decides." in words


def test_an_option_more_never_helps() -> None:
    found = summary(pl.DataFrame(ITEM + SPLIT, schema=SCHEMA))
    assert all(row["lost_beside"]["only_second"] == 0 for row in found["scorers"])


def test_without_the_rival_is_as_if_it_had_never_been_asked() -> None:
    """Item i without its rival, written down as an item of three options of its own."""
    asked, premise = ([math.log(p) for p in ps] for ps in ((0.2, 0.3, 0.1), (0.02, 0.3, 0.1)))
    never = score_items(pl.DataFrame(rows("i", asked, premise, (0,)), schema=SCHEMA))
    left_out = score_items(views(pl.DataFrame(ITEM, schema=SCHEMA))["alone"])
    correct = [name for name in never.columns if name.endswith("_correct")]
    assert left_out.select(correct).equals(never.select(correct))


def test_items_without_a_rival_are_no_such_set() -> None:
    table = pl.DataFrame(ITEM + rows("k", [-1.0, -2.0], [-1.0, -1.0], (0,)), schema=SCHEMA)
    assert has_rivals(pl.DataFrame(ITEM, schema=SCHEMA))
    assert not has_rivals(table)
    assert not has_rivals(pl.DataFrame(schema=SCHEMA))
    with pytest.raises(UserError, match="item k: 1 right answers"):
        views(table)


def test_the_set_is_what_it_says() -> None:
    """At least 100 items, two right of five, whose forms do not hold each other's probability, at any place."""
    records = [json.loads(line) for line in SET.read_text(encoding="utf-8").splitlines()]
    assert len(records) >= 100
    assert len({record["question"] for record in records}) == len(records)
    for record in records:
        right, rival = (record["choices"][place] for place in record["answers"])
        assert len(set(record["choices"])) == len(record["choices"]) == 5
        # The probability of "rhino" holds that of "rhinoceros" too: such forms do not compete.
        assert not right.lower().startswith(rival.lower())
        assert not rival.lower().startswith(right.lower())
        assert not any(f" {text.lower()} " in f" {record['question'].lower()} " for text in record["choices"])
        assert all(part.isalnum() for part in record["synset"].split("-"))
    places = Counter(place for record in records for place in record["answers"])
    assert min(places.values()) > 0.6 * max(places.values())
    assert len(Counter(record["topic"] for record in records)) >= 6


def test_the_sources_name_this_very_file() -> None:
    digest = hashlib.sha256(SET.read_bytes()).hexdigest()
    assert f"| `competition.jsonl` | `{digest}` |" in (SET.parent / "SOURCES.md").read_text(encoding="utf-8")


def test_the_set_is_read_as_items() -> None:
    records = parse_jsonl(SET.read_bytes(), "competition.jsonl")
    items = [parse_item(record, tasks=["competition"]) for record in records]
    assert {len(item["answers"]) for item in items} == {2}
    assert items[0]["topic"]
