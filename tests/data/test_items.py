"""Multiple-choice items: the answer's index by every spelling that lm-eval data uses."""

from typing import Any

import pytest

from oneaxis.data.items import content, parse_item, parse_lettered, task_records
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record

QUESTION = {"question": "2 + 2 = ", "choices": [" three", "four ", "five"]}


def parse(**values: Any) -> dict[str, Any]:
    return parse_item(Record("f.jsonl:3", values), tasks=["mine"])


@pytest.mark.parametrize(
    "answer",
    [{"answer": 1}, {"answer": "B"}, {"answer": "four"}, {"answer": "1"}, {"gold": 1}, {"label": "1"},
     {"answerKey": " B "}, {"answer": None, "gold": 1}],
)  # fmt: skip
def test_the_right_option_by_index_letter_digit_or_text(answer: dict[str, Any]) -> None:
    row = parse(**QUESTION, **answer)
    assert (row["question"], row["options"], row["answer"]) == ("2 + 2 =", ["three", "four", "five"], 1)
    assert row["item_id"].startswith("mine-")


@pytest.mark.parametrize(
    ("answer", "indices"),
    [({"answer": 1}, [1]), ({"answer": [2, 0]}, [0, 2]), ({"gold": ["C", "A"]}, [0, 2]), ({"answers": ["four"]}, [1]),
     ({"answers": ["five", 1]}, [1, 2])],
)  # fmt: skip
def test_several_right_options_are_all_kept_and_the_first_is_the_answer(
    answer: dict[str, Any], indices: list[int]
) -> None:
    row = parse(**QUESTION, **answer)
    assert (row["answer"], row["answers"]) == (indices[0], indices)


def test_labels_of_arc_are_labels_and_not_indices() -> None:
    """ARC numbers some questions from "1": the key "1" is then the first option."""
    choices = {"text": ["a", "b", "c", "d"], "label": ["1", "2", "3", "4"]}
    assert parse(question="q", choices=choices, answerKey="1")["answer"] == 0
    assert parse(question="q", choices=choices, answerKey=1)["answer"] == 1
    assert parse(query="q", options=choices | {"label": list("ABCD")}, answerKey="D")["answer"] == 3


def test_topic_and_task_of_the_record() -> None:
    row = parse(**QUESTION, answer=0, subject="sums", task="mine")
    assert (row["topic"], row["task"]) == ("sums", "mine")
    row = parse(**QUESTION, answer=0)
    assert (row["topic"], row["task"]) == (None, "mine")
    with pytest.raises(Drop, match=r"task mmlu is not in data\.items\.tasks"):
        parse(**QUESTION, answer=0, task="mmlu")


def test_with_several_tasks_an_item_names_its_own() -> None:
    tasks = ["arc", "mine"]
    values = {**QUESTION, "answer": 0}
    assert parse_item(Record("f.jsonl:3", values | {"task": "mine"}), tasks=tasks)["task"] == "mine"
    says = r"^f\.jsonl:3: has no task; allowed: one of data\.items\.tasks \(arc, mine\); .*tasks='\[NAME\]'$"
    with pytest.raises(UserError, match=says):
        parse_item(Record("f.jsonl:3", values), tasks=tasks)


@pytest.mark.parametrize(
    "answer", [{}, {"answer": ""}, {"answer": None}, {"gold": -1}, {"label": "-1"}, {"answers": []}]
)
def test_an_item_without_a_label_is_dropped(answer: dict[str, Any]) -> None:
    with pytest.raises(Drop, match="no label"):
        parse(**QUESTION, **answer)


@pytest.mark.parametrize(
    ("values", "reason"),
    [({"question": " ", "choices": ["a", "b"]}, "empty"), ({"question": "q", "choices": ["a", " "]}, "empty"),
     ({"question": "q", "choices": ["a", "a "]}, "options repeat"),
     ({"question": "q", "choices": ["a", "b\0"]}, "NUL character")],
)  # fmt: skip
def test_a_useless_item_is_dropped_with_its_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Drop, match=reason):
        parse(**values, answer=0)


def test_an_item_without_a_wrong_option_is_dropped() -> None:
    with pytest.raises(Drop, match="every option is right"):
        parse(**QUESTION, answers=[0, 1, 2])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"choices": ["a", "b"], "answer": 0}, "has no question or query"),
        ({"question": 3, "choices": ["a", "b"], "answer": 0}, "question is 3; allowed: a string"),
        ({"question": "q", "answer": 0}, "has no choices or options"),
        ({"question": "q", "choices": "a b", "answer": 0}, "choices is 'a b'; allowed: a list"),
        ({"question": "q", "choices": ["a", 2], "answer": 0}, "allowed: a list of strings"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "choices has 1 texts"),
        ({"question": "q", "choices": {"label": ["A", "B"]}, "answer": 0}, "allowed: a list of strings"),
        ({"question": "q", "choices": {"text": ["a", "b"], "label": ["A"]}, "answer": 0}, "2 texts and 1 labels"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "answer is 2; allowed: 0 to 1"),
        ({"question": "q", "choices": ["a", "b"], "answer": -2}, "answer is -2; allowed: 0 to 1"),
        ({"question": "q", "choices": ["a", "b"], "answers": [0, 2]}, "answers is 2; allowed: 0 to 1"),
        ({"question": "q", "choices": ["a", "b"], "gold": ["a", "c"]}, "'c', which names no option"),
        ({"question": "q", "choices": ["a", "b"], "answers": ["a", 0]}, "names an option twice; allowed: options that"),
        ({"question": "q", "choices": ["a", "b"], "answer": [[0]]}, r"answer is \[0\]; allowed: an index from 0"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "answer is True"),
        ({"question": "q", "choices": ["a", "b"], "answer": 0.0}, "answer is 0.0"),
        ({"question": "q", "choices": ["a", "b"], "answer": "C"}, "'C', which names no option"),
        ({"question": "q", "choices": ["a", "b"], "answer": "c"}, "'c', which names no option"),
        ({"question": "q", "choices": ["B", "A"], "answer": "A"}, r"'A', which can mean options \[0, 1\]"),
        ({"question": "q", "choices": ["3", "0"], "answer": "0"}, r"'0', which can mean options \[0, 1\]"),
    ],
)
def test_a_mistake_is_named_with_its_place(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"^f\.jsonl:3: .*{says}") as caught:
        parse(**values)
    assert "\n" not in str(caught.value)


def lettered(question: str, options: str, answer: str, **more: str) -> dict[str, Any]:
    return parse_lettered(Record("w:1", {"question": question, "options": options, "answer": answer, **more}), "t")


def test_options_in_one_string_lose_their_letters() -> None:
    row = lettered("Why? ", "\nA. is used \nB. pop it. ", "B. pop it. ", passage="Once. ")
    assert (row["question"], row["options"], row["answer"]) == ("Once. Why?", ["is used", "pop it."], 1)


def test_a_question_mark_at_the_last_option_is_the_questions() -> None:
    row = lettered("You can find a monkey where", "\nA. rain forest\nB. nigeria?", "B. nigeria")
    assert (row["options"], row["answer"]) == (["rain forest", "nigeria"], 1)


@pytest.mark.parametrize("options", ["\nC. enlightenment\nD. open mind", ".\nA. shelf\nB. can", ""])
def test_options_that_do_not_start_at_a_are_malformed(options: str) -> None:
    with pytest.raises(Drop, match="malformed options"):
        lettered("q", options, "D. open mind")


def test_the_same_options_in_another_order_are_the_same_item() -> None:
    one, two = parse(question="q", choices=["a", "b"], answer=0), parse(question="q", choices=["b", "a"], answer=1)
    assert content(one) == content(two)
    assert content(one) != content(parse(question="q", choices=["a", "c"], answer=0))


def test_an_unknown_task_lists_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"data\.items\.tasks=hellaswag: no such task; allowed: abstract.*siqa$"):
        task_records("hellaswag")
