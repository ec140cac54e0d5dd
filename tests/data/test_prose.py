"""Documents of prose and their split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaxis.data.prose import blocks, split_documents, without_illustrations
from oneaxis.errors import UserError


def test_blocks_are_whole_paragraphs_of_at_least_so_many_characters() -> None:
    text = "one\ntwo\n\n\nthree\n \t\nfour\n\nfive"
    # "one two" is 7 characters (9 with its separator); "three" brings the block to 16.
    assert blocks(text, chars=10) == ["one two\n\nthree", "four\n\nfive"]
    assert blocks(text, chars=1) == ["one two", "three", "four", "five"]
    assert blocks("\n\n \n", chars=10) == []


def test_captions_of_plates_are_taken_out_with_what_they_nest() -> None:
    text = "it.\n\n[Illustration:\n\n“He came”\n\n[_Copyright 1894 by George Allen._]]\n\nThis [sic] was"
    assert without_illustrations(text) == "it.\n\n\n\nThis [sic] was"


documents = st.lists(
    st.fixed_dictionaries(
        {"source": st.sampled_from(["a", "b"]), "text": st.text(alphabet="xy \n", max_size=4)}
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(documents, st.integers(2, 30), st.floats(0.01, 0.99), st.integers(0, 5))
def test_no_text_is_in_both_splits_and_the_counts_add_up(
    rows: list[dict[str, str]], max_documents: int, fraction: float, seed: int
) -> None:
    """The oracle normalises white space by itself: equal but for white space is equal."""
    texts = {" ".join(row["text"].split()) for row in rows} - {""}
    if len(texts) < 2:
        with pytest.raises(UserError, match="at least 2"):
            split_documents(rows, max_documents=max_documents, heldout_fraction=fraction, seed=seed)
        return
    calibration, heldout, dropped = split_documents(
        rows, max_documents=max_documents, heldout_fraction=fraction, seed=seed
    )
    seen = [" ".join(row["text"].split()) for row in calibration + heldout]
    assert len(set(seen)) == len(seen) == min(max_documents, len(texts))
    assert set(seen) <= texts
    assert calibration
    assert heldout
    assert abs(len(heldout) - fraction * len(seen)) <= 1
    assert sum(dropped.values()) == len(rows) - len(texts)
    assert len({row["doc_id"] for row in calibration + heldout}) == len(seen)


def test_both_splits_hold_both_sources_in_equal_numbers() -> None:
    rows = [{"source": source, "text": f"{source} {number}"} for source in "ab" for number in range(40)]
    calibration, heldout, _ = split_documents(rows, max_documents=40, heldout_fraction=0.25, seed=3)
    for split, each in ((calibration, 15), (heldout, 5)):
        assert [sum(row["source"] == source for row in split) for source in "ab"] == [each, each]


def test_useless_documents_are_dropped_with_their_reason() -> None:
    rows = [{"source": "a", "text": text} for text in ("x", "y", " ", "\0", "z\ud800", "x ")]
    calibration, heldout, dropped = split_documents(rows, max_documents=9, heldout_fraction=0.5, seed=0)
    assert len(calibration) + len(heldout) == 2
    assert dropped == {"empty": 1, "NUL character": 1, "invalid Unicode": 1, "duplicate": 1}
