"""Files of a multirun that someone has broken are named, not stumbled over."""

from pathlib import Path

import pytest

from oneaxis.errors import UserError
from oneaxis.multirun.record import PLAN, STATUS, read_plan, read_status


@pytest.mark.parametrize("content", ["[]", "{}", '{"state": "done"}', '"x"', "{"])
def test_a_broken_status_is_named(tmp_path: Path, content: str) -> None:
    assert read_status(tmp_path) is None
    (tmp_path / STATUS).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"status\.json") as caught:
        read_status(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"points": [], "jobs": []}', '{"points": [1], "jobs": []}', "{", '{"gate": 5}', '{"created_at": 5}',
     '{"experiment": {"claims": 5}}', '{"jobs": {}}'],
)  # fmt: skip
def test_a_broken_plan_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / PLAN).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"plan\.json") as caught:
        read_plan(tmp_path)
    assert "\n" not in str(caught.value)
