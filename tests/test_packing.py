"""How sequences that begin alike lie in rows; what a model computes of them is tested with its users."""

import pytest
import torch

from oneaxis.packing import pack, rows_of
from tests.preference.conftest import small_model


@pytest.mark.parametrize(
    ("side", "ids", "positions"),
    [
        ("right", [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]], [[0, 1, 2, 2, 3], [0, 1, 0, 0, 0]]),
        ("left", [[5, 6, 7, 8, 9], [0, 0, 0, 4, 3]], [[0, 1, 2, 2, 3], [0, 0, 0, 0, 1]]),
    ],
)
def test_rows_by_hand(side: str, ids: list[list[int]], positions: list[list[int]]) -> None:
    """Prompt 5 6 with branches 7 and 8 9, and 4 3 alone. 8 sees 5 6 and itself, not 7; padding is seen by none."""
    rows = rows_of([("a", (5, 6, 8, 9)), ("a", (5, 6, 7)), ("b", (4, 3))], 64, 64)
    inputs, begins = pack(rows, small_model(), side=side)  # type: ignore[arg-type]
    assert inputs["input_ids"].tolist() == ids
    assert inputs["position_ids"].tolist() == positions
    assert inputs["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1],
    ]  # fmt: skip
    real = torch.arange(5) < 2 if side == "right" else torch.arange(5) >= 3
    assert not inputs["attention_mask"][1, 0][real][:, ~real].any()
    places = [begins[0] + rows[0].place(number, token) for number, branch in enumerate(rows[0].branches)
              for token in range(len(branch.ids))]  # fmt: skip
    assert places == [0, 1, 2, 0, 1, 3, 4], "7 first: the shortest branch begins the row"
    assert [branch.members for branch in rows[0].branches] == [[1], [0]]
