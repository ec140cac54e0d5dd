"""Labels of levels. Oracle: written beside them."""

import re

import pytest

from oneaxis.load.levels import LABEL, at_one_rate, level_name, level_size


@pytest.mark.parametrize(
    ("label", "size", "name", "steady"),
    [
        ("r2", 2, "2 req/s", True),
        ("r0.5", 0.5, "0.5 req/s", True),
        ("r1e-05", 1e-5, "1e-05 req/s", True),
        ("u1", 1, "1 user", False),
        ("u16", 16, "16 users", False),
        ("ramp0.5-6", 6, "0.5 to 6 req/s", False),
        ("x1.5", 1.5, "speed 1.5x", True),
    ],
)
def test_a_label_says_its_size_its_name_and_whether_it_can_show_a_capacity(
    label: str, size: float, name: str, steady: bool
) -> None:
    assert re.fullmatch(LABEL, label)
    assert (level_size(label), level_name(label), at_one_rate(label)) == (size, name, steady)
