"""Responses to every prompt by the checkpoint's own engine, part by part, so that a run that was killed goes on.

A part is a fixed number of prompts with all their samples, asked as one batch (`ask`): its texts depend on nothing that
ran before it. Finished parts lie in a folder that is named by what decides them: the checkpoint, the prompts' tokens,
how is sampled, the engine's settings and versions. The rules are not among these: a rule that is changed reads the same
texts again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from oneaxis.config.schema import SamplePairs, Serve
from oneaxis.data.sample import digest
from oneaxis.errors import UserError
from oneaxis.load.draws import require_draws
from oneaxis.parts import all_parts, engine_and_cores, folder_digest, open_parts
from oneaxis.sample.ask import Ask, ask_all, for_asking
from oneaxis.sample.prompts import Prompt

REQUESTS_PER_PART = 256
"""In flight at once, each with a connection of its own."""

SCHEMA = pl.Schema(
    {
        "prompt_id": pl.String(),
        "sample": pl.Int64(),
        "seed": pl.Int64(),
        "text": pl.String(),
        "prompt_tokens": pl.Int64(),
        "tokens": pl.Int64(),
        "finished": pl.Boolean(),
    }
)
"""One row per response."""


@dataclass(frozen=True)
class Tokenized:
    """A prompt and the tokens that the model is given."""

    prompt: Prompt
    ids: tuple[int, ...]


def tokenize(prompts: Sequence[Prompt], tokenizer: Any, settings: SamplePairs) -> tuple[list[Tokenized], int]:
    """The prompts as training and scoring will see them, and how many were left out as too long.

    A conversation is rendered by the chat template, up to where the assistant's words begin; plain text gets the
    tokenizer's own special tokens.

    Raises:
        UserError: conversations and a tokenizer without a chat template; no prompt leaves room for a response.
    """
    if any(prompt.conversational for prompt in prompts) and not tokenizer.chat_template:
        raise UserError("sample.chat_template: the model's tokenizer has no chat template; allowed: "
                        "sample.chat_template=false with prompts in plain text")  # fmt: skip
    most = settings.engine.max_model_len - settings.max_tokens
    found = []
    for prompt in prompts:
        if prompt.conversational:
            text = tokenizer.apply_chat_template(json.loads(prompt.text), tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        found.append(Tokenized(prompt, tuple(ids)))
    kept = [each for each in found if 0 < len(each.ids) <= most]
    if not kept:
        raise UserError(f"sample.max_tokens={settings.max_tokens}: none of {len(prompts)} prompts is of 1 to {most} "
                        f"tokens (sample.engine.max_model_len={settings.engine.max_model_len}); allowed: shorter "
                        "prompts or responses, or a longer engine")  # fmt: skip
    return kept, len(found) - len(kept)


def seed_of(seed: int, prompt: Prompt, sample: int) -> int:
    """The seed of one response, from 0 to 2^31 - 1: of the run's seed, the prompt's text and the sample's number."""
    return int(digest("sample", str(seed), prompt.text, str(sample))[:8], 16) % 2**31


def check_sampling_args(settings: Serve) -> None:
    """Refuse arguments of the engine that cannot be, or that contradict how `ask` schedules.

    Raises:
        UserError: naming the key, its value and what is allowed.
    """
    from oneaxis.serve.command import check_contradictions, check_engine_args, engine_device, known_arguments

    with own_keys():
        check_engine_args(settings.engine_args, known_arguments())
        check_contradictions(for_asking(settings, drawn=True), engine_device())
    policy = settings.engine_args.get("scheduling_policy", "priority")
    if policy != "priority":
        raise UserError(f"sample.engine.engine_args.scheduling_policy={policy!r}: allowed: priority, by which equal "
                        "seeds give equal texts")  # fmt: skip


@contextmanager
def own_keys() -> Iterator[None]:
    """What the engine's management refuses by the keys of `serve`, by those of this section."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"\bserve(?=\.\w)", "sample.engine", str(error))) from error


def sample_responses(
    prompts: Sequence[Tokenized],
    settings: SamplePairs,
    *,
    seed: int,
    folder: Path,
    engine: Callable[[], AbstractContextManager[Any]],
    observed: dict[str, Any],
) -> pl.DataFrame:
    """A table of `SCHEMA`: `num_samples` responses to each prompt, in the order of prompts and samples.

    Args:
        folder: of this run's parts (`parts_folder`). engine: starts the engine; called only when a part is missing.
        observed: gets `parts` and `parts_found`.

    Raises:
        RunError: from the engine, or when its draws repeat whatever their seed.
    """
    per_part = max(1, REQUESTS_PER_PART // settings.num_samples)
    parts = [prompts[begin : begin + per_part] for begin in range(0, len(prompts), per_part)]
    open_parts(folder)
    with ExitStack() as until_done:
        progress = until_done.enter_context(
            tqdm(total=len(prompts) * settings.num_samples, desc="sample", unit="response")
        )

        @cache
        def running() -> Any:
            found = until_done.enter_context(engine())
            require_draws(found, prompts[0].ids, seed=seed)
            return found

        table, counts = all_parts(
            folder, parts, lambda part: _part(running(), part, settings, seed, progress), progress
        )
    observed.update(counts)
    return table


def _part(
    engine: Any, prompts: Sequence[Tokenized], settings: SamplePairs, seed: int, progress: "tqdm[Any]"
) -> pl.DataFrame:
    places = [(each, sample) for each in prompts for sample in range(settings.num_samples)]
    asks = [Ask(each.ids, seed_of(seed, each.prompt, sample)) for each, sample in places]
    answers = ask_all(engine, asks, temperature=settings.temperature, top_p=settings.top_p,
                      max_tokens=settings.max_tokens, progress=progress)  # fmt: skip
    rows = [
        (each.prompt.prompt_id, sample, ask.seed, answer.text, len(each.ids), answer.tokens, answer.finished)
        for (each, sample), ask, answer in zip(places, asks, answers, strict=True)
    ]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def parts_folder(
    above: Path, checkpoint: Path, prompts: Sequence[Tokenized], settings: SamplePairs, *, seed: int
) -> Path:
    """Where the parts of this run lie, by what decides them."""
    named = hashlib.sha256(folder_digest(checkpoint).encode())
    for each in prompts:
        named.update(repr((each.prompt.prompt_id, each.ids)).encode())
    decided = {
        "seed": seed,
        **{key: getattr(settings, key) for key in ("num_samples", "temperature", "top_p", "max_tokens")},
        "engine": settings.engine.model_dump(exclude={"port", "start_timeout_s", "max_restarts"}),
        "requests_per_part": REQUESTS_PER_PART,
        "columns": list(SCHEMA),
        **engine_and_cores(),
    }
    named.update(json.dumps(decided, sort_keys=True).encode())
    return above / named.hexdigest()[:16]


@contextmanager
def started(checkpoint: Path, settings: Serve, log: Path, observed: dict[str, Any]) -> Iterator[Any]:
    """The engine of this run, while it runs.

    Raises:
        UserError, RunError: as `running_engine`.
    """
    from oneaxis.serve import running_engine

    check_sampling_args(settings)
    with own_keys():
        settings = for_asking(settings, drawn=True)
    with own_keys(), running_engine(checkpoint, settings, log_path=log, observed=observed) as engine:
        yield engine
