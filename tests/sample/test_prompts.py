"""Prompts: ours have a known truth, the user's are refused by file and line."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from oneaxis.config import compose
from oneaxis.config.schema import SamplePairs
from oneaxis.errors import UserError
from oneaxis.sample.prompts import make_prompts, own_prompts
from oneaxis.sample.rules import check


def settings(root: Path, *overrides: str) -> SamplePairs:
    sample = compose(root / "conf", ["pairs=on_policy", *overrides]).sample
    assert isinstance(sample, SamplePairs)
    return sample


def value_of(expression: str) -> int:
    """The oracle: Python's own parser and arithmetic."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            a, b = value(node.left), value(node.right)
            return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}[type(node.op)]  # type: ignore[index]
        assert isinstance(node, ast.Constant)
        return int(node.value)  # type: ignore[arg-type]

    return value(ast.parse(expression, mode="eval").body)


def test_our_prompts_are_distinct_known_to_be_true_and_the_same_for_the_same_seed() -> None:
    prompts = own_prompts(["arithmetic", "json", "words"], 902, chat=False, seed=3)
    assert [sum(prompt.source == task for prompt in prompts) for task in ("arithmetic", "json", "words")] == [
        301, 301, 300]  # fmt: skip
    assert len({prompt.prompt_id for prompt in prompts}) == 902
    for prompt in prompts:
        if prompt.source == "arithmetic":
            asked = re.fullmatch(r"What is ([\d +*-]+)\? End your answer with the result\.", prompt.text)
            assert asked
            assert check(prompt.rule, str(value_of(asked[1])), finished=True).passed
        elif prompt.source == "json":
            keys = re.findall(r'"(\w+)"', prompt.text)
            assert len(keys) == 3
            assert check(prompt.rule, json.dumps(dict.fromkeys(keys, 1)), finished=True).passed
            assert not check(prompt.rule, json.dumps(dict.fromkeys(keys[:2], 1)), finished=True).passed
        else:
            limit = int(re.search(r"at most (\d+) words", prompt.text)[1])  # type: ignore[index]
            assert [check(prompt.rule, "a " * n, finished=True).passed for n in (limit, limit + 1)] == [True, False]
    again = own_prompts(["arithmetic", "json", "words"], 902, chat=False, seed=3)
    assert again == prompts
    assert own_prompts(["arithmetic", "json", "words"], 90, chat=False, seed=3) == prompts[:90]
    assert own_prompts(["arithmetic", "json", "words"], 90, chat=False, seed=4)[:5] != prompts[:5]
    with pytest.raises(UserError, match=r"sample\.max_prompts=4000: there are only 1200 prompts of task words"):
        own_prompts(["words"], 4000, chat=False, seed=3)


def test_the_users_prompts_with_every_rule(root: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Six times seven?", "rule": "number", "answer": "42"},
        {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "Name a fruit."}],
         "rule": "words", "max_words": 2},
        {"prompt": "A person?", "rule": "json", "keys": ["name"]},
        {"prompt": "Yes or no?", "rule": "regex", "pattern": "(?i)yes|no"},
        {"prompt": "Six times seven?", "rule": "number", "answer": 42},
        {"prompt": "  ", "rule": "number", "answer": 1.5},
    ]  # fmt: skip
    (tmp_path / "my prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    mine = settings(root, "sample=mine", "sample.path='my prompts.jsonl'", "sample.chat_template=false")
    prompts, notes = make_prompts(mine, seed=0, root=tmp_path)
    assert {prompt.rule.kind: prompt.rule.as_json() for prompt in prompts} == {
        "number": '"42"', "words": "2", "json": '["name"]', "regex": '"(?i)yes|no"'}  # fmt: skip
    assert {prompt.source for prompt in prompts} == {"my_prompts"}
    assert [prompt.conversational for prompt in prompts if prompt.rule.kind == "words"] == [True]
    assert not any(prompt.conversational for prompt in prompts if prompt.rule.kind != "words")
    assert (notes["read"], notes["dropped"]) == (6, {"duplicate": 1, "empty": 1})
    chat, _ = make_prompts(mine.model_copy(update={"chat_template": True}), seed=0, root=tmp_path)
    assert all(prompt.conversational for prompt in chat)
    fewer, _ = make_prompts(mine.model_copy(update={"max_prompts": 2}), seed=0, root=tmp_path)
    assert fewer == prompts[:2]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"rule": "number", "answer": 1}, "has no prompt"),
        ({"prompt": "a"}, "rule is None; allowed: number, json, regex, words"),
        ({"prompt": "a", "rule": "longest"}, "rule is 'longest'; allowed: number, json, regex, words"),
        ({"prompt": "a", "rule": ["number"]}, "rule is ['number']; allowed: number, json, regex, words"),
        ({"prompt": "a", "rule": "number"}, "has no answer; allowed: rule=number with answer"),
        ({"prompt": "a", "rule": "number", "answer": "many"}, "answer is 'many'; allowed: a number, or a text that is "
         "one (42, -3.5, 1,234)"),
        ({"prompt": "a", "rule": "number", "answer": True}, "answer is True; allowed: a number"),
        ({"prompt": "a", "rule": "number", "answer": float("nan")}, "answer is nan; allowed: a number"),
        ({"prompt": "a", "rule": "json", "keys": []}, "keys is []; allowed: a list of at least one key"),
        ({"prompt": "a", "rule": "regex", "pattern": "("}, "pattern is '('; allowed: a regular expression (missing )"),
        ({"prompt": "a", "rule": "words", "max_words": 0}, "max_words is 0; allowed: a whole number from 1"),
        ({"prompt": [{"role": "assistant", "content": "b"}], "rule": "words", "max_words": 1},
         "prompt ends with assistant; allowed: a message of role user or tool"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused_by_file_and_line(
    root: Path, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    good = json.dumps({"prompt": "Six times seven?", "rule": "number", "answer": 42})
    (tmp_path / "p.jsonl").write_text(f"{good}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        make_prompts(settings(root, "sample=mine", "sample.path=p.jsonl"), seed=0, root=tmp_path)
    assert str(caught.value).startswith(f"p.jsonl:2: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sample.num_samples=1"], "sample.num_samples=1: allowed: greater than or equal to 2"),
        (["sample.tasks=[riddles]"], "sample.tasks.0='riddles': allowed: 'arithmetic', 'json' or 'words'"),
        (["sample=mine", "sample.path=null"], "sample: tasks is [] and path is None"),
        (["sample.path=p.jsonl"], "sample: tasks is ['arithmetic', 'json', 'words'] and path is 'p.jsonl'"),
        (["sample.max_tokens=512"], "sample: max_tokens is 512; allowed: less than engine.max_model_len (512)"),
        (["sample.temperature=0"], "sample.temperature=0: allowed: greater than 0"),
    ],
)
def test_settings_that_cannot_be(root: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        settings(root, *overrides)
    assert str(caught.value).startswith(f"settings: {said}")


def test_a_file_that_is_not_there_is_named_by_its_key(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^sample\.path=gone\.jsonl: no such file; allowed: an existing file"):
        make_prompts(settings(root, "sample=mine", "sample.path=gone.jsonl"), seed=0, root=tmp_path)
