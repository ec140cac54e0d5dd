"""Prompts are worked by hand; rotations are compared with the definition: letter j at rotation r is option j + r."""

import pytest

from oneaxis.errors import UserError
from oneaxis.score.contexts import (
    Item,
    all_contexts,
    choose_for_letters,
    letter_contexts,
    premise_context,
    question_context,
    usable,
)

TEMPLATE = "Question: {question}\nAnswer:"
FROG = Item("q1", "bio", "Frogs eat {what}?", ("flies", "sand", "wood"), 0)


def test_question_and_premise_contexts_share_their_options() -> None:
    question = question_context(FROG, TEMPLATE)
    premise = premise_context(FROG, {"default": "Answer:", "bio": "In biology:"})
    assert question.prompt == "Question: Frogs eat {what}?\nAnswer:"
    assert premise.prompt == "In biology:"
    assert question.continuations == premise.continuations == (" flies", " sand", " wood")
    assert premise_context(FROG, {"default": "Answer:"}).prompt == "Answer:"


def test_letter_contexts_rotate_the_options_and_know_what_each_letter_stands_for() -> None:
    contexts = letter_contexts(FROG, TEMPLATE)
    assert [context.prompt for context in contexts] == [
        "Question: Frogs eat {what}?\nA. flies\nB. sand\nC. wood\nAnswer:",
        "Question: Frogs eat {what}?\nA. sand\nB. wood\nC. flies\nAnswer:",
        "Question: Frogs eat {what}?\nA. wood\nB. flies\nC. sand\nAnswer:",
    ]
    assert [context.options for context in contexts] == [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    assert [context.rotation for context in contexts] == [0, 1, 2]
    assert {context.continuations for context in contexts} == {(" A", " B", " C")}


def test_every_option_stands_under_every_letter_once() -> None:
    item = Item("q", "t", "?", ("a", "b", "c", "d", "e"), 2)
    pairs = [pair for context in letter_contexts(item, TEMPLATE) for pair in enumerate(context.options)]
    assert sorted(pairs) == [(letter, option) for letter in range(5) for option in range(5)]


def test_items_without_a_choice_are_dropped_and_counted() -> None:
    items = [FROG, Item("q2", "bio", "?", ("x", " "), 0), Item("q3", "bio", "?", ("x",), 0)]
    assert usable(items) == ([FROG], {"empty_option": 1, "single_option": 1})


def test_letter_items_are_drawn_per_task_by_seed_whatever_the_order() -> None:
    items = [Item(f"q{index}", task, "?", ("x", "y"), 0) for task in ("s", "t") for index in range(20)]
    drawn = choose_for_letters(items, 5, seed=0)
    assert [sum(item.task == task for item in drawn) for task in ("s", "t")] == [5, 5]
    assert set(choose_for_letters(items[::-1], 5, seed=0)) == set(drawn)
    assert set(choose_for_letters(items, 5, seed=1)) != set(drawn)
    assert choose_for_letters(items, 99, seed=0) == items
    assert choose_for_letters(items, 0, seed=0) == []


def test_all_contexts_of_an_item_with_letters() -> None:
    contexts = all_contexts([FROG], template=TEMPLATE, premises={"default": "Answer:"}, letter_items_per_task=1, seed=0)
    assert [context.kind for context in contexts] == ["question", "premise", "letter", "letter", "letter"]


@pytest.mark.parametrize("premise", ["", "Answer: ", "Answer:\n"])
def test_a_premise_that_is_empty_or_ends_in_white_space_is_refused(premise: str) -> None:
    with pytest.raises(UserError, match=r"score\.premises\.default=.*allowed"):
        premise_context(FROG, {"default": premise})


@pytest.mark.parametrize("template", ["{question} {answer}", "{question} {", "{question} {0}"])
def test_a_template_with_other_fields_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"score\.question_template=.*allowed"):
        question_context(FROG, template)


def test_more_options_than_letters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="item many has 27 options"):
        letter_contexts(Item("many", "t", "?", tuple(map(str, range(27))), 0), TEMPLATE)
