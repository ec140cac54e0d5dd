"""A scoring run: items and a checkpoint to the table, what each scorer makes of it, and a summary.

`engine=transformers` scores in this process; `engine=vllm` asks a vLLM engine, in the same dtype.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.config.schema import Score, Serve
from oneaxis.errors import UserError
from oneaxis.score.boundary import Encoded, Target, encode_contexts, text_encoder
from oneaxis.score.contexts import Context, Item, all_contexts, usable
from oneaxis.score.metrics import flat_metrics, score_items, summarise
from oneaxis.score.table import build_table


@dataclass(frozen=True)
class Scored:
    """What a run gives: the table, one row per item, the summary, flat metrics, counts of what was dropped."""

    table: pl.DataFrame
    items: pl.DataFrame
    summary: dict[str, Any]
    metrics: dict[str, float]
    dropped: dict[str, int]


def read_items(path: Path) -> list[Item]:
    """Items of `items.parquet`, in its order."""
    frame = pl.read_parquet(path, columns=["item_id", "task", "question", "options", "answer"])
    return [Item(row[0], row[1], row[2], tuple(row[3]), row[4]) for row in frame.iter_rows()]


def score_checkpoint(
    checkpoint: Path,
    items: Sequence[Item],
    settings: Score,
    serve: Serve,
    seed: int,
    *,
    log: Path,
    observed: dict[str, Any],
) -> Scored:
    """Score items with a checkpoint, by the engine that the settings name.

    Args:
        checkpoint: a model folder with its tokenizer.
        items: multiple-choice items.
        settings, serve, seed: sections of the config; `serve` is used by `engine=vllm` only.
        log: where a vLLM engine writes its words.
        observed: filled with times and token counts.
    """
    kept, dropped = usable(items)
    if not kept:
        raise UserError(f"artifacts/prepare_data/items.parquet: none of {len(items)} items can be scored: {dropped}")
    contexts = all_contexts(
        kept,
        template=settings.question_template,
        premises=settings.premises,
        letter_items_per_task=settings.letter.items_per_task,
        seed=seed,
    )
    if settings.engine == "transformers":
        encoded, logprobs = _by_transformers(checkpoint, contexts, settings, observed)
    else:
        encoded, logprobs = _by_vllm(checkpoint, contexts, settings, serve, log, observed)
    table = build_table(contexts, encoded, logprobs)
    scored_items = score_items(table)
    tasks = summarise(table, scored_items)
    metrics = {**flat_metrics(table, tasks), "score/items_dropped": sum(dropped.values())}
    for task, facts in tasks.items():
        facts["shown"] = shown(contexts, task)
        for name, result in facts["scorers"].items():
            result["scorer"] = f"{name} ({settings.dtype})"
    summary = {"engine": settings.engine, "dtype": settings.dtype, "seed": seed, "dropped": dropped, "tasks": tasks}
    return Scored(table, scored_items, summary, metrics, dropped)


def targets_of(contexts: Sequence[Context], encoded: Sequence[Encoded]) -> list[Target]:
    """The sequences to score, in the order of contexts and their continuations.

    Those that begin alike share a group: an item's options, an item's rotations, a premise over all items.
    """
    targets = []
    for context, tokens in zip(contexts, encoded, strict=True):
        own = context.prompt if context.kind == "premise" else f"{context.item.task}:{context.item.item_id}"
        group = f"{context.kind}:{own}:{tokens.truncated and context.rotation + 1}"
        targets += [Target(group, ids, tokens.start) for ids in tokens.ids]
    return targets


def by_context(encoded: Sequence[Encoded], flat: Sequence[list[float]]) -> list[list[list[float]]]:
    """Log-probabilities of `targets_of`, grouped again by context."""
    nested, position = [], 0
    for tokens in encoded:
        nested.append(list(flat[position : position + len(tokens.ids)]))
        position += len(tokens.ids)
    return nested


def shown(contexts: Sequence[Context], task: str) -> dict[str, dict[str, Any]]:
    """The first prompt of a task in each context, and its continuations, as the model reads them."""
    examples: dict[str, dict[str, Any]] = {}
    for context in contexts:
        if context.item.task == task and context.kind not in examples:
            examples[context.kind] = {"prompt": context.prompt, "continuations": list(context.continuations)}
    return examples


def _by_transformers(
    checkpoint: Path, contexts: Sequence[Context], settings: Score, observed: dict[str, Any]
) -> tuple[list[Encoded], list[list[list[float]]]]:
    import torch

    from oneaxis.checkpoint.load import load_for_measuring
    from oneaxis.score.local import log_probabilities

    started = time.monotonic()
    model, tokenizer = load_for_measuring(checkpoint, getattr(torch, settings.dtype))
    encode, leading = text_encoder(tokenizer)
    # The last token of a sequence is scored, not read: one more than the positions fits. Some models name no limit.
    positions = getattr(model.config, "max_position_embeddings", sys.maxsize - 1)
    encoded = encode_contexts(contexts, encode, leading, positions + 1)
    loaded = time.monotonic()
    flat, work = log_probabilities(model, targets_of(contexts, encoded), settings.batch_tokens)
    seconds = time.monotonic() - loaded
    observed["score"] = {
        "load_s": round(loaded - started, 3),
        "score_s": round(seconds, 3),
        "tokens_per_s": round(work.tokens / seconds, 1),
        "tokens_computed": work.tokens,
        "tokens_padded": work.padded_tokens,
        "tokens_naive": work.naive_tokens,
    }
    return encoded, by_context(encoded, flat)


def _by_vllm(
    checkpoint: Path, contexts: Sequence[Context], settings: Score, serve: Serve, log: Path, observed: dict[str, Any]
) -> tuple[list[Encoded], list[list[list[float]]]]:
    from oneaxis.checkpoint.load import load_tokenizer
    from oneaxis.score.remote import log_probabilities
    from oneaxis.serve import running_engine

    encode, leading = text_encoder(load_tokenizer(checkpoint))
    # One token is generated behind each sequence.
    encoded = encode_contexts(contexts, encode, leading, serve.max_model_len - 1)
    engine_settings = serve.model_copy(update={"dtype": settings.dtype})
    with running_engine(checkpoint, engine_settings, log_path=log, observed=observed) as engine:
        started = time.monotonic()
        flat = log_probabilities(engine, targets_of(contexts, encoded), serve.max_num_seqs)
        observed["score"] = {"score_s": round(time.monotonic() - started, 3)}
    return encoded, by_context(encoded, flat)
