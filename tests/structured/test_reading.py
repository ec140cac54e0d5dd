"""Answers laid out by hand, and what each says."""

import json
from typing import Any

import pytest

from oneaxis.structured.documents import Document
from oneaxis.structured.reading import read_answer, unfenced

LINE = "Paid by card"
LEGIBLE = Document("r", "legible", "receipt", f"Corner shop\nTotal 417\n{LINE}", {
    "evidence": LINE, "label": "card", "amount": 417})  # fmt: skip
ILLEGIBLE = Document("r", "illegible", "receipt", "Corner shop\nPaid by ####", {
    "evidence": None, "label": None, "amount": None})  # fmt: skip
ROWS = [{"name": "figs", "kind": "fruit", "count": 3, "note": "dried"}, {"name": "milk", "kind": "dairy", "count": 40}]
LIST = Document("l", "n2", "list", "Stock\nfigs, fruit, 3, dried\nmilk, dairy, 40", {"rows": ROWS})


def outcomes(document: Document, answer: Any, *, finished: bool = True) -> list[str]:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return [each.outcome for each in read_answer(document, text, finished=finished).fields]


@pytest.mark.parametrize(
    ("document", "answer", "expected"),
    [
        (LEGIBLE, {"evidence": LINE, "label": "card", "amount": 417}, ["right", "right", "right"]),
        (LEGIBLE, {"evidence": f" {LINE} ", "label": "cash", "amount": 471}, ["right", "wrong", "wrong"]),
        (LEGIBLE, {"evidence": f"It says {LINE}", "label": "Card", "amount": "417"}, ["wrong", "wrong", "wrong"]),
        (LEGIBLE, {"evidence": "Total 417", "label": ["card"], "amount": True}, ["wrong", "wrong", "wrong"]),
        (LEGIBLE, {"evidence": None, "label": "unknown", "amount": None}, ["abstained"] * 3),
        (LEGIBLE, {"label": "card"}, ["absent", "right", "absent"]),
        (ILLEGIBLE, {"evidence": None, "label": "unknown", "amount": None}, ["right"] * 3),
        (ILLEGIBLE, {"evidence": "Paid by ####", "label": "card", "amount": 0}, ["forced"] * 3),
        # Unknown is a label; a quote that says unknown is a quote.
        (ILLEGIBLE, {"evidence": "unknown", "label": None, "amount": "unknown"}, ["forced", "right", "forced"]),
        (LEGIBLE, '{"evidence": "Paid by card", "label": "card"', ["absent"] * 3),
        (LEGIBLE, "[1]", ["absent"] * 3),
    ],
)
def test_fields_of_a_record(document: Document, answer: Any, expected: list[str]) -> None:
    assert outcomes(document, answer) == expected


def test_what_was_cut_off_is_a_failure_however_whole_it_looks() -> None:
    whole = json.dumps({"evidence": LINE, "label": "card", "amount": 417})
    assert read_answer(LEGIBLE, whole, finished=True).exact
    cut = read_answer(LEGIBLE, whole, finished=False)
    assert (cut.parsed, cut.truncated, cut.exact) == (False, True, False)
    assert [each.outcome for each in cut.fields] == ["absent"] * 3


@pytest.mark.parametrize(
    ("text", "parsed", "keys", "quotes"),
    [
        ('{"label": "card"}', True, False, False),
        ('```json\n{"label": "card"}\n```', True, False, False),
        ('{"label": "it\'s “card”: \'x\'", "amount": 4}', True, False, False),
        ("{'label': 'card'}", False, False, True),
        ("{“label”: “card”, “total”: 4}", False, True, True),
        ("{\"label\": 'card'}", False, False, True),
        ('{"lable": "card"}', True, True, False),
        ('{"label": "card", "label_2": "card"', False, True, False),
        ("Here's the JSON: it's \"card\".", False, False, False),
        ("", False, False, False),
    ],
)
def test_drift_of_keys_and_of_quotation_marks(text: str, parsed: bool, keys: bool, quotes: bool) -> None:
    reading = read_answer(LEGIBLE, text, finished=True)
    assert (reading.parsed, reading.key_drift, reading.quote_drift) == (parsed, keys, quotes)


def test_a_fence_is_taken_off_and_its_place_is_known() -> None:
    text = ' ```json\n{"a": 1}\n``` '
    inside, begins = unfenced(text)
    assert (inside, text[begins : begins + len(inside)]) == ('{"a": 1}', '{"a": 1}')
    assert unfenced('{"a": "```"}') == ('{"a": "```"}', 0)


def test_rows_are_matched_by_name() -> None:
    right = [{**ROWS[0]}, {**ROWS[1]}]
    assert read_answer(LIST, json.dumps({"rows": right}), finished=True).exact
    one = read_answer(LIST, json.dumps({"rows": [{"name": "milk", "kind": "grain", "count": 40, "note": "local"}]}),
                      finished=True)  # fmt: skip
    assert [each.outcome for each in one.fields] == ["absent"] * 4 + ["right", "wrong", "right", "forced"]
    assert [each.path for each in one.fields[4:]] == [("rows", 0, name) for name in ("name", "kind", "count", "note")]
    assert (one.early_stop, one.rows, one.key_drift) == (True, 1, False)
    # Of two rows with one name the first counts; one more than asked is no early stop.
    three = read_answer(LIST, json.dumps({"rows": [right[1], {**right[0], "unit": "kg"}, {**right[1], "count": 1}]}),
                        finished=True)  # fmt: skip
    assert [each.outcome for each in three.fields] == ["right"] * 8
    assert (three.early_stop, three.rows, three.key_drift) == (False, 3, True)


def test_an_optional_note_that_is_left_out_is_absent_only_where_there_is_one() -> None:
    bare = [{key: row[key] for key in ("name", "kind", "count")} for row in ROWS]
    assert [each.outcome for each in read_answer(LIST, json.dumps({"rows": bare}), finished=True).fields
            if each.name == "note"] == ["absent", "right"]  # fmt: skip


@pytest.mark.parametrize("answer", ["{'rows': [{'name': 'figs'}", '{"rows": 4}', '{"rows": ["figs"]}', "no"])
def test_a_broken_list_has_no_values_and_its_end_is_still_seen(answer: str) -> None:
    reading = read_answer(LIST, answer, finished=True)
    assert {each.outcome for each in reading.fields} == {"absent"}
    assert reading.early_stop
    assert not read_answer(LIST, answer, finished=False).early_stop
