"""The order of an object's properties is the order in which they are written: reasoning, answer, confidence.

A model can only use what it has written. A grammar fixes the order of the properties as declared (`required` does not
count), so an answer that is declared before its reasoning cannot rest on it, and a confidence before its answer is a
confidence in nothing.

    reasoning    a free string, or an array, whose name says so: reasoning, evidence, rationale, thoughts, quotes ...
    answer       a choice (enum, constants, boolean), or a name that says so: answer, label, verdict, score ...
    confidence   a number, string or choice whose name says so: confidence, certainty, probability ...

A reasoning or confidence that shares its other words with one property (`price_reason`, `price`) belongs to that one;
otherwise to all answers of its object. A confidence in an object without answers belongs to all that is there.
"""

import re
from collections.abc import Mapping

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


def words(name: str) -> list[str]:
    """A name in lower-case words: `userID`, `user_id` and `user-id` alike."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+", name)]


def is_confidence(name: str, value: Value) -> bool:
    """Whether a property is a self-reported confidence."""
    return bool(CONFIDENCE.intersection(words(name))) and not value.types <= {"object", "array", "null"}


def is_reasoning(name: str, value: Value) -> bool:
    """Whether a property is written to think with: free text, or an array of pieces."""
    if not REASONING.intersection(words(name)) or value.choice is not None:
        return False
    return bool(value.types & {"string", "array"}) and not value.types & {"boolean", "integer", "number"}


def is_answer(name: str, value: Value) -> bool:
    """Whether a property is what the object is there for."""
    return value.choice is not None or value.types - {"null"} == {"boolean"} or bool(ANSWER.intersection(words(name)))


class Roles:
    """Who is what in one object."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.names = list(values)
        self.confidence = [name for name in self.names if is_confidence(name, values[name])]
        self.reasoning = [
            name for name in self.names if name not in self.confidence and is_reasoning(name, values[name])
        ]
        self.others = [name for name in self.names if name not in self.confidence and name not in self.reasoning]
        self.answers = [name for name in self.others if is_answer(name, values[name])]

    def subjects(self, name: str) -> list[str]:
        """What a reasoning or a confidence is about, in order."""
        marks = REASONING if name in self.reasoning else CONFIDENCE
        stem = [word for word in words(name) if word not in marks and word not in ("of", "for", "the", "in")]
        own = [other for other in self.others if stem and words(other) == stem]
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
