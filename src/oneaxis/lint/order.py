"""The order of an object's properties is the order in which they are written: reasoning, answer, confidence.

A model can only use what it has written. A grammar fixes the order of the properties as declared (`required` does not
count), so an answer that is declared before its reasoning cannot rest on it, and a confidence before its answer is a
confidence in nothing.

    reasoning    a free string, or an array of texts or objects, whose name says so: reasoning, evidence, quotes ...
    answer       a choice (enum, constants, boolean), or a name that says so: answer, label, verdict, score ...
    confidence   a number, string or choice whose name says so: confidence, certainty, probability ...

The last word of a name says what it is: `evidence_url` is an address, `reason_code` a code, `verdict_date` a date. Of a
reasoning and a confidence the other words say what it is about. Those that name one property (`price_reason`, `price`)
bind it to that one; those that say nothing of the kind (`brief_reasoning`, `answer_rationale`) leave it to all answers
of its object. Any other (`close_reason`, `reason_for_visit`, `default_probability`) is a field like all the rest. A
confidence in an object without answers belongs to all that is there.
"""

import re
from collections.abc import Mapping
from typing import Any

from oneaxis.lint.tree import Node, Schema, Value, value

REASONING = frozenset((
    "reasoning", "reason", "reasons", "rationale", "rationales", "explanation", "explanations", "justification",
    "justifications", "evidence", "thought", "thoughts", "thinking", "analysis", "cot", "scratchpad",
    "deliberation", "quote", "quotes",
))  # fmt: skip
ANSWER = frozenset((
    "answer", "answers", "label", "labels", "class", "category", "categories", "classification", "verdict",
    "decision", "result", "prediction", "score", "rating", "grade", "sentiment", "intent", "outcome", "conclusion",
    "choice",
))  # fmt: skip
CONFIDENCE = frozenset((
    "confidence", "certainty", "probability", "likelihood", "conf",
))  # fmt: skip
CARRIERS = frozenset((
    "text", "texts", "value", "name", "steps", "step", "process", "trace", "notes", "note", "log", "list", "items",
    "summary", "sentence", "sentences", "snippet", "snippets", "passage", "passages", "span", "spans", "level",
    "percent", "percentage", "pct", *"0123456789",
))  # fmt: skip
"""Last words that leave it to the one before to say what it is: `reasoning_steps`, `label_name`, `answer_1`."""
COMMON = frozenset((
    "of", "for", "behind", "the", "in", "a", "is", "my", "your", "by", "brief", "short", "detailed", "full", "final",
    "overall", "main", "key", "internal", "supporting", "relevant", "verbatim", "exact", "direct", "source", "textual",
    "chain", "step", "steps", "model", "llm", "ai", "self", "own",
))  # fmt: skip
"""Words that name no property."""


def words(name: str) -> list[str]:
    """A name in lower-case words: `userID`, `user_id` and `user-id` alike."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+", name)]


def _core(name: str, marks: frozenset[str]) -> list[str]:
    """The words of a name without the carriers at its end."""
    said = words(name)
    while len(said) > 1 and said[-1] in CARRIERS and not marks.isdisjoint(said[:-1]) and said[-1] not in marks:
        said.pop()
    # The score of a confidence is one; a score by itself is an answer.
    if len(said) > 1 and said[-1] in ("score", "rating", "estimate") and said[-2] in marks & CONFIDENCE:
        said.pop()
    return said


def _says(name: str, marks: frozenset[str]) -> bool:
    """Whether a name says that its property is one of these: by its last word, or before `for` and `of`."""
    said = _core(name, marks)
    for joint in ("for", "of", "behind") if marks is not ANSWER else ():
        if joint in said[1:] and said[said.index(joint, 1) - 1] in marks:
            return True
    return bool(said) and said[-1] in marks


def is_confidence(name: str, value: Value) -> bool:
    """Whether a property is a self-reported confidence."""
    return _says(name, CONFIDENCE) and not value.types <= {"object", "array", "null"}


def is_reasoning(name: str, value: Value) -> bool:
    """Whether a property is written to think with: free text, or an array of pieces."""
    if not _says(name, REASONING) or value.choice is not None:
        return False
    if not value.types & {"string", "array"} or value.types & {"boolean", "integer", "number"}:
        return False
    return not any(leaf.has("format") or _listed(leaf.get("items")) for leaf in value.leaves)


def _listed(items: Any) -> bool:
    """Whether the items of an array are numbers or constants: places in a source, or reasons to choose from."""
    if not isinstance(items, dict):
        return False
    said = items.get("type")
    return "enum" in items or "const" in items or said in ("integer", "number", "boolean")


def is_answer(name: str, value: Value) -> bool:
    """Whether a property is what the object is there for."""
    return value.choice is not None or value.types - {"null"} == {"boolean"} or _says(name, ANSWER)


def _stem(name: str, marks: frozenset[str]) -> list[str]:
    """The words of a reasoning's or a confidence's name that may name what it is about."""
    core = _core(name, marks)
    said = core + [word for word in words(name)[len(core) :] if word.isdigit()]
    return [word for word in said if word not in marks and word not in COMMON]


def _named(stem: list[str], other: str) -> bool:
    """Whether this is a property's name, or one but for words such as answer: `price` and `1` of `answer_1`."""
    said = [word for word in words(other) if word not in COMMON]
    return bool(stem) and (said == stem or [word for word in said if word not in ANSWER] == stem)


def _about(name: str, marks: frozenset[str], others: list[str]) -> bool:
    """Whether a reasoning or confidence is about a property that is there, or about answers as such."""
    stem = _stem(name, marks)
    return all(word in ANSWER or word.isdigit() for word in stem) or any(_named(stem, other) for other in others)


class Roles:
    """Who is what in one object."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.names = list(values)
        self.confidence = [name for name in self.names if is_confidence(name, values[name])]
        self.reasoning = [
            name for name in self.names if name not in self.confidence and is_reasoning(name, values[name])
        ]
        rest = [name for name in self.names if name not in self.confidence and name not in self.reasoning]
        self.confidence = [name for name in self.confidence if _about(name, CONFIDENCE, rest)]
        self.reasoning = [name for name in self.reasoning if _about(name, REASONING, rest)]
        self.others = [name for name in self.names if name not in self.confidence and name not in self.reasoning]
        self.answers = [name for name in self.others if is_answer(name, values[name])]

    def subjects(self, name: str) -> list[str]:
        """What a reasoning or a confidence is about, in order."""
        stem = _stem(name, REASONING if name in self.reasoning else CONFIDENCE)
        own = [other for other in self.others if _named(stem, other)]
        return own or self.answers or (self.others if name in self.confidence else [])

    def late(self) -> dict[str, str]:
        """Each reasoning that comes after what it is for, with the first such answer."""
        found = {}
        for name in self.reasoning:
            for subject in self.subjects(name):
                if self.names.index(subject) < self.names.index(name):
                    found[name] = subject
                    break
        return found

    def early(self) -> dict[str, str]:
        """Each confidence that comes before what it is about, with the last such answer; "" for a confidence alone."""
        found = {}
        for name in self.confidence:
            subjects = self.subjects(name)
            if not subjects:
                found[name] = ""
            elif self.names.index(subjects[-1]) > self.names.index(name):
                found[name] = subjects[-1]
        return found

    def mended(self) -> list[str]:
        """The names in an order in which nothing is late or early; all others keep theirs."""
        order = list(self.names)
        for name in self.reasoning:
            where = min((order.index(subject) for subject in self.subjects(name)), default=len(order))
            if where < order.index(name):
                order.remove(name)
                order.insert(where, name)
        # From the last to the first, so that several behind one answer keep their order.
        for name in reversed(self.confidence):
            where = max((order.index(subject) for subject in self.subjects(name)), default=-1)
            if where > order.index(name):
                order.remove(name)
                order.insert(where, name)
        return order


def roles(schema: Schema, members: Mapping[str, Node]) -> Roles:
    """The roles of an object's properties."""
    return Roles({name: value(schema, node) for name, node in members.items()})
