"""Degenerate loops in what a model wrote: a span that is repeated directly after itself, on and on.

What is looked for is *consecutive* repetition: a run, the longest stretch of the text that repeats its own first
`period` elements, the last time perhaps in part. Counting n-grams wherever they stand is something else, and fires on
each JSON array of three objects, which have their keys in common and not their values.

The rule, in characters (in tokens: the second number):

    unfinished   the run reaches the end of the text: three repeats or more, and 300 (100) long or more
    finished     something follows: five repeats or more, and 1000 (400) long or more

What stays below is no alarm: a rule of dashes, an indentation, a row of empty cells, some equal objects or rows, a
vector of zeros up to 300 zeros (`0, `), or 100 of them where the text was cut off. What is above is an alarm, also
where a person meant it: a thousand equal characters. White space counts as one and the same character, since a
whitespace loop may mix newlines and spaces. A loop that changes as it goes (a counter, a growing list) repeats
nothing and is not found.

A loop that a grammar ends (`maxLength`) is finished in the answer and unfinished in its own value: `answer_loop` looks
at the values of a JSON answer as well.

Runs are found by their squares: for each period p, a run of three periods or more holds a multiple i of p with
x[i:i+p] = x[i+p:i+2p]. That is n/1 + n/2 + ... + n/(n/3), so n log n pairs, compared by a hash of their text (sums of
x[i] b^i modulo 2^64) and, where the hash agrees, letter by letter; so no hash collision makes or hides a loop.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNFINISHED_REPEATS = 3
FINISHED_REPEATS = 5
UNFINISHED_CHARACTERS, FINISHED_CHARACTERS = 300, 1000
UNFINISHED_TOKENS, FINISHED_TOKENS = 100, 400
PAIRS = 1 << 20
"""Pairs that are compared at a time: bounds the memory to some 50 MB."""


@dataclass(frozen=True)
class Run:
    """A maximal stretch in which each element equals the one `period` before it."""

    start: int
    period: int
    length: int

    @property
    def repeats(self) -> int:
        """Whole repeats; a last one in part is left out."""
        return self.length // self.period


@dataclass(frozen=True)
class Loop:
    """A degenerate loop: `span` stands `count` times in a row from `start` on."""

    span: str | tuple[int, ...]
    """What is repeated: text, or token ids. White space that repeats nothing exactly: its first character."""
    count: int
    """Whole repeats."""
    start: int
    """Of the first repeat: an index into the text, or into the tokens."""
    length: int
    """Of all repeats, a last one in part included."""
    finished: bool
    """Whether something follows."""


def text_loop(text: str) -> Loop | None:
    """The longest degenerate loop of a text, or None; positions and lengths in characters (code points)."""
    if len(text) < UNFINISHED_CHARACTERS:
        return None
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    found = _worst(runs(codes), len(text), UNFINISHED_CHARACTERS, FINISHED_CHARACTERS)
    if found is None:
        blank = np.frombuffer(bytes(character.isspace() for character in text), dtype=np.uint8).astype(bool)
        spaces = [Run(start, 1, stop - start) for start, stop in _stretches(blank)]
        found = _worst(spaces, len(text), UNFINISHED_CHARACTERS, FINISHED_CHARACTERS)
    if found is None:
        return None
    span = text[found.start : found.start + found.period]
    return Loop(span, found.repeats, found.start, found.length, found.start + found.length < len(text))


def token_loop(tokens: Sequence[int]) -> Loop | None:
    """The longest degenerate loop of a sequence of token ids, or None; positions and lengths in tokens."""
    if len(tokens) < UNFINISHED_TOKENS:
        return None
    found = _worst(runs(np.asarray(tokens, dtype=np.int64)), len(tokens), UNFINISHED_TOKENS, FINISHED_TOKENS)
    if found is None:
        return None
    span = tuple(int(token) for token in tokens[found.start : found.start + found.period])
    return Loop(span, found.repeats, found.start, found.length, found.start + found.length < len(tokens))


def answer_loop(text: str) -> Loop | None:
    """The longest degenerate loop of an answer, or of a string in it where the answer is JSON; None without.

    The start of a loop in a string counts from the beginning of that string.
    """
    found = [text_loop(text)]
    try:
        stack = [json.loads(text)]
    except (ValueError, RecursionError):
        stack = []
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list):
            stack += each
        elif isinstance(each, str):
            found.append(text_loop(each))
    return max((loop for loop in found if loop is not None), key=lambda loop: loop.length, default=None)


def runs(values: NDArray[np.generic]) -> list[Run]:
    """All maximal runs of three repeats or more, each with its smallest period.

    Args:
        values: (n,) elements that are compared for equality.

    Returns:
        Runs by ascending period, and by start.
    """
    num = len(values)
    if num < 3:
        return []
    codes = _spread(values)
    with np.errstate(over="ignore"):
        powers = np.ones(num + 1, dtype=np.uint64)
        powers[1:] = np.uint64(0x9E3779B97F4A7C15)
        powers = np.cumprod(powers, dtype=np.uint64)
        sums = np.zeros(num + 1, dtype=np.uint64)
        np.cumsum(codes * powers[:num], dtype=np.uint64, out=sums[1:])
        found: list[Run] = []
        # Where the run ends that begins farthest left and covers an element; periods ascend, so a square that lies
        # within a run found before has that run's period (Fine and Wilf 1965).
        covered = np.zeros(num, dtype=np.int64)
        for starts, periods in _pairs(num):
            first = (sums[starts + periods] - sums[starts]) * powers[periods]
            same = first == sums[starts + 2 * periods] - sums[starts + periods]
            for start, period in zip(starts[same].tolist(), periods[same].tolist(), strict=True):
                if covered[start] < start + 2 * period:
                    run = _extend(codes, start, period)
                    if run.repeats >= 3:
                        found.append(run)
                        stop = run.start + run.length
                        piece = covered[run.start : stop]
                        np.maximum(piece, stop, out=piece)
    return found


def _pairs(num: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """All (i, p) with p ascending, i a multiple of p, and i + 2p within `num`, for p up to a third, in parts."""
    period, most = 1, num // 3
    while period <= most:
        counts, last = 0, period
        while last <= most and (counts == 0 or counts + (num // last - 1) <= PAIRS):
            counts += num // last - 1
            last += 1
        periods = np.arange(period, last, dtype=np.int64)
        each = num // periods - 1
        repeated = np.repeat(periods, each)
        index = np.arange(len(repeated), dtype=np.int64) - np.repeat(np.cumsum(each) - each, each)
        yield index * repeated, repeated
        period = last


def _extend(codes: NDArray[np.uint64], start: int, period: int) -> Run:
    """The maximal stretch of a period around the pair at `start`, compared element by element."""
    num = len(codes)
    right, step = start, 64
    while right + period < num:
        stop = min(right + step, num - period)
        differ = np.flatnonzero(codes[right:stop] != codes[right + period : stop + period])
        if len(differ):
            right += int(differ[0])
            break
        right, step = stop, step * 2
    left, step = start, 64
    while left > 0:
        begin = max(left - step, 0)
        differ = np.flatnonzero(codes[begin:left] != codes[begin + period : left + period])
        if len(differ):
            left = begin + int(differ[-1]) + 1
            break
        left, step = begin, step * 2
    return Run(left, period, right + period - left)


def _spread(values: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Elements as well mixed 64-bit numbers (splitmix64, one to one), for the hash."""
    mixed = values.astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        mixed = mixed + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Begin and end of each stretch of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _worst(found: Sequence[Run], num: int, unfinished: int, finished: int) -> Run | None:
    """The longest run that is an alarm; of equally long ones that with the smallest period, then the first."""
    alarms = []
    for run in found:
        last = run.start + run.length == num
        least, repeats = (unfinished, UNFINISHED_REPEATS) if last else (finished, FINISHED_REPEATS)
        if run.length >= least and run.repeats >= repeats:
            alarms.append(run)
    return min(alarms, key=lambda run: (-run.length, run.period, run.start), default=None)
