"""The table's rows from literal contexts, and what a log-probability that is not finite does."""

import pytest

from oneaxis.errors import RunError
from oneaxis.score.boundary import Encoded
from oneaxis.score.contexts import Context, Item
from oneaxis.score.table import SCHEMA, build_table

ITEM = Item("q9", "t", "?", ("ab", "é日"), 0, (0, 1), "words")
CONTEXT = Context(ITEM, "question", 0, "Q:", (0, 1), ("ab", "é日"))
ENCODED = Encoded(ids=((1, 2, 3), (1, 2, 4, 5)), start=1, backed_off=1, truncated=3)


def test_a_row_per_option_with_its_scored_tokens_characters_and_bytes() -> None:
    table = build_table([CONTEXT], [ENCODED], [[[-1.0, -0.5], [-1.0, -2.0, -0.25]]])
    assert table.schema == SCHEMA
    # é is 2 bytes in UTF-8, 日 is 3; the space before the option counts for nothing.
    assert table.drop("item_id", "task", "context", "rotation", "variant").rows() == [
        ("words", 0, [0, 1], 0, None, "Q:", " ab", [2, 3], [-1.0, -0.5], -1.5, 2, 2, 2, 1, "backed_off:1", 3),
        (
            "words",
            0,
            [0, 1],
            1,
            None,
            "Q:",
            " é日",
            [2, 4, 5],
            [-1.0, -2.0, -0.25],
            -3.25,
            2,
            5,
            3,
            1,
            "backed_off:1",
            3,
        ),
    ]


def test_a_row_of_the_letter_format_has_its_letter_and_what_it_stands_for() -> None:
    context = Context(ITEM, "letter", 1, "Q:", (1, 0), ("A", "B"))
    table = build_table([context], [Encoded(((1, 2), (1, 3)), 1, 0, 0)], [[[-1.0], [-2.0]]])
    assert table.select("context", "rotation", "letter", "option", "continuation").rows() == [
        ("letter", 1, 0, 1, " A"),
        ("letter", 1, 1, 0, " B"),
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_names_the_item(bad: float) -> None:
    with pytest.raises(RunError, match="item q9, question context, option 'é日'"):
        build_table([CONTEXT], [ENCODED], [[[-1.0, -0.5], [-1.0, bad, -0.25]]])
