"""Prompts are worked by hand; rotations are compared with the definition: letter j at rotation r is option j + r."""

import pytest

from oneaxis.errors import UserError
from oneaxis.score.contexts import (
    Item,
    Wording,
    all_contexts,
    bos_context,
    choose,
    content_free_contexts,
    letter_contexts,
    premise_contexts,
    question_context,
    usable,
)

WORDING = Wording(("Question: {question}\nAnswer:",))
FROG = Item("q1", "bio", "Frogs eat {what}?", ("flies", "sand", "wood"), 0)


def test_question_and_premise_contexts_share_their_options() -> None:
    question = question_context(FROG, WORDING)
    (premise,) = premise_contexts(FROG, {"default": "Answer:", "bio": "In biology:"}, WORDING)
    assert question.prompt == "Question: Frogs eat {what}?\nAnswer:"
    assert premise.prompt == "In biology:"
    assert question.continuations == premise.continuations == (" flies", " sand", " wood")
    assert [one.prompt for one in premise_contexts(FROG, {"default": "Answer:"}, WORDING)] == ["Answer:"]
    several = premise_contexts(FROG, {"default": ["Answer:", "So:"]}, WORDING)
    assert [(one.prompt, one.variant) for one in several] == [("Answer:", 0), ("So:", 1)]
    assert bos_context(FROG, WORDING).prompt == ""
    assert bos_context(FROG, WORDING).continuations == question.continuations


def test_letter_contexts_rotate_the_options_and_know_what_each_letter_stands_for() -> None:
    contexts = letter_contexts(FROG, WORDING)
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
    pairs = [pair for context in letter_contexts(item, WORDING) for pair in enumerate(context.options)]
    assert sorted(pairs) == [(letter, option) for letter in range(5) for option in range(5)]


def test_items_without_a_choice_are_dropped_and_counted() -> None:
    items = [FROG, Item("q2", "bio", "?", ("x", " "), 0), Item("q3", "bio", "?", ("x",), 0),
             Item("q4", "bio", "?", ("x", "y", "x"), 1)]  # fmt: skip
    assert usable(items) == ([FROG], {"empty_option": 1, "single_option": 1, "repeated_option": 1})


def test_letter_items_are_drawn_per_task_by_seed_whatever_the_order() -> None:
    items = [Item(f"q{index}", task, "?", ("x", "y"), 0) for task in ("s", "t") for index in range(20)]
    drawn = choose(items, "letter", 5, seed=0)
    assert [sum(item.task == task for item in drawn) for task in ("s", "t")] == [5, 5]
    assert set(choose(items[::-1], "letter", 5, seed=0)) == set(drawn)
    assert set(choose(items, "letter", 5, seed=1)) != set(drawn)
    assert choose(items, "letter", 99, seed=0) == items
    assert choose(items, "letter", 0, seed=0) == []
    assert set(choose(items, "controls", 5, seed=0)) != set(drawn)


def test_all_contexts_of_an_item() -> None:
    """Further premises and the empty prompt are for control items, letters and content-free lists for lettered ones."""
    premises = {"default": ["Answer:", "So:"]}
    (plain,) = all_contexts([FROG], wording=WORDING, premises=premises)
    assert [(context.kind, context.variant) for context in plain] == [("question", 0), ("premise", 0)]
    (full,) = all_contexts(
        [FROG], wording=WORDING, premises=premises, controls_per_task=1, letters_per_task=1, content_free=["N/A", ""]
    )
    assert [(context.kind, context.rotation, context.variant) for context in full] == [
        ("question", 0, 0), ("premise", 0, 0), ("premise", 0, 1), ("bos", 0, 0), ("letter", 0, 0), ("letter", 1, 0),
        ("letter", 2, 0), ("content_free", 0, 0), ("content_free", 0, 1),
    ]  # fmt: skip


def test_content_free_lists_have_the_items_own_options_in_the_same_template() -> None:
    contexts = content_free_contexts(FROG, ["N/A", ""], WORDING)
    assert [context.prompt for context in contexts] == [
        "Question: N/A\nA. flies\nB. sand\nC. wood\nAnswer:",
        "Question: \nA. flies\nB. sand\nC. wood\nAnswer:",
    ]
    assert [context.options for context in contexts] == [(0, 1, 2)] * 2
    assert {context.continuations for context in contexts} == {(" A", " B", " C")}


def test_a_season_turns_wording_and_order_and_nothing_else() -> None:
    """Season 0 is the first template in the item's own order; every later one deals templates and orders anew."""
    templates = ("Question: {question}\nAnswer:", "Q: {question}\nA:", "{question}\nIt is:")
    items = [Item(f"q{index}", "bio", f"why {index}?", ("a", "b", "c", "d"), 0) for index in range(40)]
    seasons = [Wording(templates, season) for season in range(4)]
    worded = [[wording.template(item) for item in items] for wording in seasons]
    assert worded[0] == [templates[0]] * 40
    assert all(set(each) == set(templates) for each in worded[1:])
    # Three templates: an item meets each of them once in three seasons on end.
    assert all(len({worded[season][place] for season in (1, 2, 3)}) == 3 for place in range(40))
    orders = [[wording.order(item) for item in items] for wording in seasons]
    assert orders[0] == [(0, 1, 2, 3)] * 40
    assert all(sorted(order) == [0, 1, 2, 3] for each in orders for order in each)
    assert len(set(orders[1])) > 10
    assert orders[1] != orders[2]
    item = items[3]
    order, template = orders[2][3], worded[2][3]
    first, second, *_ = letter_contexts(item, seasons[2])
    listed = "".join(f"\n{letter}. {item.options[option]}" for letter, option in zip("ABCD", order, strict=True))
    assert first.prompt == template.format(question=item.question + listed)
    assert first.options == order
    assert second.options == (*order[1:], order[0])
    assert content_free_contexts(item, ["N/A"], seasons[2])[0].options == order


def test_a_closed_think_span_stands_before_the_answer_and_an_open_one_is_refused() -> None:
    closed = Wording(("{question}\nAnswer:",), answer_prefix="<think>\n\n</think>\n\n")
    context = question_context(FROG, closed)
    assert context.prompt == "Frogs eat {what}?\nAnswer:<think>\n\n</think>\n\n"
    # The span ends in white space: the answer follows at once.
    assert context.continuations == ("flies", "sand", "wood")
    assert premise_contexts(FROG, {"default": "Answer:"}, closed)[0].prompt == "Answer:<think>\n\n</think>\n\n"
    assert bos_context(FROG, closed).continuations == context.continuations

    def opened(message: str) -> str:
        return f"<user>{message}<assistant><think>\n"

    with pytest.raises(UserError, match=r"score\.answer_prefix='': the prompt ends inside a think span.*allowed"):
        question_context(FROG, Wording(("{question}",), chat=opened))
    done = question_context(FROG, Wording(("{question}",), chat=opened, answer_prefix="\n</think>\n\n"))
    assert done.prompt == "<user>Frogs eat {what}?<assistant><think>\n\n</think>\n\n"
    assert done.continuations == ("flies", "sand", "wood")


def test_the_delimiter_is_lm_evals() -> None:
    """A space without a chat template, none with one, unless a prefix that does not end in white space follows it."""

    def chat(message: str) -> str:
        return f"<user>{message}<assistant>"

    template = ("{question}",)
    cases = [
        (None, "", " "),
        (None, " So", " "),
        (None, "So\n", ""),
        (chat, "", ""),
        (chat, "It is", " "),
        (chat, "x\n", ""),
    ]
    for renders, prefix, delimiter in cases:
        assert Wording(template, answer_prefix=prefix, chat=renders).delimiter == delimiter


@pytest.mark.parametrize("answers", [(3,), (-1,), (0, 7)])
def test_a_right_answer_that_is_no_option_is_refused(answers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"items\.parquet: item bad: answers is \[.*\]; allowed: 0 to 1$"):
        usable([Item("bad", "bio", "?", ("x", "y"), answers[0], answers)])


@pytest.mark.parametrize("premise", ["", "Answer: ", "Answer:\n", [], ["Answer:", ""], ["Answer:", "Answer:"]])
def test_a_premise_that_is_empty_or_repeated_or_ends_in_white_space_is_refused(premise: str | list[str]) -> None:
    with pytest.raises(UserError, match=r"score\.premises\.default=.*allowed"):
        premise_contexts(FROG, {"default": premise}, WORDING)


@pytest.mark.parametrize("template", ["{question} {answer}", "{question} {", "{question} {0}"])
def test_a_template_with_other_fields_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"score\.question_template=.*allowed"):
        question_context(FROG, Wording((template,)))


def test_more_options_than_letters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="item many has 27 options"):
        letter_contexts(Item("many", "t", "?", tuple(map(str, range(27))), 0), WORDING)
