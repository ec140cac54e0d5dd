"""The table's rows from literal contexts, and what a log-probability that is not finite does."""

import pytest

from oneaxis.errors import RunError
from oneaxis.score.boundary import Encoded
from oneaxis.score.contexts import Context, Item
from oneaxis.score.table import SCHEMA, build_table

ITEM = Item("q9", "t", "?", ("ab", "é日"), 1)
CONTEXT = Context(ITEM, "question", 0, "Q:", (0, 1), ("ab", "é日"))
ENCODED = Encoded(ids=((1, 2, 3), (1, 2, 4, 5)), start=1, backed_off=1, truncated=3)


def test_a_row_per_option_with_its_scored_tokens_characters_and_bytes() -> None:
    table = build_table([CONTEXT], [ENCODED], [[[-1.0, -0.5], [-1.0, -2.0, -0.25]]])
    assert table.schema == SCHEMA
    # é is 2 bytes in UTF-8, 日 is 3; the space before the option counts for nothing.
    assert table.drop("item_id", "task", "context", "rotation").rows() == [
        (1, 0, [2, 3], [-1.0, -0.5], -1.5, 2, 2, 2, "backed_off:1", 3),
        (1, 1, [2, 4, 5], [-1.0, -2.0, -0.25], -3.25, 2, 5, 3, "backed_off:1", 3),
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_names_the_item(bad: float) -> None:
    with pytest.raises(RunError, match="item q9, question context, option 'é日'"):
        build_table([CONTEXT], [ENCODED], [[[-1.0, -0.5], [-1.0, bad, -0.25]]])
