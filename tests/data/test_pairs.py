"""Preference pairs in TRL's format, and their split by prompt."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaxis.data.pairs import boundary_counts, implicit_prompt, parse_pair, split_pairs
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record


def parse(**values: Any) -> dict[str, Any]:
    return parse_pair(Record("f.jsonl:3", values), "mine")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_a_plain_pair_is_kept_to_the_letter() -> None:
    row = parse(prompt="Q: x\n", chosen=" yes ", rejected=" no", score=3)
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("Q: x\n", " yes ", " no")
    assert (row["source"], row["conversational"]) == ("mine", False)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is"),
        # near-duplicates share "I w": the cut is before the white space, never inside the word
        ("Q: x I won't help.", "Q: x I will not help.", "Q: x I"),
        ("\n\nHuman: hi\n\nAssistant: I do", "\n\nHuman: hi\n\nAssistant: I don't", "\n\nHuman: hi\n\nAssistant:"),
        ("go on", "go on and on", "go"),
        ("yes", "no", ""),
        ("yes", "yesterday", ""),
    ],
)
def test_the_implicit_prompt_ends_before_white_space(chosen: str, rejected: str, prompt: str) -> None:
    assert implicit_prompt(chosen, rejected) == prompt
    assert implicit_prompt(rejected, chosen) == prompt
    if prompt:
        row = parse(chosen=chosen, rejected=rejected)
        assert row["prompt"] + row["chosen"] == chosen
        assert row["prompt"] + row["rejected"] == rejected
        assert row["chosen"][0].isspace()
        assert row["rejected"][0].isspace()


def test_a_conversation_with_its_prompt_is_kept_as_json() -> None:
    row = parse(prompt=[user("hé")], chosen=[assistant("a")], rejected=[assistant("b")])
    assert row["conversational"] is True
    assert row["prompt"] == '[{"role": "user", "content": "hé"}]'
    assert json.loads(row["chosen"]) == [assistant("a")]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "x"}, {"prompt": None}])
def test_the_prompt_of_two_conversations_is_what_they_share(prompt: dict[str, Any]) -> None:
    """A string beside full conversations (as UltraFeedback has it) gives way to the conversations."""
    start = [{"role": "system", "content": ""}, user("x"), assistant("y"), user("z")]
    row = parse(chosen=[*start, assistant("a")], rejected=[*start, assistant("b"), user("?"), assistant("c")], **prompt)
    assert json.loads(row["prompt"]) == start
    assert json.loads(row["chosen"]) == [assistant("a")]
    assert json.loads(row["rejected"]) == [assistant("b"), user("?"), assistant("c")]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "chosen equals rejected"),
        ({"chosen": "p a", "rejected": "p a"}, "chosen equals rejected"),
        ({"chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("a")]}, "chosen equals rejected"),
        ({"prompt": "p", "chosen": "", "rejected": "a"}, "empty"),
        ({"prompt": "", "chosen": "b", "rejected": "a"}, "empty"),
        ({"prompt": "p", "chosen": "b\0", "rejected": "a"}, "NUL character"),
        ({"prompt": [user("p")], "chosen": [assistant(" ")], "rejected": [assistant("a")]}, "empty"),
    ],
)
def test_a_useless_pair_is_dropped_with_its_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Drop, match=reason):
        parse(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prompt": "p", "chosen": "a"}, "rejected is missing; allowed: a string, or a list"),
        ({"prompt": "p", "chosen": 3, "rejected": "a"}, "chosen is 3; allowed: a string, or a list"),
        ({"prompt": 3, "chosen": "b", "rejected": "a"}, "prompt is 3; allowed: a string"),
        ({"prompt": [user("p")], "chosen": "b", "rejected": "a"}, "prompt is .*; allowed: a string"),
        ({"prompt": "p", "chosen": "b", "rejected": [assistant("a")]}, "chosen is string and rejected messages"),
        ({"chosen": "b", "rejected": "a"}, "has no prompt, and chosen and rejected share no beginning"),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "prompt holds no message of its own"),
        ({"chosen": [user("p")], "rejected": [user("p"), assistant("b")]}, "chosen holds no message of its own"),
        ({"prompt": [user("p")], "chosen": ["a"], "rejected": [assistant("b")]}, r"chosen\[0\] is 'a'"),
        ({"prompt": [user("p")], "chosen": [user("a")], "rejected": [assistant("b")]}, "chosen ends with role 'user'"),
        ({"prompt": [user("p")], "chosen": [user("q"), assistant("a")], "rejected": [assistant("b")]},
         "chosen begins with role 'user'; allowed: assistant"),
        ({"prompt": [user("p"), assistant("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
         "prompt ends with role 'assistant'; allowed: user or tool"),
        ({"prompt": [{"role": "system", "content": "p"}], "chosen": [assistant("a")], "rejected": [assistant("b")]},
         "prompt ends with role 'system'; allowed: user or tool"),
        ({"chosen": [user("p"), assistant("q"), user("r"), assistant("a")],
          "rejected": [user("p"), assistant("q"), user("s"), assistant("b")]}, "chosen begins with role 'user'"),
        ({"prompt": [{"role": "human", "content": "p"}], "chosen": [assistant("a")], "rejected": [assistant("b")]},
         r"prompt\[0\]\.role is 'human'; allowed: system, user, assistant, tool"),
        ({"prompt": [user("p")], "chosen": [{"role": "assistant", "content": ["a"]}], "rejected": [assistant("b")]},
         r"chosen\[0\]\.content is \['a'\]; allowed: a string"),
        ({"prompt": [user("p")], "chosen": [assistant("a") | {"tool_calls": [1]}], "rejected": [assistant("b")]},  # type: ignore[dict-item]
         r"chosen\[0\] has tool_calls; allowed: role and content alone"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"^f\.jsonl:3: {says}") as caught:
        parse(**values)
    assert "\n" not in str(caught.value)


def pair(prompt: str, chosen: str, rejected: str, source: str = "mine") -> dict[str, Any]:
    return parse_pair(Record("f:1", {"prompt": prompt, "chosen": chosen, "rejected": rejected}), source)


letters = st.sampled_from("abcd")
many = st.lists(st.tuples(st.sampled_from("pqrstuvw"), letters, letters).filter(lambda t: t[1] != t[2]), max_size=40)


@given(many, st.integers(4, 30), st.integers(1, 8), st.integers(0, 3))
def test_no_prompt_is_in_both_splits_and_the_counts_add_up(
    triples: list[tuple[str, str, str]], max_pairs: int, heldout_pairs: int, seed: int
) -> None:
    rows = [pair(*triple) for triple in triples]
    distinct = {(prompt, frozenset((chosen, rejected))) for prompt, chosen, rejected in triples}
    try:
        split, dropped = split_pairs(rows, max_pairs=max_pairs, heldout_pairs=heldout_pairs, seed=seed)
    except UserError:
        # Which pairs are taken is the draw's; when all are, the three reasons to refuse can be told from outside.
        groups = Counter(prompt for prompt, _ in distinct)
        fits = len(distinct) > heldout_pairs and len(groups) > 1 and min(groups.values()) <= heldout_pairs
        assert max_pairs < len(distinct) or not fits
        return
    assert len(split) == min(max_pairs, len(distinct))
    assert sum(dropped.values()) == len(rows) - len(distinct)
    prompts = {name: {row["prompt"] for row in split if row["split"] == name} for name in ("train", "heldout")}
    assert not prompts["train"] & prompts["heldout"]
    assert prompts["train"]
    assert prompts["heldout"]
    assert sum(row["split"] == "heldout" for row in split) <= heldout_pairs
    assert len({row["pair_id"] for row in split}) == len(split)


def test_single_pairs_fill_the_heldout_split_exactly() -> None:
    rows = [pair(f"p{number}", "a", "b") for number in range(20)]
    split, _ = split_pairs(rows, max_pairs=12, heldout_pairs=5, seed=0)
    assert sorted(row["split"] for row in split) == ["heldout"] * 5 + ["train"] * 7


def test_duplicates_and_contradictions_are_counted_apart() -> None:
    rows = [pair("p", "a", "b"), pair("p", "a", "b"), pair("p", "b", "a"), pair("q", "a", "b"), pair("r", "a", "b")]
    split, dropped = split_pairs(rows, max_pairs=9, heldout_pairs=1, seed=0)
    assert dropped == {"duplicate": 1, "contradicts another pair": 1}
    assert [row["chosen"] for row in split] == ["a"] * 3


def test_the_second_source_fills_what_the_first_leaves() -> None:
    rows = [pair(f"p{number}", "a", "b", "first") for number in range(6)]
    rows += [pair(f"q{number}", "a", "b", "second") for number in range(6)]
    split, _ = split_pairs(rows, max_pairs=8, heldout_pairs=2, seed=0)
    assert [row["source"] for row in split] == ["first"] * 6 + ["second"] * 2


@pytest.mark.parametrize(
    ("rows", "heldout", "says"),
    [
        ([], 1, "0 usable pairs"),
        ([pair("p", "a", "b"), pair("p", "a", "c")], 1, "2 usable pairs of 1 prompts"),
        ([pair("p", "a", "b"), pair("q", "a", "c")], 2, "more than data.pairs.heldout_pairs=2"),
        ([pair(p, c, "x") for p in "pq" for c in "abc"], 2, "every prompt has more pairs"),
    ],
)
def test_too_few_pairs_are_refused(rows: list[dict[str, Any]], heldout: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        split_pairs(rows, max_pairs=8, heldout_pairs=heldout, seed=0)


def test_doubtful_boundaries_are_counted() -> None:
    rows = [pair("p ", "a", "b"), pair("p", "a", "b"), pair("p", " a", " b"), pair("p", " a", "b")]
    rows.append(parse(prompt=[user("p")], chosen=[assistant("a")], rejected=[assistant("b")]))
    assert boundary_counts(rows) == {"prompt_ends_in_space": 1, "no_space_between": 2}
