"""Where a prompt ends and its continuation begins, in tokens.

The text that is scored is prompt + continuation, encoded whole. Its prompt part is the longest prefix of tokens that it
shares with the prompt encoded alone; where the tokenizer merges across the boundary, that prefix is shorter than the
prompt, and the score starts earlier. All continuations of one context start at the same token, the earliest that any
of them needs: else one option would also pay for the end of the prompt, and its rivals would not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oneaxis.errors import UserError
from oneaxis.score.contexts import Context

Encode = Callable[[list[str]], list[list[int]]]
"""Texts -> token ids without special tokens."""


@dataclass(frozen=True)
class Encoded:
    """A context in tokens: one sequence per continuation; `ids[i][start:]` is what is scored."""

    ids: tuple[tuple[int, ...], ...]
    start: int
    backed_off: int
    """Tokens of the prompt that are scored with the continuation, since the tokenizer merges across the boundary."""
    truncated: int
    """Tokens cut from the left of the prompt, to fit the model."""

    @property
    def boundary(self) -> str:
        """As the table has it: `clean` or `backed_off:<tokens>`."""
        return f"backed_off:{self.backed_off}" if self.backed_off else "clean"


@dataclass(frozen=True)
class Target:
    """A sequence whose tokens from `start` on are scored; sequences of one `group` are expected to begin alike."""

    group: str
    ids: tuple[int, ...]
    start: int


def text_encoder(tokenizer: Any) -> tuple[Encode, tuple[int, ...]]:
    """The tokenizer without its special tokens, and the special tokens that it puts before a text (BOS, mostly).

    What it puts after a text (EOS) is no part of an unfinished prompt, and is left away.
    """

    def encode(texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return encoded

    plain = encode(["A"])[0]
    special = tokenizer("A", add_special_tokens=True)["input_ids"]
    for offset in range(len(special) - len(plain) + 1):
        if special[offset : offset + len(plain)] == plain:
            return encode, tuple(special[:offset])
    raise UserError(f"the tokenizer encodes 'A' as {plain} without special tokens and as {special} with them")


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all sequences share."""
    for index, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return index
    return min(map(len, sequences))


def encode_contexts(
    contexts: Sequence[Context], encode: Encode, leading: Sequence[int], max_tokens: int
) -> list[Encoded]:
    """Each context in tokens.

    Args:
        contexts: what to encode.
        encode: texts to ids without special tokens.
        leading: ids before every text (BOS); kept when a prompt is truncated.
        max_tokens: longest sequence, all told, that the model takes.
    """
    prompts = encode([context.prompt for context in contexts])
    wholes = encode([context.prompt + text for context in contexts for text in context.continuations])
    encoded, position = [], 0
    for context, prompt in zip(contexts, prompts, strict=True):
        count = len(context.texts)
        encoded.append(_encode(context, prompt, wholes[position : position + count], tuple(leading), max_tokens))
        position += count
    return encoded


def _encode(
    context: Context, prompt: list[int], wholes: list[list[int]], leading: tuple[int, ...], max_tokens: int
) -> Encoded:
    where = f"item {context.item.item_id}, {context.kind} context"
    shared = common_prefix([prompt, *wholes])
    for whole, text in zip(wholes, context.texts, strict=True):
        if len(whole) == shared:
            raise UserError(
                f"{where}: option {text!r} adds no token of its own; allowed: text that the tokenizer keeps"
            )
    if shared + len(leading) == 0:
        raise UserError(f"{where}: prompt {context.prompt!r} leaves no token before the options; allowed: a longer one")
    overflow = max(0, len(leading) + max(map(len, wholes)) - max_tokens)
    left = shared - overflow
    if left < 0 or left + len(leading) == 0:
        raise UserError(
            f"{where}: the longest option leaves no room for a prompt; allowed: {max_tokens} tokens together"
        )
    return Encoded(
        ids=tuple(leading + tuple(whole[overflow:]) for whole in wholes),
        start=len(leading) + left,
        backed_off=len(prompt) - shared,
        truncated=overflow,
    )
