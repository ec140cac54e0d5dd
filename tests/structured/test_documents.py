"""Documents of our own making: the truth is in the legible rendering and nowhere in the other."""

import random
import re

from oneaxis.config.schema import MOST_ROWS
from oneaxis.structured.documents import GOODS, KINDS, NOTES, make_documents, record, stock_list


def test_twins_share_an_id_and_only_the_legible_one_holds_the_values() -> None:
    seed = random.randrange(10**6)
    hidings = set()
    for number in range(200):
        legible, illegible = record(seed, number)
        kind = KINDS[legible.kind]
        assert (legible.document_id, legible.kind) == (illegible.document_id, illegible.kind)
        assert (legible.condition, illegible.condition) == ("legible", "illegible")
        assert legible.truth["evidence"] in legible.text.split("\n")
        assert str(legible.truth["label"]) in legible.truth["evidence"]
        # One label and one number of three digits are there, and they are the truth.
        assert [label for label in kind.labels if re.search(rf"\b{label}\b", legible.text)] == [legible.truth["label"]]
        assert re.findall(r"\b\d{3}\b", legible.text) == [str(legible.truth["amount"])]
        assert illegible.truth == {"evidence": None, "label": None, "amount": None}
        assert not [label for label in kind.labels if label in illegible.text]
        assert not re.search(r"\d{3}", illegible.text)
        # Nothing else differs: lines that are in one only are those two, or what is left of them.
        own, other = (set(document.text.split("\n")) for document in (legible, illegible))
        assert len(own - other) == 2
        assert len(other - own) <= 2
        hidings.add((len(other - own), "#" in illegible.text))
    assert len(hidings) >= 4


def test_more_documents_hold_the_fewer_ones_and_another_seed_has_others() -> None:
    few = make_documents(records=3, lists=2, lengths=[2, 5], seed=1)
    more = make_documents(records=5, lists=3, lengths=[5, 2], seed=1)
    assert {document.text for document in few} <= {document.text for document in more}
    assert [document.condition for document in few] == ["legible", "illegible"] * 3 + ["n2", "n2", "n5", "n5"]
    assert few == make_documents(records=3, lists=2, lengths=[2, 5], seed=1)
    others = make_documents(records=5, lists=3, lengths=[5, 2], seed=2)
    assert not {document.document_id for document in more} & {document.document_id for document in others}
    keys = [(document.document_id, document.condition) for document in more]
    assert len(set(keys)) == len(keys)


def test_a_list_has_the_rows_that_it_says() -> None:
    assert len([thing for things in GOODS.values() for thing in things]) == MOST_ROWS
    document = stock_list(7, 0, MOST_ROWS)
    assert document.text.split("\n")[0] == "Stock"
    for line, row in zip(document.text.split("\n")[1:], document.rows, strict=True):
        name, kind, count, *note = line.split(", ")
        assert row == {"name": name, "kind": kind, "count": int(count)} | ({"note": note[0]} if note else {})
        assert name in GOODS[kind]
        assert set(note) <= set(NOTES)
    assert 0 < sum("note" in row for row in document.rows) < MOST_ROWS
