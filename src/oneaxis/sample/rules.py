"""Verifiable rules: whether a response does what its prompt asked, and what was read that says so.

    number   the last number of the response equals `answer`, exactly and as a decimal: 12.0 is 12, 1,234 is 1234
    json     the whole response is one JSON object that has all of `keys`
    regex    the whole response matches `pattern` (Python's `re`)
    words    the response has at most `max_words` words (runs of non-space)

White space around a response does not count. A response that was cut off at the token limit, or is empty, fails every
rule: a cut answer is none.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

Kind = Literal["number", "json", "regex", "words"]
KINDS: dict[str, str] = {"number": "answer", "json": "keys", "regex": "pattern", "words": "max_words"}
"""Each rule and the key of a prompt's record that holds what it needs."""

NUMBER = re.compile(r"(?<![A-Za-z_])((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
"""A decimal number without its sign; commas only between groups of three. Digits behind a letter are a name (H2O)."""
MINUS = "-\u2212"
"""The hyphen, and Unicode's minus sign."""


@dataclass(frozen=True)
class Rule:
    """What a prompt's response is checked by."""

    kind: Kind
    value: Decimal | tuple[str, ...] | str | int
    """number: the answer. json: the keys. regex: the pattern. words: the most words."""

    def as_json(self) -> str:
        """The value as JSON text; a decimal as it was written."""
        plain: Any = self.value
        if isinstance(self.value, Decimal):
            plain = str(self.value)
        return json.dumps(list(plain) if isinstance(plain, tuple) else plain, ensure_ascii=False)


@dataclass(frozen=True)
class Reading:
    """What a rule says of a response."""

    passed: bool
    said: str
    """What was read: `83, as it is`, `82, not 83`, `lacks price`."""


def check(rule: Rule, response: str, *, finished: bool) -> Reading:
    """Read a response by a rule.

    Args:
        finished: the model ended it; False: it was cut off at the token limit.
    """
    text = response.strip()
    if not finished:
        return Reading(False, "cut off at the token limit")
    if not text:
        return Reading(False, "empty")
    match rule.kind:
        case "number":
            assert isinstance(rule.value, Decimal)
            return _number(text, rule.value)
        case "json":
            assert isinstance(rule.value, tuple)
            return _json(text, rule.value)
        case "regex":
            matched = re.fullmatch(str(rule.value), text) is not None
            return Reading(matched, "matches" if matched else "does not match")
        case "words":
            assert isinstance(rule.value, int)
            count = len(text.split())
            return Reading(count <= rule.value, f"{count} words of {rule.value}")


def last_number(text: str) -> Decimal | None:
    """The last number that `text` holds.

    A minus is a sign unless something that can be subtracted from stands right before it: `10-3` ends in 3, `(-3)` and
    `= -3` in -3.
    """
    last = None
    for last in NUMBER.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    before = text[: last.start()]
    value = Decimal(last[1].replace(",", ""))
    signed = before.endswith(tuple(MINUS)) and not re.search(r"[\w)\]]$", before[:-1])
    return -value if signed else value


def _number(text: str, answer: Decimal) -> Reading:
    found = last_number(text)
    if found is None:
        return Reading(False, "no number")
    return Reading(found == answer, f"{found}, as it is" if found == answer else f"{found}, not {answer}")


class _Repeated(ValueError):
    """A key of an object that is there twice."""


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Repeated("a key is there twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _json(text: str, keys: Sequence[str]) -> Reading:
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return Reading(False, f"not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return Reading(False, f"not JSON: {str(error)[:60]}")
    if not isinstance(value, dict):
        return Reading(False, "JSON, but no object")
    lacking = [key for key in keys if key not in value]
    return Reading(not lacking, f"lacks {', '.join(lacking)}" if lacking else "an object with all keys")
