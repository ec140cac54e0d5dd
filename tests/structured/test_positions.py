"""Which tokens carry a value, on answers whose tokens are laid out by hand."""

from collections.abc import Sequence

import pytest

from oneaxis.structured.positions import enum_confidence, positions_of, shared_first_tokens, token_ends, value_mass
from oneaxis.structured.spans import value_spans


class Words:
    """A tokenizer of given pieces: token i is pieces[i]. Faked: merges; a piece is a token wherever it stands."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: object) -> str:
        return b"".join(self.pieces[token] for token in ids).decode("utf-8", "replace")

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        """Longest piece first."""
        ids, rest = [], text.encode()
        while rest:
            piece = max((piece for piece in self.pieces if rest.startswith(piece)), key=len)
            ids.append(self.pieces.index(piece))
            rest = rest[len(piece) :]
        return {"input_ids": ids}


PIECES = [b'{"', b"label", b'": "', b"ca", b"rd", b'",', b' "', b"amount", b'":', b" ", b"41", b"7}", b""]
#          0-2    2-7      7-11     11-13  13-15  15-17   17-19  19-25     25-27  27-28 28-30  30-32


def test_tokens_that_overlap_a_value_are_its_positions() -> None:
    tokenizer, ids = Words(PIECES), list(range(13))
    text = tokenizer.decode(ids)
    assert text == '{"label": "card", "amount": 417}'
    ends = token_ends(tokenizer, ids, text)
    assert ends == [2, 7, 11, 13, 15, 17, 19, 25, 27, 28, 30, 32, 32]
    spans = {span.path[0]: span for span in value_spans(text)}
    # The token that closes the object closes the number too, and carries its last digit.
    assert {name: positions_of(span, ends) for name, span in spans.items()} == {"label": [3, 4], "amount": [10, 11]}
    kept = [0.9, 0.01, 0.8, 0.7, 0.45, 1.0, 1.0, 1.0, 1.0, 1.0, None, 0.6, 1.0]
    moved = [False] * 4 + [True] + [False] * 8
    label = value_mass([3, 4], kept, moved)
    assert label
    assert (label.tokens, label.first, label.least, label.moved) == (2, 0.7, 0.45, True)
    amount = value_mass([10, 11], kept, moved)
    assert amount
    assert (amount.tokens, amount.first, amount.least, amount.moved) == (1, 0.6, 0.6, False)
    assert value_mass([10], kept, moved) is None
    assert value_mass([], kept, moved) is None


def test_half_a_character_ends_with_the_whole_ones_before_it() -> None:
    pieces = [b'{"a":"x', b"\xc3", b"\xa9", b'"}']
    text = '{"a":"xé"}'
    assert token_ends(Words(pieces), [0, 1, 2, 3], text) == [7, 7, 8, 10]
    assert token_ends(Words(pieces), [0, 1, 2], text) is None
    assert token_ends(Words(pieces), [0, 3], text) is None


VALUES = ("cash", "card", "voucher", "car")


@pytest.mark.parametrize(
    ("pieces", "probabilities", "expected"),
    [
        # `ca` leaves cash, card and car; `sh` leaves one: what follows is forced.
        (["ca", "sh", '"'], [0.5, 0.25, 1.0], 0.125),
        (["c", "a", "s", "h", '"'], [0.5, 0.1, 0.25, 0.1, 1.0], 0.125),
        # card against car is told by the d, car against card by the quote.
        (["car", "d", '"'], [0.5, 0.4, 1.0], 0.2),
        (["car", '"'], [0.5, 0.6], 0.3),
        (["voucher", '"'], [0.9, 1.0], 0.9),
        (["voucher", '"'], [None, 1.0], None),
        (["vou", "cher", '"'], [0.9, None, None], 0.9),
        (["bus", '"'], [0.9, 1.0], None),
        (["voucher"], [0.9], None),
    ],
)
def test_confidence_is_the_probability_of_what_tells_a_value_from_the_others(
    pieces: list[str], probabilities: list[float | None], expected: float | None
) -> None:
    text = '{"label":"' + "".join(pieces)
    ends = [10 + len("".join(pieces[: count + 1])) for count in range(len(pieces))]
    [span] = value_spans(text)
    found = enum_confidence(span, text, VALUES, [10, *ends], [1.0, *probabilities])
    assert found == (None if expected is None else pytest.approx(expected))


def test_values_that_begin_with_the_same_token_are_named() -> None:
    before = '{"label": "'
    one = Words([before.encode(), b"P", b"1", b"2", b"urgent", b"low"])
    assert shared_first_tokens(one, ["P1", "P2", "urgent", "low"], before) == [["P1", "P2"]]
    assert shared_first_tokens(one, ["P1", "urgent"], before) == []
    # Where the quote and the first letter are one token, that one is shared.
    merged = Words([b'{"label": ', b'"', b'"P', b"1", b"2", b"low"])
    assert shared_first_tokens(merged, ["P1", "P2", "low"], before) == [["P1", "P2"]]
