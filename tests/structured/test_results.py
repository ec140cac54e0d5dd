"""From answers laid out token by token to the tables, metrics and summary, worked by hand."""

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.config import compose
from oneaxis.config.schema import ExtractDocuments
from oneaxis.structured.documents import Document
from oneaxis.structured.extraction import RAW
from oneaxis.structured.results import flat_metrics, summarise, tables

ROOT = Path(__file__).parents[2]
TRUTH = {"evidence": "Paid by card", "label": "card", "amount": 417}
PAIR = [
    Document("r", "legible", "receipt", "Total 417\nPaid by card", TRUTH),
    Document("r", "illegible", "receipt", "Total ###", dict.fromkeys(TRUTH)),
]
LIST = Document("l", "n2", "list", "Stock\nfigs, fruit, 3, dried\nmilk, dairy, 40", {"rows": [
    {"name": "figs", "kind": "fruit", "count": 3, "note": "dried"}, {"name": "milk", "kind": "dairy", "count": 40},
]})  # fmt: skip


class Characters:
    """A tokenizer with a token a character; 0 ends an answer."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(token) for token in ids if token)

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def settings(**changes: Any) -> ExtractDocuments:
    given = [f"extract.{key}={json.dumps(value)}" for key, value in changes.items()]
    section = compose(ROOT / "conf", ["extract=records", *given]).extract
    assert isinstance(section, ExtractDocuments)
    return section


def said(document: Document, text: str, kept: dict[str, list[float]], *, finished: bool = True) -> dict[str, Any]:
    """An answer by characters. `kept`: a part of the text and what its characters kept; everywhere else all was."""
    mass: list[float] = [1.0] * (len(text) + 1)
    for part, values in kept.items():
        begin = text.index(part)
        mass[begin : begin + len(part)] = [*values, *[1.0] * (len(part) - len(values))]
    return {
        "document_id": document.document_id, "condition": document.condition, "prompt_tokens": 50, "reasoning": None,
        "reasoning_tokens": 0, "text": text, "finished": finished, "token_ids": [*map(ord, text), 0],
        "logprobs": [math.log(0.5 * value) for value in mass], "kept": mass, "kept_at_one": mass,
        "moved": [value < 0.5 for value in mass],
    }  # fmt: skip


RIGHT = json.dumps(TRUTH)
FORCED = json.dumps({"evidence": "Total ###", "label": "cash", "amount": None})
ANSWERS = [said(PAIR[0], RIGHT, {'card", "am': [0.9, 0.8], "417": [0.6]}),
           said(PAIR[1], FORCED, {'cash", "am': [0.4, 0.7]})]  # fmt: skip


def test_fields_and_measures_of_two_renderings() -> None:
    answers, fields = tables(PAIR, pl.DataFrame(ANSWERS, schema=RAW), Characters(), settings())
    columns = ["condition", "field", "truth", "value", "outcome", "kept_first", "kept", "moved"]
    assert fields.select(columns).rows() == [
        ("legible", "evidence", '"Paid by card"', '"Paid by card"', "right", 1.0, 1.0, False),
        ("legible", "label", '"card"', '"card"', "right", 0.9, 0.8, False),
        ("legible", "amount", "417", "417", "right", 0.6, 0.6, False),
        ("illegible", "evidence", None, '"Total ###"', "forced", 1.0, 1.0, False),
        ("illegible", "label", None, '"cash"', "forced", 0.4, 0.4, True),
        ("illegible", "amount", None, "null", "right", 1.0, 1.0, False),
    ]
    # Each token has half of what was kept. `c` tells cash and card from the others, the third character the two apart.
    assert fields.filter(field="label")["confidence"].to_list() == pytest.approx([0.25, 0.25])
    assert fields.filter(pl.col("field") != "label")["confidence"].null_count() == 4
    known = {name: answers[name].to_list() for name in ("exact", "label_right", "label_forced", "label_unknown",
                                                        "amount_unknown", "label_guess", "tokens")}  # fmt: skip
    assert known == {"exact": [1, 0], "label_right": [1, 0], "label_forced": [0, 1], "label_unknown": [0, 0],
                     "amount_unknown": [0, 1], "label_guess": [0, 1],
                     "tokens": [len(RIGHT) + 1, len(FORCED) + 1]}  # fmt: skip
    assert answers["rows_right"].null_count() == 2

    metrics = flat_metrics(answers, settings())
    assert metrics["answers"] == metrics["records/n"] == 2
    assert metrics["legible/label_kept"] == 0.8
    assert metrics["illegible/label_guess"] == metrics["illegible/label_forced"] == 1
    assert metrics["records/exact"] == metrics["records/amount_unknown"] == 0.5
    assert not [name for name in metrics if "rows" in name]

    summary = summarise(answers, fields, settings(), Characters())
    assert summary["unknown"] == {name: {"n": 2, "said": said, "true": 0.5}
                                  for name, said in (("evidence", 0.0), ("label", 0.0), ("amount", 0.5))}  # fmt: skip
    assert summary["known"]["records"]["label_kept"] == 2
    assert summary["twins"]["label"] is None
    assert summary["confidence"] == {outcome: {"n": 1, "mean": pytest.approx(0.25)} for outcome in ("right", "forced")}
    # By characters cash and card begin alike, and so do all of P1 to P4.
    assert summary["shared_first_tokens"]["receipt"] == [["cash", "card"]]
    assert summary["shared_first_tokens"]["ticket"] == [["P1", "P2", "P3", "P4"]]


def test_twins_are_compared_by_document() -> None:
    pairs, answers = [], []
    for number, (legible, illegible) in enumerate([(0.9, 0.4), (0.8, 0.5), (0.7, 0.1)]):
        for each, text, kept in ((PAIR[0], RIGHT, {'card", "am': [legible]}),
                                 (PAIR[1], FORCED, {'cash", "am': [illegible]})):  # fmt: skip
            document = Document(f"r{number}", each.condition, each.kind, each.text, each.truth)
            pairs.append(document)
            answers.append(said(document, text, kept))
    made = tables(pairs, pl.DataFrame(answers, schema=RAW), Characters(), settings())
    twins = summarise(*made, settings(), Characters())["twins"]["label"]
    # Differences .5, .3, .6: mean .4667, s .15275, t(2) = 4.30265; all of one sign, so p = 2/8.
    assert (twins["n"], twins["p_value"]) == (3, 0.25)
    margin = 4.30265 * 0.152753 / 3**0.5
    assert (twins["effect"], twins["low"]) == (pytest.approx(1.4 / 3), pytest.approx(1.4 / 3 - margin, abs=1e-5))


def test_answers_that_failed_have_no_mass_and_count_as_failures() -> None:
    texts = [(RIGHT[:40], False), ("```json\n" + RIGHT + "\n```", True)]
    answers = [said(document, text, {}, finished=finished)
               for document, (text, finished) in zip(PAIR, texts, strict=True)]  # fmt: skip
    made, fields = tables(PAIR, pl.DataFrame(answers, schema=RAW), Characters(), settings())
    assert made.select("parse_failed", "truncated", "fenced").rows() == [(1.0, 1.0, False), (0.0, 0.0, True)]
    assert fields["outcome"].to_list() == ["absent"] * 3 + ["forced"] * 3
    # Behind a fence the value is found where it stands.
    assert fields["kept"].to_list() == [None] * 3 + [1.0] * 3
    assert made["label_guess"].to_list() == [None, 0.0]
    assert "legible/label_guess" not in flat_metrics(made, settings())


def test_lists() -> None:
    own = settings(records=0, lists=1, lengths=[2], grammar="none")
    text = json.dumps({"rows": [{"name": "figs", "kind": "grain", "count": 3}]})
    made, fields = tables([LIST], pl.DataFrame([said(LIST, text, {"grain": [0.3]})], schema=RAW), Characters(), own)
    row = made.row(0, named=True)
    names = ("rows_right", "early_stop", "wrong_enum", "dropped_optional", "kind_guess", "kind_kept", "exact")
    assert [row[name] for name in names] == [0.0, 1.0, 1.0, 1.0, 1.0, 0.3, 0.0]
    assert row["label_right"] is None
    assert fields["row"].to_list() == [0] * 4 + [1] * 4
    metrics = flat_metrics(made, own)
    assert metrics["lists/wrong_enum"] == metrics["n2/early_stop"] == 1
    # Without a mask nothing was renormalised: log-probabilities are the model's own.
    assert fields.filter(field="kind", row=0)["confidence"].item() == pytest.approx(0.15)


def test_a_list_without_a_wrong_row_or_a_dropped_note() -> None:
    own = settings(records=0, lists=1, lengths=[2])
    made, _ = tables([LIST], pl.DataFrame([said(LIST, json.dumps(LIST.truth), {})], schema=RAW), Characters(), own)
    row = made.row(0, named=True)
    names = ("rows_right", "early_stop", "wrong_enum", "dropped_optional", "kind_guess", "exact")
    assert [row[name] for name in names] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_an_answer_that_never_ends_is_a_loop_and_a_long_one_is_none() -> None:
    texts = [RIGHT[:12] + " \n" * 200, RIGHT]
    answers = [said(document, text, {}, finished=finished)
               for document, text, finished in zip(PAIR, texts, (False, True), strict=True)]  # fmt: skip
    made, _ = tables(PAIR, pl.DataFrame(answers, schema=RAW), Characters(), settings())
    assert made["loop"].to_list() == [1.0, 0.0]
