"""The loop detector: runs against brute force, and alarms on constructed texts whose truth is known.

The oracle of `runs` compares every pair of elements and shares no code with it. Corpora are made here from fresh seeds:
sound texts (JSON arrays, tables, code of Python's own library, enumerations, rules, indentation), whole and cut off, on
which nothing may be reported; and loops with a span, a start and a count that are known, which must all be found.
"""

import json
import random
import string
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from oneaxis.lint.loops import Run, answer_loop, runs, text_loop, token_loop

SEED = random.SystemRandom().randrange(1 << 30)
WORDS = (  # noqa: SIM905
    "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people "
).split()


def brute(text: str) -> list[Run]:
    """All maximal runs of three repeats or more, by definition: each period, each stretch, smallest period only."""
    found = {}
    for period in range(1, len(text) // 3 + 1):
        start = 0
        while start + period < len(text):
            stop = start
            while stop + period < len(text) and text[stop] == text[stop + period]:
                stop += 1
            length = stop + period - start
            if length >= 3 * period and not any(
                other.start <= start and start + length <= other.start + other.length for other in found.values()
            ):
                found[start, period] = Run(start, period, length)
            start = stop + 1
    return sorted(found.values(), key=lambda run: (run.period, run.start))


@pytest.mark.parametrize("letters", ["ab", "abc", "abcdefgh"])
def test_runs_are_those_of_brute_force(letters):
    chance = random.Random(SEED)
    for _ in range(300):
        text = ""
        while len(text) < chance.randrange(1, 90):
            span = "".join(chance.choices(letters, k=chance.randrange(1, 9)))
            text += span * chance.choice([1, 1, 2, 3, 5])
        found = runs(np.array([ord(character) for character in text]))
        assert sorted(found, key=lambda run: (run.period, run.start)) == brute(text), (SEED, text)


def test_runs_by_hand():
    # 012345678901: xab abab abab y, one run of period 2 from 1 to 11.
    assert runs(np.array([ord(each) for each in "xababababay"])) == [Run(1, 2, 9)]
    assert runs(np.array([7, 7, 7, 7])) == [Run(0, 1, 4)]
    assert runs(np.array([1, 2, 1, 2])) == []
    assert runs(np.array([], dtype=np.int64)) == []


# --- sound texts ---------------------------------------------------------------------------------------------


def value(chance: random.Random) -> object:
    return chance.choice([
        chance.randrange(1000), round(chance.random(), 3), chance.choice([True, False, None]),
        " ".join(chance.choices(WORDS, k=chance.randrange(1, 6))), chance.choice(["open", "closed", "unknown"]),
    ])  # fmt: skip


def json_array(chance: random.Random) -> str:
    keys = chance.sample(WORDS, k=chance.randrange(1, 7))
    rows = [{key: value(chance) for key in keys} for _ in range(chance.randrange(3, 200))]
    return json.dumps(rows, indent=chance.choice([None, 2, 4]))


def same_objects(chance: random.Random) -> str:
    """A JSON array of the same small object, up to five times, among others."""
    same = {"status": chance.choice(["ok", None]), "retries": 0}
    rows: list = [{"status": value(chance), "retries": chance.randrange(9)} for _ in range(9)]
    return json.dumps(rows[:4] + [same] * chance.randrange(2, 6) + rows[4:], indent=chance.choice([None, 2]))


def table(chance: random.Random) -> str:
    columns = chance.randrange(2, 12)
    rule = "|" + "---|" * columns
    rows = [
        "| " + " | ".join(str(value(chance)) for _ in range(columns)) + " |" for _ in range(chance.randrange(3, 60))
    ]
    rows[1:1] = [rule]
    empty = "|" + "  |" * columns
    return "\n".join([*rows, *[empty] * chance.randrange(0, 4)])


def csv(chance: random.Random) -> str:
    columns = chance.randrange(2, 30)
    share = chance.random() / 2
    rows = [
        ",".join("" if chance.random() < share else str(value(chance)) for _ in range(columns))
        for _ in range(chance.randrange(3, 60))
    ]  # fmt: skip
    return "\n".join([*rows, "," * (columns - 1)])


def code(chance: random.Random) -> str:
    """A file of Python's own library: real code, that no one here wrote."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return chance.choice(files).read_text(encoding="utf-8", errors="replace")[:60_000]


def enumeration(chance: random.Random) -> str:
    many = chance.randrange(20, 400)
    kinds = [
        [f"{index}. {chance.choice(WORDS)}" for index in range(many)],
        [f"item_{index}" for index in range(many)],
        [str(index) for index in range(many)],
        [f"- [ ] {' '.join(chance.choices(WORDS, k=3))}" for _ in range(many)],
    ]
    return chance.choice(["\n", ", "]).join(chance.choice(kinds))


def decorated(chance: random.Random) -> str:
    """Prose with rules, blank lines, dot leaders and deep indentation."""
    parts = []
    for _ in range(chance.randrange(3, 12)):
        parts.append(" ".join(chance.choices(WORDS, k=chance.randrange(5, 60))))
        parts.append(chance.choice("-=*_#~.") * chance.randrange(3, 160))
        parts.append("\n" * chance.randrange(0, 5) + " " * chance.randrange(0, 120) + chance.choice(WORDS))
        parts.append(chance.choice(["ha ", "very ", "no, ", "0, "]) * chance.randrange(2, 12))
    return "\n".join(parts)


def vector(chance: random.Random) -> str:
    """A one-hot vector of up to a hundred entries."""
    size = chance.randrange(3, 100)
    hot = chance.randrange(size)
    return json.dumps({"vector": [int(index == hot) for index in range(size)]})


SOUND = [json_array, same_objects, table, csv, code, enumeration, decorated, vector]


@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_no_alarm_on_sound_text_whole_or_cut_off(make):
    """0 of 40 of each kind: with 320 texts in all, a false alarm rate of 1% would pass 4 times in 100."""
    chance = random.Random(f"{SEED} {make.__name__}")
    alarms = []
    for _ in range(20):
        text = make(chance)
        for each in (text, text[: chance.randrange(len(text)) + 1]):
            if text_loop(each) or answer_loop(each):
                alarms.append((SEED, each[:200], text_loop(each)))
    assert alarms == []


def test_a_trap_that_counts_ngrams_does_fire_on_these():
    """The rule that this detector does not use: a piece of twelve characters that stands three times."""
    chance = random.Random(SEED)
    fired = 0
    for _ in range(50):
        text = json.dumps([{"status": value(chance), "retries": chance.randrange(9)} for _ in range(3)])
        fired += any(text.count(text[at : at + 12]) >= 3 for at in range(len(text) - 12))
    assert fired == 50


# --- loops ---------------------------------------------------------------------------------------------------


def prose(chance: random.Random, most: int) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randrange(1, most)))


def span(chance: random.Random) -> str:
    """What real loops repeat: words, sentences, lines, JSON members, white space, a single character."""
    return chance.choice([
        lambda: prose(chance, 3) + " ",
        lambda: prose(chance, 80) + ".\n",
        lambda: f'"{chance.choice(WORDS)}": "{prose(chance, 5)}", ',
        lambda: json.dumps({key: value(chance) for key in chance.sample(WORDS, k=3)}) + ",\n",
        lambda: chance.choice(["\n", " ", "\n  ", "\t\n", "\n\n   "]),
        lambda: chance.choice(string.punctuation + "a0é字😀"),
        lambda: "".join(chance.choices(string.ascii_letters, k=chance.randrange(1, 400))),
    ])()  # fmt: skip


def smallest(text: str) -> int:
    """The smallest period of a span by its definition: how far it can be turned before it is itself again."""
    return (text + text).index(text, 1)


def rotated(one: str, other: str) -> bool:
    return len(one) == len(other) and one in other + other


def test_loops_to_the_end_are_found_also_cut_off_in_mid_span():
    """300 of 300: span, count, start and length are those that were put in."""
    chance = random.Random(SEED)
    for _ in range(300):
        before, repeated = prose(chance, 100) + chance.choice([" ", "\n", ""]), span(chance)
        repeated = repeated[: smallest(repeated)]
        length = max(300, 3 * len(repeated)) + chance.randrange(600)
        text = before + (repeated * (length // len(repeated) + 1))[:length]
        loop = text_loop(text)
        assert loop is not None, (SEED, before, repeated)
        assert not loop.finished
        assert rotated(str(loop.span), repeated), (SEED, before, repeated, loop)
        # What stands before may happen to end as the span does: then the run begins with that.
        same = 0
        while same < len(before) and before[-1 - same] == repeated[-1 - same % len(repeated)]:
            same += 1
        assert (loop.start, loop.length) == (len(before) - same, length + same)
        assert loop.count == loop.length // len(repeated)


def test_a_loop_in_the_middle_is_found_when_it_is_long():
    chance = random.Random(SEED)
    for _ in range(100):
        repeated = span(chance)
        length = max(1000, 5 * len(repeated)) + len(repeated)
        before, after = prose(chance, 50) + "<", ">" + prose(chance, 50)
        loop = text_loop(before + (repeated * (length // len(repeated) + 1))[:length] + after)
        assert loop is not None, (SEED, repeated)
        assert loop.finished


def test_a_whitespace_loop_that_repeats_nothing_exactly():
    chance = random.Random(SEED)
    text = '{"a": 1,' + "".join(chance.choices("\n \t", k=400))
    loop = text_loop(text)
    assert loop is not None
    assert (loop.start, loop.length, loop.finished) == (8, 400, False)
    assert text_loop(text[:300]) is None


def test_a_loop_that_a_grammar_ends_is_found_in_its_value():
    text = json.dumps({"a": [{"reason": "it is, it is so, " + "and so on, " * 40}], "label": "b"})
    assert text_loop(text) is None
    loop = answer_loop(text)
    assert loop is not None
    assert rotated(str(loop.span), "and so on, ")
    assert (loop.count, loop.finished) == (40, False)


@pytest.mark.parametrize(("text", "alarm"), [
    # The bounds, as the docstring says them.
    ("x" * 299, False), ("x" * 300, True), ("x" * 999 + ".", False), ("x" * 1000 + ".", True),
    (("a" * 100 + "b") * 3, True), (("a" * 200 + "b") * 2, False), (("a" * 249 + "b") * 4 + ".", False),
    (("a" * 249 + "b") * 5 + ".", True), ("", False), ("\ud800" * 300, True),
])  # fmt: skip
def test_the_bounds(text, alarm):
    assert (text_loop(text) is not None) is alarm


def test_tokens():
    chance = random.Random(SEED)
    before = [chance.randrange(50_000) for _ in range(500)]
    assert token_loop(before) is None
    period = [60_001, 60_002, 60_003]
    loop = token_loop(before + (period * 40)[:110])
    assert loop is not None
    assert (loop.span, loop.count, loop.start, loop.length, loop.finished) == (tuple(period), 36, 500, 110, False)
    assert token_loop(before + period * 33) is None
    assert token_loop(before + period * 40 + before) is None
    loop = token_loop(before + period * 134 + before)
    assert loop is not None
    assert (loop.start, loop.count, loop.finished) == (500, 134, True)
    # Huge and negative ids are ids as well.
    assert token_loop([-1, 2**40] * 60) is not None


@pytest.mark.parametrize("kind", ["random", "json", "constant", "period", "fibonacci", "code"])
def test_time_is_nearly_linear(kind):
    """n log n pairs: 100,000 characters under 2 s of CPU, and ten times the text costs less than 40 times as much."""
    chance = random.Random(SEED)

    def make(size: int) -> str:
        if kind == "random":
            return "".join(chance.choices(string.ascii_lowercase, k=size))
        if kind == "json":
            return json.dumps([{"status": value(chance), "n": index} for index in range(size // 25)])[:size]
        if kind == "constant":
            return "a" * size
        if kind == "period":
            return ("".join(chance.choices(string.ascii_lowercase, k=997)) * (size // 997 + 1))[:size]
        if kind == "code":
            return (code(chance) * 9)[:size]
        one, two = "a", "ab"
        while len(two) < size:
            one, two = two, two + one
        return two[:size]

    def seconds(text: str) -> float:
        begun = time.process_time()
        text_loop(text)
        return time.process_time() - begun

    small, large = make(10_000), make(100_000)
    seconds(small)
    quick = min(seconds(small) for _ in range(3))
    slow = min(seconds(large) for _ in range(2))
    assert slow < 2, (kind, quick, slow)
    assert slow < 40 * max(quick, 0.01), (kind, quick, slow)
