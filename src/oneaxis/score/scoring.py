"""A scoring run: items and a checkpoint to the table, what each scorer makes of it, and a summary.

`engine=transformers` scores in this process; `engine=vllm` asks a vLLM engine, in the same dtype.

The table is made part by part, each of a fixed number of items and scored by itself, so that a part is the same
whatever ran before it. Finished parts lie in a folder named by what decides them (checkpoint, items, settings); a run
that was killed finds them there and goes on, to the same bytes where the engine gives the same numbers twice
(`transformers`).
"""

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import read_json
from oneaxis.config.schema import Score, ServeSection
from oneaxis.errors import UserError
from oneaxis.installed import engine_device
from oneaxis.parts import all_parts, folder_digest, open_parts
from oneaxis.score.boundary import Encoded, Target, chat_renderer, encode_contexts, start_token, text_encoder
from oneaxis.score.contexts import Context, Item, Wording, all_contexts, usable
from oneaxis.score.metrics import flat_metrics, score_items, scorer_label, summarise
from oneaxis.score.table import SCHEMA, build_table

ITEMS_PER_PART = 256

Scorer = Callable[[Sequence[Target]], list[list[float]]]
"""Targets -> the log-probability of every token of each from its start on (nats)."""


@dataclass(frozen=True)
class Scored:
    """What a run gives: the table, one row per item, the summary, flat metrics, counts of what was dropped."""

    table: pl.DataFrame
    items: pl.DataFrame
    summary: dict[str, Any]
    metrics: dict[str, float]
    dropped: dict[str, int]
    parts: Path | None
    """The folder of the parts, to be removed when the table has been written."""


@dataclass(frozen=True)
class Engine:
    """A model that scores."""

    score: Scorer
    alone: Scorer
    """One sequence after the other, with nothing shared."""


def read_items(path: Path) -> list[Item]:
    """Items of `items.parquet`, in its order. Column `answers` may be missing: one answer each."""
    frame = pl.read_parquet(path)
    if "answers" not in frame.columns:
        frame = frame.with_columns(answers=pl.concat_list("answer"))
    columns = ["item_id", "task", "question", "options", "answer", "answers", "topic"]
    return [
        Item(item_id, task, question, tuple(options), answer, tuple(answers), topic)
        for item_id, task, question, options, answer, answers, topic in frame.select(columns).iter_rows()
    ]


def score_checkpoint(
    checkpoint: Path,
    items: Sequence[Item],
    settings: Score,
    serve: ServeSection,
    seed: int,
    *,
    log: Path,
    observed: dict[str, Any],
    parts: Path | None = None,
    items_per_part: int = ITEMS_PER_PART,
) -> Scored:
    """Score items with a checkpoint, by the engine that the settings name.

    Args:
        checkpoint: a model folder with its tokenizer.
        items: multiple-choice items.
        settings, serve, seed: sections of the config; `serve` is used by `engine=vllm` only.
        log: where a vLLM engine writes its words.
        observed: filled with times and token counts.
        parts: where finished parts are kept until the run is done; none: a killed run starts anew.
        items_per_part: how many items are scored between two parts.

    Raises:
        UserError: when no item can be scored, or the settings do not fit the tokenizer.
    """
    kept, dropped = usable(items)
    if not kept:
        raise UserError(f"artifacts/prepare_data/items.parquet: none of {len(items)} items can be scored: {dropped}")
    by_item, encoded = encode_items(checkpoint, kept, settings, serve, seed)
    # A tokenizer that lower-cases, or leaves bytes out, may read two options as one.
    differ = [len(set(own[0].ids)) == len(own[0].ids) for own in encoded]
    fits = [settings.overlong == "cut" or not any(tokens.truncated for tokens in own) for own in encoded]
    scorable = [fit and own for fit, own in zip(fits, differ, strict=True)]
    dropped["same_tokens"] = differ.count(False)
    dropped["overlong"] = differ.count(True) - scorable.count(True)
    if not any(scorable):
        raise UserError(
            f"artifacts/prepare_data/items.parquet: none of {len(items)} items can be scored: {dropped}; allowed: "
            "options that differ in tokens, and shorter items or score.overlong='cut'"
        )
    by_item, encoded = list(compress(by_item, scorable)), list(compress(encoded, scorable))
    folder = None
    if parts is not None:
        folder = parts / run_key(checkpoint, by_item, settings, serve, seed, items_per_part)
        open_parts(folder)
    with _engine(checkpoint, settings, serve, log, observed) as engine:
        table = _table(engine, by_item, encoded, folder, items_per_part, observed)
        difference = batch_difference(engine, table, by_item, encoded, settings.batch_check, seed)
    scored_items = score_items(table, prior_share=settings.letter.prior_share, seed=seed)
    tasks = summarise(table, scored_items)
    metrics = {**flat_metrics(table, tasks), "score/items_dropped": sum(dropped.values())}
    if difference:
        metrics["score/batch_difference_nats"] = difference["max_nats"]
    contexts = [context for own in by_item for context in own]
    for task, facts in tasks.items():
        facts["shown"] = shown(contexts, task)
        for name, result in facts["scorers"].items():
            result["scorer"] = scorer_label(name, settings.dtype)
    summary = {
        "engine": settings.engine,
        "dtype": settings.dtype,
        "seed": seed,
        "season": settings.season,
        "chat_template": settings.chat_template,
        "dropped": dropped,
        "batch_difference": difference,
        "tasks": tasks,
    }
    return Scored(table, scored_items, summary, metrics, dropped, folder)


def encode_items(
    checkpoint: Path, items: Sequence[Item], settings: Score, serve: ServeSection, seed: int
) -> tuple[list[list[Context]], list[list[Encoded]]]:
    """Every context of every item, as text and as tokens of the checkpoint's tokenizer."""
    from oneaxis.checkpoint.load import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    wording = Wording(
        templates=(settings.question_template, *settings.season_templates),
        season=settings.season,
        answer_prefix=settings.answer_prefix,
        chat=chat_renderer(tokenizer) if settings.chat_template else None,
    )
    by_item = all_contexts(
        items,
        wording=wording,
        premises=settings.premises,
        controls_per_task=settings.controls.items_per_task,
        letters_per_task=settings.letter.items_per_task,
        content_free=settings.letter.content_free,
        seed=seed,
    )
    encode, leading = text_encoder(tokenizer)
    flat = encode_contexts(
        [context for own in by_item for context in own],
        encode,
        leading,
        max_tokens(checkpoint, settings, serve),
        start=start_token(tokenizer),
        cut=settings.overlong == "cut",
    )
    rest = iter(flat)
    return by_item, [[next(rest) for _ in own] for own in by_item]


def max_tokens(checkpoint: Path, settings: Score, serve: ServeSection) -> int:
    """The longest sequence that can be scored.

    Its last token is scored, not read: one more than the positions fits. Some models name no limit. vLLM generates one
    token behind each sequence.
    """
    if settings.engine == "vllm":
        return serve.max_model_len - 1
    from oneaxis.checkpoint.load import read_config

    config = read_config(checkpoint)[0].get_text_config()
    positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize - 1
    return positions + 1


def run_key(
    checkpoint: Path,
    by_item: Sequence[Sequence[Context]],
    settings: Score,
    serve: ServeSection,
    seed: int,
    items_per_part: int,
) -> str:
    """What decides the parts, in one word: the checkpoint's files, every prompt and option, the settings, versions."""
    digest = hashlib.sha256(folder_digest(checkpoint).encode())
    for context in (context for own in by_item for context in own):
        item = context.item
        digest.update(repr((item.item_id, item.task, item.topic, item.answer, item.answers, context.kind,
                            context.rotation, context.variant, context.prompt, context.options,
                            context.continuations)).encode())  # fmt: skip
    decided = {
        "score": settings.model_dump(),
        "serve": serve.model_dump() if settings.engine == "vllm" else None,
        "seed": seed,
        "items_per_part": items_per_part,
        "columns": list(SCHEMA),
        "versions": [version("torch"), version("transformers")],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    digest.update(json.dumps(decided, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _table(
    engine: Engine,
    by_item: Sequence[Sequence[Context]],
    encoded: Sequence[Sequence[Encoded]],
    folder: Path | None,
    items_per_part: int,
    observed: dict[str, Any],
) -> pl.DataFrame:
    """The table, from the parts that are there and those that are scored now."""
    parts = (
        ([context for own in by_item[begin : begin + items_per_part] for context in own],
         [one for own in encoded[begin : begin + items_per_part] for one in own])
        for begin in range(0, len(by_item), items_per_part)
    )  # fmt: skip
    table, counts = all_parts(folder, parts, lambda part: _scored(engine, *part))
    observed["score"] |= counts
    return table


def _scored(engine: Engine, contexts: Sequence[Context], tokens: Sequence[Encoded]) -> pl.DataFrame:
    flat = engine.score(targets_of(contexts, tokens))
    return build_table(contexts, tokens, by_context(tokens, flat))


def batch_difference(
    engine: Engine,
    table: pl.DataFrame,
    by_item: Sequence[Sequence[Context]],
    encoded: Sequence[Sequence[Encoded]],
    count: int,
    seed: int,
) -> dict[str, Any] | None:
    """What the company of a batch did to scores: a sample is scored again alone, and the sums compared (nats).

    Args:
        engine: what scored the table.
        table: in the order of `by_item`.
        by_item, encoded: the table's contexts.
        count: sequences in the sample; 0: none, and null is returned.
        seed: draws the sample.
    """
    if not count:
        return None
    contexts = [context for own in by_item for context in own]
    targets = targets_of(contexts, [one for own in encoded for one in own])
    assert len(targets) == table.height
    places = sorted(random.Random(f"batch:{seed}").sample(range(len(targets)), min(count, len(targets))))
    alone = engine.alone([targets[place] for place in places])
    together = table["logprobs"].gather(places).to_list()
    apart = [abs(a - b) for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True)]
    sums = [abs(sum(one) - sum(other)) for one, other in zip(alone, together, strict=True)]
    return {"sequences": len(places), "max_nats": max(sums), "max_token_nats": max(apart)}


def targets_of(contexts: Sequence[Context], encoded: Sequence[Encoded]) -> list[Target]:
    """The sequences to score, in the order of contexts and their continuations.

    Those that begin alike share a group: an item's options, an item's rotations, a premise over all items.
    """
    targets = []
    for context, tokens in zip(contexts, encoded, strict=True):
        item = context.item
        own = context.prompt if context.kind in ("premise", "bos") else f"{item.task}:{item.item_id}:{context.variant}"
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


@contextmanager
def _engine(
    checkpoint: Path, settings: Score, serve: ServeSection, log: Path, observed: dict[str, Any]
) -> Iterator[Engine]:
    """The engine that the settings name, while it runs; `observed` is filled when it ends."""
    if settings.engine == "transformers":
        yield _transformers(checkpoint, settings, observed)
    else:
        with _vllm(checkpoint, settings, serve, log, observed) as engine:
            yield engine


def _transformers(checkpoint: Path, settings: Score, observed: dict[str, Any]) -> Engine:
    import torch

    from oneaxis.checkpoint.load import load_for_measuring
    from oneaxis.score.local import check_head, log_probabilities

    started = time.monotonic()
    model, _ = load_for_measuring(checkpoint, getattr(torch, settings.dtype))
    check_head(model)
    seen = {"load_s": round(time.monotonic() - started, 3), "score_s": 0.0, "tokens_computed": 0, "tokens_padded": 0,
            "tokens_naive": 0}  # fmt: skip
    observed["score"] = seen

    def score(targets: Sequence[Target]) -> list[list[float]]:
        begun = time.monotonic()
        flat, work = log_probabilities(model, targets, settings.batch_tokens)
        seen["score_s"] = round(seen["score_s"] + time.monotonic() - begun, 3)
        seen["tokens_computed"] += work.tokens
        seen["tokens_padded"] += work.padded_tokens
        seen["tokens_naive"] += work.naive_tokens
        seen["tokens_per_s"] = round(seen["tokens_computed"] / max(seen["score_s"], 1e-3), 1)
        return flat

    def alone(targets: Sequence[Target]) -> list[list[float]]:
        """No cache, no padding, no shared prefix: the model's own forward of each sequence."""
        head, scored = model.get_output_embeddings(), []
        with torch.inference_mode():
            for target in targets:
                ids = torch.tensor([target.ids], device=model.device)
                hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
                logprobs = torch.log_softmax(head(hidden[0, target.start - 1 :]).float(), dim=-1)
                picked = logprobs.gather(1, ids[0, target.start :, None])[:, 0]
                scored.append([float(value) for value in picked])
        return scored

    return Engine(score, alone)


@contextmanager
def _vllm(
    checkpoint: Path, settings: Score, serve: ServeSection, log: Path, observed: dict[str, Any]
) -> Iterator[Engine]:
    from oneaxis.score.remote import log_probabilities
    from oneaxis.serve import realised_config, serving
    from oneaxis.serve.preflight import cautions, cpu_flags

    ours = serve.kind == "vllm"
    on_cpu = ours and engine_device() == "cpu"
    for caution in cautions(read_json(checkpoint / "config.json"), cpu_flags=cpu_flags()) if on_cpu else []:
        raise UserError(f"score.engine='vllm': {caution}; allowed: transformers")
    engine_settings = serve.model_copy(update={"dtype": settings.dtype}) if ours else serve
    with serving(checkpoint, engine_settings, log_path=log, observed=observed) as running:
        if not ours:
            realised = realised_config(running, checkpoint)
            dtype = realised["resolved"].get("dtype")
            if dtype not in (None, settings.dtype):
                raise UserError(f"score.dtype={settings.dtype}: allowed: {dtype}, in which {running.base_url} computes")
            # What the endpoint does not tell, the reader has to know.
            observed["unverified"] = realised["unverified"]
        observed["score"] = {"score_s": 0.0}

        def score(targets: Sequence[Target]) -> list[list[float]]:
            begun = time.monotonic()
            flat = log_probabilities(running, targets, serve.max_num_seqs)
            observed["score"]["score_s"] = round(observed["score"]["score_s"] + time.monotonic() - begun, 3)
            return flat

        yield Engine(score, lambda targets: log_probabilities(running, targets, 1))
