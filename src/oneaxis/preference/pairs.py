"""From rows of `pairs.parquet` to token ids: where the prompt ends and the response begins, in text and in tokens.

A plain pair is text: `prompt + chosen` is the exact string that is tokenized, with the tokenizer's own special tokens
(a BOS where it adds one). A conversational pair holds messages as JSON text; the chat template renders the prompt with
its generation prompt, and prompt + response without one, so that a response ends as the template ends a turn.

The boundary is a token boundary: the longest common prefix of the tokens of the prompt alone and the tokens of
prompt + response, over both responses, as TRL's `DPOTrainer` has it. Where a token spans the join, or where the
template renders the prompt alone differently, the response therefore begins a token or more earlier.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from oneaxis.errors import UserError


@dataclass(frozen=True)
class Sequence:
    """Token ids of prompt + response; the response begins at index `start`."""

    ids: list[int]
    start: int

    @property
    def response_tokens(self) -> int:
        """Number of tokens of the response."""
        return len(self.ids) - self.start

    @property
    def degenerate(self) -> bool:
        """No response token, or no token before it to predict it from."""
        return self.response_tokens < 1 or self.start < 1


def _rendered(row: Mapping[str, Any], tokenizer: Any) -> tuple[str, str, str]:
    """The full texts: prompt, prompt + chosen, prompt + rejected."""
    if not row["conversational"]:
        return row["prompt"], row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]
    if not tokenizer.chat_template:
        raise UserError(
            f"pairs.parquet: {row['pair_id']} is conversational and the model's tokenizer has no chat template; "
            "allowed: a model with a chat template, or pairs in plain text"
        )
    prompt = json.loads(row["prompt"])
    try:
        texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)]
        for key in ("chosen", "rejected"):
            texts.append(tokenizer.apply_chat_template(prompt + json.loads(row[key]), tokenize=False))
    except TemplateError as error:
        # Templates refuse a system prompt, or roles that do not take turns, in their own words.
        raise UserError(
            f"pairs.parquet: {row['pair_id']}: the model's chat template refuses it: {error}; allowed: messages as the "
            "template has them"
        ) from error
    return texts[0], texts[1], texts[2]


def common_prefix(first: Any, *others: Any) -> int:
    """Length of the longest prefix that `first` shares with every one of `others` (strings or lists)."""
    length = min(len(first), *(len(other) for other in others))
    for index in range(length):
        if any(other[index] != first[index] for other in others):
            return index
    return length


def render_pair(row: Mapping[str, Any], tokenizer: Any) -> tuple[str, str, str]:
    """A row of `pairs.parquet` as text: (prompt, chosen, rejected), with prompt + response the exact string.

    Where a chat template renders the prompt alone differently from the prompt followed by a response, the prompt ends
    where they part and the responses begin there.

    Raises:
        UserError: a conversational pair and a tokenizer without a chat template, or with one that refuses it.
    """
    prompt, chosen, rejected = _rendered(row, tokenizer)
    end = common_prefix(prompt, chosen, rejected)
    return prompt[:end], chosen[end:], rejected[end:]


def tokenize_pair(row: Mapping[str, Any], tokenizer: Any, *, append_eos: bool) -> tuple[Sequence, Sequence]:
    """A row of `pairs.parquet` as (chosen, rejected) token sequences that share one boundary.

    Args:
        row: conversational, prompt, chosen, rejected, pair_id.
        tokenizer: a transformers tokenizer.
        append_eos: end plain responses with the tokenizer's EOS text, unless they end so already. This is what TRL
            trains on. Conversational responses end as the template ends them, either way.

    Raises:
        UserError: a conversational pair and a tokenizer without a chat template, or with one that refuses it;
            `append_eos` and no EOS token.
    """
    prompt, chosen, rejected = _rendered(row, tokenizer)
    if append_eos and not row["conversational"]:
        eos = tokenizer.eos_token
        if not eos:
            raise UserError("the model's tokenizer has no eos_token, with which DPO ends plain responses; "
                            "allowed: a tokenizer with eos_token, or conversational pairs")  # fmt: skip
        chosen, rejected = (text if text.endswith(eos) else text + eos for text in (chosen, rejected))
    # A rendered template brings its own BOS.
    special = not row["conversational"]
    ids = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in (prompt, chosen, rejected)]
    start = common_prefix(*ids)
    return Sequence(ids[1], start), Sequence(ids[2], start)


def tokenize_continuation(prompt: str, text: str, tokenizer: Any) -> Sequence:
    """`text` as the assistant's answer to `prompt`: by the chat template where the tokenizer has one.

    Without a template the text follows on the next line. No end of turn is appended: the length-summed
    log-probability of the result is that of beginning the answer with exactly this text.
    """
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, special = rendered, False
    else:
        before, text, special = prompt.rstrip(), "\n" + text, True
    alone = tokenizer(before, add_special_tokens=special)["input_ids"]
    ids = tokenizer(before + text, add_special_tokens=special)["input_ids"]
    return Sequence(ids, common_prefix(alone, ids))
