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
    """Tokens beyond what the model takes: cut from the left of the prompt, or too many where nothing is cut."""

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


def chat_renderer(tokenizer: Any) -> Callable[[str], str]:
    """A user's message as the tokenizer's chat template has it, up to where the assistant's words begin.

    Raises:
        UserError: when the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise UserError("score.chat_template=true: the tokenizer has no chat template; allowed: false")

    def render(message: str) -> str:
        conversation = [{"role": "user", "content": message}]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))

    return render


def start_token(tokenizer: Any) -> int | None:
    """What stands before a text that has no prompt: BOS, else EOS, else nothing."""
    token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return None if token is None else int(token)


def encode_contexts(
    contexts: Sequence[Context],
    encode: Encode,
    leading: Sequence[int],
    max_tokens: int,
    *,
    start: int | None = None,
    cut: bool = True,
) -> list[Encoded]:
    """Each context in tokens.

    Args:
        contexts: what to encode.
        encode: texts to ids without special tokens.
        leading: ids before every text (BOS), once where a chat template has put them there already; kept when a prompt
            is cut.
        max_tokens: longest sequence, all told, that the model takes.
        start: what stands before the options where there is no prompt.
        cut: longer sequences lose the left of their prompt. Else they are left whole, and `truncated` says how many
            tokens are too many.

    Raises:
        UserError: when an option has no token of its own, or nothing stands before it.
    """
    prompts = encode([context.prompt for context in contexts])
    wholes = encode([context.prompt + text for context in contexts for text in context.continuations])
    encoded, position = [], 0
    for context, prompt in zip(contexts, prompts, strict=True):
        own = wholes[position : position + len(context.texts)]
        position += len(context.texts)
        before = tuple(leading)
        if context.kind == "bos":
            if start is None:
                raise UserError(
                    "score.controls.items_per_task: the tokenizer has neither BOS nor EOS to stand for no prompt; "
                    "allowed: 0"
                )
            before = (start,)
        elif before and all(tuple(ids[: len(before)]) == before for ids in (prompt, *own)):
            prompt, own = prompt[len(before) :], [ids[len(before) :] for ids in own]
        encoded.append(_encode(context, prompt, own, before, max_tokens, cut))
    return encoded


def _encode(
    context: Context,
    prompt: list[int],
    wholes: list[list[int]],
    leading: tuple[int, ...],
    max_tokens: int,
    cut: bool,
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
    lost = overflow if cut else 0
    left = shared - lost
    if left < 0 or left + len(leading) == 0:
        raise UserError(
            f"{where}: the longest option leaves no room for a prompt; allowed: {max_tokens} tokens together"
        )
    return Encoded(
        ids=tuple(leading + tuple(whole[lost:]) for whole in wholes),
        start=len(leading) + left,
        backed_off=len(prompt) - shared,
        truncated=overflow,
    )
