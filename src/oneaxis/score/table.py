"""The one table of a scoring run: a row per item x context x rotation x variant x option, with texts, token ids and
log-probabilities.

Every metric is a function of it (`metrics`, `calibration`), so scores can be recomputed, or new scorers added, without
the model.
"""

import math
from collections.abc import Sequence

import polars as pl

from oneaxis.errors import RunError
from oneaxis.score.boundary import Encoded
from oneaxis.score.contexts import Context

SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "item_id": pl.String,
    "task": pl.String,
    "topic": pl.String,  # null where the item has none
    "answer": pl.Int64,  # index of the right option, the first where several are right
    "answers": pl.List(pl.Int64),  # all right options
    "option": pl.Int64,  # index in the item's own order; in a letter context, what the letter stands for
    "context": pl.String,  # question | premise | bos | letter | content_free
    "rotation": pl.Int64,  # letter: the list of options is begun at this place
    "variant": pl.Int64,  # premise: which one, the first is ranked; content_free: which text
    "letter": pl.Int64,  # letter, content_free: index of the letter, A is 0; else null
    "prompt": pl.String,  # as the model reads it, without BOS
    "continuation": pl.String,  # as it follows the prompt, with the space before it where there is one
    "token_ids": pl.List(pl.Int64),  # the scored tokens
    "logprobs": pl.List(pl.Float64),  # nats, one per scored token
    "logprob": pl.Float64,  # their sum
    "chars": pl.Int64,  # of the continuation without the space before it
    "bytes": pl.Int64,  # the same in UTF-8
    "tokens": pl.Int64,  # scored tokens
    "prompt_tokens": pl.Int64,  # tokens before the first that is scored, BOS too
    "boundary": pl.String,  # clean | backed_off:<tokens of the prompt that are scored too>
    "truncated": pl.Int64,  # tokens cut from the left of the prompt
}


def build_table(
    contexts: Sequence[Context], encoded: Sequence[Encoded], logprobs: Sequence[Sequence[Sequence[float]]]
) -> pl.DataFrame:
    """The table of a run, or of a part of it.

    Args:
        contexts, encoded: the same contexts as text and as tokens.
        logprobs: per context and continuation, the log-probability of every scored token (nats).

    Raises:
        RunError: when a log-probability is not finite, naming the item.
    """
    rows = []
    for context, tokens, scored in zip(contexts, encoded, logprobs, strict=True):
        item = context.item
        for place, (ids, values) in enumerate(zip(tokens.ids, scored, strict=True)):
            text = context.texts[place]
            scored_ids = ids[tokens.start :]
            assert len(scored_ids) == len(values)
            if not all(map(math.isfinite, values)):
                raise RunError(
                    f"item {item.item_id}, {context.kind} context, option {text!r}: log-probability "
                    f"{next(value for value in values if not math.isfinite(value))}; the model's output is not finite"
                )
            rows.append(
                (
                    item.item_id,
                    item.task,
                    item.topic,
                    item.answer,
                    list(item.answers),
                    context.options[place],
                    context.kind,
                    context.rotation,
                    context.variant,
                    place if context.by_letter else None,
                    context.prompt,
                    context.continuations[place],
                    list(scored_ids),
                    list(values),
                    math.fsum(values),
                    len(text),
                    len(text.encode("utf-8")),
                    len(values),
                    tokens.start,
                    tokens.boundary,
                    tokens.truncated,
                )
            )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")
