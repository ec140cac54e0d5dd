"""The one table of a scoring run: a row per item x context x rotation x option, with token ids and log-probabilities.

Every metric is a function of it (`metrics`), so scores can be recomputed, or new scorers added, without the model.
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
    "answer": pl.Int64,  # index of the right option
    "option": pl.Int64,  # index in the item's own order; in the letter context, what the letter stands for
    "context": pl.String,  # question | premise | letter
    "rotation": pl.Int64,  # letter: option o stands under letter (o - rotation) mod n
    "token_ids": pl.List(pl.Int64),  # the scored tokens
    "logprobs": pl.List(pl.Float64),  # nats, one per scored token
    "logprob": pl.Float64,  # their sum
    "chars": pl.Int64,  # of the continuation without the space before it
    "bytes": pl.Int64,  # the same in UTF-8
    "tokens": pl.Int64,  # scored tokens
    "boundary": pl.String,  # clean | backed_off:<tokens of the prompt that are scored too>
    "truncated": pl.Int64,  # tokens cut from the left of the prompt
}


def build_table(
    contexts: Sequence[Context], encoded: Sequence[Encoded], logprobs: Sequence[Sequence[Sequence[float]]]
) -> pl.DataFrame:
    """The table of a run.

    Args:
        contexts, encoded: the same contexts as text and as tokens.
        logprobs: per context and continuation, the log-probability of every scored token (nats).

    Raises:
        RunError: when a log-probability is not finite, naming the item.
    """
    rows = []
    for context, tokens, scored in zip(contexts, encoded, logprobs, strict=True):
        for option, text, ids, values in zip(context.options, context.texts, tokens.ids, scored, strict=True):
            scored_ids = ids[tokens.start :]
            assert len(scored_ids) == len(values)
            if not all(map(math.isfinite, values)):
                raise RunError(
                    f"item {context.item.item_id}, {context.kind} context, option {text!r}: log-probability "
                    f"{next(value for value in values if not math.isfinite(value))}; the model's output is not finite"
                )
            rows.append(
                (
                    context.item.item_id,
                    context.item.task,
                    context.item.answer,
                    option,
                    context.kind,
                    context.rotation,
                    list(scored_ids),
                    list(values),
                    math.fsum(values),
                    len(text),
                    len(text.encode("utf-8")),
                    len(values),
                    tokens.boundary,
                    tokens.truncated,
                )
            )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")
