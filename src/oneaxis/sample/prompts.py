"""The prompts that are sampled, each with the rule that its responses are checked by.

The user's come from a file, one record a prompt:

    {"prompt": "What is 6 x 7?", "rule": "number", "answer": 42}
    {"prompt": [{"role": "user", "content": "Name a fruit."}], "rule": "words", "max_words": 3}

Ours are made by a seed: sums and products whose answer is known, JSON objects with named keys, questions with a limit
on words.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from oneaxis.config.schema import SamplePairs
from oneaxis.data.pairs import read_messages
from oneaxis.data.sample import digest, distinct, drawn, parsed
from oneaxis.errors import UserError
from oneaxis.sample.rules import KINDS, NUMBER, Kind, Rule
from oneaxis.sources.records import Record, read_file, usable

THINGS = (
    "anchor", "apple", "backpack", "balloon", "bicycle", "blanket", "bridge", "broom", "bucket", "candle", "carpet",
    "chair", "clock", "compass", "cup", "desk", "door", "drum", "fork", "garden", "glove", "guitar", "hammer", "hat",
    "kettle", "key", "kite", "ladder", "lamp", "lighthouse", "map", "mirror", "needle", "notebook", "oven", "paddle",
    "pencil", "piano", "pillow", "plate", "pump", "radio", "rope", "ruler", "sail", "saw", "scarf", "shovel", "spoon",
    "stamp", "table", "telescope", "tent", "thermometer", "ticket", "tractor", "umbrella", "violin", "wheel", "window",
)  # fmt: skip
KEYS = ("name", "colour", "material", "price", "weight", "owner", "year", "size")
QUESTIONS = ("What is a {thing}?", "What is a {thing} used for?", "Where would you look for a {thing}?",
             "Why would somebody buy a {thing}?")  # fmt: skip
WORD_LIMITS = (6, 8, 10, 12, 16)
ARITHMETIC_DRAWS = 100_000
"""Draws of a sum or product, repeated ones among them."""


@dataclass(frozen=True)
class Prompt:
    """One prompt to sample responses to."""

    prompt_id: str
    source: str
    text: str
    """Plain text, or a conversation as JSON text."""
    conversational: bool
    rule: Rule


def make_prompts(settings: SamplePairs, *, seed: int, root: Path) -> tuple[list[Prompt], dict[str, Any]]:
    """At most `max_prompts` distinct prompts, and what the manifest says of where they came from.

    Raises:
        UserError: a file, record or rule that cannot be used, or fewer prompts of ours than asked for.
    """
    if settings.path is None:
        prompts = own_prompts(settings.tasks, settings.max_prompts, chat=settings.chat_template, seed=seed)
        return prompts, {"sources": [{"source": task, "licence": "made by a seed"} for task in settings.tasks],
                         "read": len(prompts), "dropped": {}}  # fmt: skip
    records, origin = read_file(settings.path, key="sample.path", root=root)
    source = "".join(letter if re.match(r"[A-Za-z0-9._-]", letter) else "_" for letter in Path(settings.path).stem)
    rows, dropped = parsed(records, lambda record: {"prompt": _parsed(record, source, settings.chat_template)})
    unique, duplicates = distinct(rows, lambda row: row["prompt"].text)
    if not unique:
        lost = ", ".join(f"{count} {reason}" for reason, count in (dropped + duplicates).items())
        raise UserError(f"sample.path={settings.path}: holds no usable prompt ({lost}); allowed: at least one")
    ordered = drawn(unique, lambda row: row["prompt"].text, seed=seed, table="sample")[: settings.max_prompts]
    return [row["prompt"] for row in ordered], {
        "sources": [origin],
        "read": len(records),
        "dropped": dict(sorted((dropped + duplicates).items())),
    }


# --- the user's ----------------------------------------------------------------------------------------------


def _parsed(record: Record, source: str, chat: bool) -> Prompt:
    if isinstance(record.value.get("prompt"), list):
        messages = read_messages(record, "prompt")
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            found = messages[-1]["role"] if messages else "nothing"
            raise UserError(f"{record.where}: prompt ends with {found}; allowed: a message of role user or tool")
        text, conversational = json.dumps(messages, ensure_ascii=False), True
    else:
        text, conversational = _asked(usable(str(record.text("prompt"))), chat)
    return Prompt(_id(source, text), source, text, conversational, parse_rule(record))


def parse_rule(record: Record) -> Rule:
    """The rule that a record names, with what it needs.

    Raises:
        UserError: an unknown rule, or a value that is missing or of the wrong kind.
    """
    kind = record.value.get("rule")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{record.where}: rule is {repr(kind)[:80]}; allowed: {', '.join(KINDS)}")
    key = KINDS[kind]
    value = record.value.get(key)
    if value is None:
        raise UserError(f"{record.where}: has no {key}; allowed: rule={kind} with {key}")
    parse: Mapping[str, Callable[[Any], Any]] = {"number": _decimal, "json": _keys, "regex": _pattern, "words": _limit}
    try:
        return Rule(_kind(kind), parse[kind](value))
    except ValueError as error:
        raise UserError(f"{record.where}: {key} is {repr(value)[:80]}; allowed: {error}") from error


def _kind(name: str) -> Kind:
    for kind in KINDS:
        if kind == name:
            return kind  # type: ignore[return-value]
    raise AssertionError(name)


def _decimal(value: Any) -> Decimal:
    said = ValueError("a number, or a text that is one (42, -3.5, 1,234)")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise said
    text = str(value).strip().replace("\u2212", "-")
    if isinstance(value, str) and not re.fullmatch(rf"[-+]?{NUMBER.pattern}", text):
        raise said
    try:
        # The shortest text of a float is what its author wrote.
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        raise said from None
    if not number.is_finite():
        raise said
    return number


def _keys(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(key, str) for key in value):
        raise ValueError("a list of at least one key")
    return tuple(value)


def _pattern(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a regular expression")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from error
    return value


def _limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number from 1")
    return value


# --- ours ----------------------------------------------------------------------------------------------------


def own_prompts(tasks: Sequence[str], count: int, *, chat: bool, seed: int) -> list[Prompt]:
    """`count` prompts, the tasks sharing them as equally as can be and taking turns. A longer list begins alike.

    Raises:
        UserError: a task does not have so many.
    """
    made = []
    for position, task in enumerate(tasks):
        share = count // len(tasks) + (position < count % len(tasks))
        draws = _arithmetic(seed) if task == "arithmetic" else _from_pool(_POOLS[task](), task, seed)
        own = list(itertools.islice(draws, share))
        if len(own) < share:
            raise UserError(f"sample.max_prompts={count}: there are only {len(own)} prompts of task {task}; allowed: "
                            f"at most {len(own) * len(tasks)}")  # fmt: skip
        made.append([(task, *each) for each in own])
    prompts = []
    for turn in itertools.zip_longest(*made):
        for each in turn:
            if each is not None:
                task, words, rule = each
                text, conversational = _asked(words, chat)
                prompts.append(Prompt(_id(task, text), task, text, conversational, rule))
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    return prompts


def _arithmetic(seed: int) -> Iterator[tuple[str, Rule]]:
    """Sums, differences and products, small and larger ones, without repetition."""
    draw = random.Random(f"sample:arithmetic:{seed}")
    seen: set[str] = set()
    for number in range(ARITHMETIC_DRAWS):
        # In turns, so that any head of the list has all kinds; the larger ones are for models that know the small.
        most = 12 if number % 8 < 4 else 99
        a, b, c = sorted((draw.randint(2, most) for _ in range(3)), reverse=True)
        words, answer = [
            (f"{a} + {b}", a + b), (f"{a} - {b}", a - b), (f"{a} * {min(b, 12)}", a * min(b, 12)),
            (f"{c} + {a} + {b}", a + b + c),
        ][number % 4]  # fmt: skip
        if words not in seen:
            seen.add(words)
            yield f"What is {words}? End your answer with the result.", Rule("number", Decimal(answer))


def _json_pool() -> list[tuple[str, Rule]]:
    return [
        (f"Describe a {thing} as a JSON object with the keys {', '.join(map(json.dumps, keys[:-1]))} and "
         f"{json.dumps(keys[-1])}. Answer with the JSON object alone.", Rule("json", keys))
        for thing in THINGS for keys in itertools.combinations(KEYS, 3)
    ]  # fmt: skip


def _words_pool() -> list[tuple[str, Rule]]:
    return [
        (f"{question.format(thing=thing)} Answer in at most {limit} words.", Rule("words", limit))
        for thing in THINGS for question in QUESTIONS for limit in WORD_LIMITS
    ]  # fmt: skip


_POOLS: dict[str, Callable[[], list[tuple[str, Rule]]]] = {"json": _json_pool, "words": _words_pool}


def _from_pool(pool: list[tuple[str, Rule]], task: str, seed: int) -> list[tuple[str, Rule]]:
    return random.Random(f"sample:{task}:{seed}").sample(pool, len(pool))


def _asked(words: str, chat: bool) -> tuple[str, bool]:
    """A text as it is sampled: a user's message as JSON text, or the plain text itself."""
    if not chat:
        return words, False
    return json.dumps([{"role": "user", "content": words}], ensure_ascii=False), True


def _id(source: str, text: str) -> str:
    return f"{source}-{digest(text)[:12]}"
