"""Answers are judged on replies laid out by hand."""

import copy
from pathlib import Path
from typing import Any

import pytest

from oneaxis.errors import RunError
from oneaxis.serve.smoke import MAX_TOKENS, has_chat_template, read_answer

REPLY: dict[str, Any] = {
    "choices": [{"text": " Paris", "finish_reason": "stop", "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3]}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


def reply(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(REPLY)
    for key, value in changes.items():
        part = changed["usage"] if key in changed["usage"] else changed["choices"][0]
        part[key] = value
    return changed


def test_an_answer_keeps_what_the_inputs_decide() -> None:
    assert read_answer("completion", "The capital", REPLY) == {
        "kind": "completion",
        "prompt": "The capital",
        "text": " Paris",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        "sane": True,
        "problems": [],
    }


@pytest.mark.parametrize("changes", [{"completion_tokens": 3}, {"prompt_tokens": 4}])
def test_usage_that_contradicts_the_token_ids_fails(changes: dict[str, int]) -> None:
    with pytest.raises(RunError, match="usage for 'x' is wrong"):
        read_answer("completion", "x", reply(**changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": " \n"}, "empty"),
        ({"token_ids": [7] * 4, "completion_tokens": 4}, "one token repeated"),
        ({"finish_reason": "length"}, f"finish_reason length after 2 of {MAX_TOKENS} tokens"),
        ({"finish_reason": "error"}, "finish_reason error"),
    ],
)
def test_odd_answers_are_named(changes: dict[str, Any], problem: str) -> None:
    answer = read_answer("completion", "x", reply(**changes))
    assert answer["problems"] == [problem]
    assert not answer["sane"]


def test_a_reply_without_an_answer_fails() -> None:
    with pytest.raises(RunError, match="lacks"):
        read_answer("chat", "x", REPLY)


def test_a_chat_template_lies_in_a_file_or_in_the_tokenizers_settings(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}', encoding="utf-8")
    assert has_chat_template(tmp_path)
