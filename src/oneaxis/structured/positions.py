"""Which generated tokens carry the value of which field, and what the kept mass says of them.

Structure is forced: the braces, keys and commas of an answer lose mass on every request, for harmless reasons. So only
the tokens that overlap the characters of a value count (of a string those between its quotes).

A field's kept mass is the least over its value positions. Under 0.5 it is a guess: at some position of its value the
model would rather have said something that was not allowed.

The confidence of an enum value is its probability under the grammar, from the tokens that tell it from the other
values: that of the first one where that settles it, the product where values share their first tokens. What comes after
is forced and says nothing, and neither does a number that a model writes about itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oneaxis.structured.spans import Span

GUESS = 0.5
"""A value position that kept less than this is a guess."""


@dataclass(frozen=True)
class ValueMass:
    """The kept mass of one field."""

    tokens: int
    """Value positions whose mass is known."""
    first: float
    """At the first of them."""
    least: float
    """Over all of them."""
    moved: bool
    """At one of them the likeliest token of all was not allowed."""


def token_ends(tokenizer: Any, ids: Sequence[int], text: str) -> list[int] | None:
    """Per token the number of characters of `text` that it and those before it make; None where they do not.

    A token that holds half a character ends where the whole characters before it end.
    """
    ends: list[int] = []
    done = 0
    for count in range(1, len(ids) + 1):
        said = tokenizer.decode(list(ids[:count]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole = len(said.rstrip("\ufffd"))
        if not text.startswith(said[:whole]):
            return None
        done = max(done, whole)
        ends.append(done)
    return ends if done == len(text) else None


def positions_of(span: Span, ends: Sequence[int]) -> list[int]:
    """Indices of the tokens that overlap the characters of `span`."""
    found, begin = [], 0
    for index, end in enumerate(ends):
        if begin < span.end and end > span.start and end > begin:
            found.append(index)
        begin = end
    return found


def value_mass(
    positions: Sequence[int], kept: Sequence[float | None], moved: Sequence[bool | None]
) -> ValueMass | None:
    """What the positions of one value kept; None where none is known."""
    known = [index for index in positions if index < len(kept) and kept[index] is not None]
    values = [float(kept[index]) for index in known]  # type: ignore[arg-type]
    if not values:
        return None
    return ValueMass(len(values), values[0], min(values), any(bool(moved[index]) for index in known))


def enum_confidence(
    span: Span, text: str, values: Sequence[str], ends: Sequence[int], probabilities: Sequence[float | None]
) -> float | None:
    """The probability of the enum value at `span`, from the tokens that tell it from the others.

    Args:
        values: of the enum. probabilities: per token of the answer, after the mask; None where not known.

    Returns:
        None where the text at `span` is no value of the enum, or a probability that is needed is not known.
    """
    chosen = text[span.start : span.end]
    if chosen not in values or not span.closed:
        return None
    confidence, left = 1.0, set(values)
    # A value that another one begins with is told from it by its closing quote.
    for index in positions_of(Span(span.path, span.start, span.end + 1, True), ends):
        if len(left) == 1:
            break
        so_far = text[span.start : min(ends[index], span.end)]
        ended = ends[index] > span.end
        still = {value for value in left if (value == chosen if ended else value.startswith(so_far))}
        probability = probabilities[index]
        if still != left:
            if probability is None:
                return None
            confidence *= probability
        left = still
    return confidence


def shared_first_tokens(tokenizer: Any, values: Sequence[str], before: str) -> list[list[str]]:
    """Groups of enum values that begin with the same token after `before`; each of two values or more."""
    context = tokenizer(before, add_special_tokens=False)["input_ids"]
    groups: dict[tuple[int, ...], list[str]] = {}
    for value in values:
        ids = tokenizer(before + value, add_special_tokens=False)["input_ids"]
        common = 0
        while common < min(len(context), len(ids)) and context[common] == ids[common]:
            common += 1
        groups.setdefault(tuple(ids[: common + 1]), []).append(value)
    return [group for group in groups.values() if len(group) > 1]
