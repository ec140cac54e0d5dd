"""Ask the engine every document, part by part, so that a run that was killed goes on, and keep all that it said.

A part is a fixed number of documents, asked as one batch (`oneaxis.sample.ask`): the requests run in the order of the
list, beside the same others whenever they are asked again. With `first: reasoning` a part is two batches: free answers,
then the requests that put them into the form.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from tqdm import tqdm

from oneaxis.config.schema import ExtractDocuments, Serve
from oneaxis.data.sample import digest
from oneaxis.errors import RunError, UserError
from oneaxis.parts import all_parts, engine_and_cores, folder_digest, open_parts
from oneaxis.sample.ask import ask_together, for_asking, read_events
from oneaxis.structured.documents import Document
from oneaxis.structured.masses import FOLDER, MASK, PROCESSOR, REQUEST, SCHEMA, WHITESPACE, Kept, read_masses
from oneaxis.structured.prompts import formatting_messages, messages_of, reasoning_messages, schema_of

if TYPE_CHECKING:
    # Loaded by the engine by its name: what it does decides the answers too.
    from oneaxis.structured import processor  # noqa: F401

PER_PART = 64
"""Documents asked at once, each with a connection of its own."""
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""On a GPU vLLM 0.32 may run its second model runner, which takes processors of another kind, and calls them after the
penalties. Set for every grammar alike, so that nothing else differs between them."""
OF_THE_STAGE = ("scheduling_policy", "logits_processors", "additional_config", "structured_outputs_config")
"""Arguments of the engine that this stage sets."""

RAW = pl.Schema(
    {
        "document_id": pl.String(),
        "condition": pl.String(),
        "prompt_tokens": pl.Int64(),
        "reasoning": pl.String(),
        "reasoning_tokens": pl.Int64(),
        "text": pl.String(),
        "finished": pl.Boolean(),
        "token_ids": pl.List(pl.Int64()),
        "logprobs": pl.List(pl.Float64()),
        "kept": pl.List(pl.Float64()),
        "kept_at_one": pl.List(pl.Float64()),
        "moved": pl.List(pl.Boolean()),
    }
)
"""One row an answer. Lists have one entry a generated token, the one that ended it among them: the log-probability of
the token itself at temperature 1 (with `grammar: engine` after the mask, else before it), and what the processor saw;
null where it saw nothing."""


@dataclass(frozen=True)
class Said:
    """One answer as the engine gave it."""

    text: str
    finished: bool
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def read_said(stream: bytes) -> Said:
    """A whole answer with its token ids and their log-probabilities, from its server-sent events.

    Raises:
        RunError: as `read_events`, and when tokens and log-probabilities do not agree in number.
    """
    answer = read_events(stream)
    ids: list[int] = []
    logprobs: list[float] = []
    for event in stream.split(b"\n\n"):
        data = event.removeprefix(b"data:").strip()
        if not event.startswith(b"data:") or data == b"[DONE]":
            continue
        for choice in json.loads(data).get("choices", []):
            ids += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    if not len(ids) == len(logprobs) == answer.tokens:
        raise RunError(f"an answer of {answer.tokens} tokens came with {len(ids)} token ids and {len(logprobs)} "
                       "log-probabilities")  # fmt: skip
    return Said(answer.text, answer.finished, tuple(ids), tuple(logprobs))


# --- what is asked ----------------------------------------------------------------------------------------------------


class Prompter:
    """Conversations to tokens, as the model is given them."""

    def __init__(self, tokenizer: Any, settings: ExtractDocuments) -> None:
        """Raises UserError where conversations are asked for and there is no chat template."""
        if settings.chat_template and not tokenizer.chat_template:
            raise UserError("extract.chat_template=true: the model's tokenizer has no chat template; allowed: false")
        self._tokenizer, self._settings = tokenizer, settings

    def ids(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation, up to where the assistant's words begin."""
        if self._settings.chat_template:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return tuple(self._tokenizer("\n\n".join(each["content"] for each in messages) + "\n")["input_ids"])

    def first(self, document: Document) -> tuple[int, ...]:
        """The first request, or the only one."""
        if self._settings.first == "reasoning":
            return self.ids(reasoning_messages(document))
        return self.ids(messages_of(document, self._settings))

    def second(self, document: Document, reasoning: str) -> tuple[int, ...]:
        """The request that puts a free answer into the form."""
        return self.ids(formatting_messages(document, self._settings, reasoning))

    def tokens_needed(self, document: Document) -> int:
        """The most tokens that a request for this document takes, its answer included."""
        prompt = self.first(document) if self._settings.first == "json" else self.second(document, "")
        return len(prompt) + self._settings.tokens_beside_prompt(len(document.rows))


def answer_tokens(document: Document, settings: ExtractDocuments) -> int:
    """The token limit of the answer in JSON."""
    return settings.answer_tokens(len(document.rows))


def fitting(
    documents: Sequence[Document], prompter: Prompter, settings: ExtractDocuments, serve: Serve
) -> tuple[list[Document], dict[str, int]]:
    """The documents that fit the engine with their answers, and how many of each condition do not.

    A record of which one rendering does not fit is left out in both.

    Raises:
        UserError: none of a condition fits.
    """
    too_long = {each.document_id for each in documents if prompter.tokens_needed(each) > serve.max_model_len}
    kept = [each for each in documents if each.document_id not in too_long]
    left_out = Counter(each.condition for each in documents) - Counter(each.condition for each in kept)
    for condition, count in left_out.items():
        if not any(each.condition == condition for each in kept):
            most = max(prompter.tokens_needed(each) for each in documents if each.condition == condition)
            raise UserError(f"serve.max_model_len={serve.max_model_len}: none of the {count} documents of condition "
                            f"{condition} fits with its answer; allowed: {most} and up, or smaller extract.lengths, "
                            "extract.max_tokens or extract.row_tokens")  # fmt: skip
    return kept, dict(left_out)


def check_extract_args(serve: Serve) -> None:
    """Refuse arguments of the engine that this stage has to set.

    Raises:
        UserError: naming the key, its value and what is allowed.
    """
    for name in OF_THE_STAGE:
        if name in serve.engine_args:
            raise UserError(f"serve.engine_args.{name}={serve.engine_args[name]!r}: stage extract sets it; allowed: "
                            "leave the key out, or extract=none")  # fmt: skip


# --- the engine -------------------------------------------------------------------------------------------------------


def engine_settings(serve: Serve, settings: ExtractDocuments, masses: Path) -> Serve:
    """The section `serve` with what the grammar needs; a grammar of the engine's own needs no processor."""
    serve = for_asking(serve, drawn=settings.temperature > 0)
    own: dict[str, Any] = {}
    if settings.grammar == "engine":
        own["structured_outputs_config"] = {
            "backend": "xgrammar",
            "disable_any_whitespace": settings.whitespace == "compact",
        }
    else:
        own |= {"logits_processors": [PROCESSOR], "additional_config": {FOLDER: str(masses)}}
    return serve.model_copy(update={"engine_args": {**serve.engine_args, **own}})


@contextmanager
def started(
    checkpoint: Path, serve: Serve, settings: ExtractDocuments, *, masses: Path, log: Path, observed: dict[str, Any]
) -> Iterator[Any]:
    """The engine of this stage while it runs, with an empty folder for what its processor sees.

    Raises:
        UserError, RunError: as `running_engine`.
    """
    from oneaxis.serve import running_engine

    check_extract_args(serve)
    shutil.rmtree(masses, ignore_errors=True)
    masses.mkdir(parents=True)
    with running_engine(
        checkpoint, engine_settings(serve, settings, masses), log_path=log, observed=observed, environment=ENVIRONMENT
    ) as engine:
        yield engine


def ask_documents(
    documents: Sequence[Document],
    prompter: Prompter,
    settings: ExtractDocuments,
    *,
    seed: int,
    folder: Path,
    masses: Path,
    engine: Callable[[], AbstractContextManager[Any]],
    observed: dict[str, Any],
) -> pl.DataFrame:
    """A table of RAW, one row a document, in their order.

    Args:
        folder: of this run's parts (`parts_folder`). masses: where the processor writes.
        engine: starts the engine; called only when a part is missing.
        observed: gets `parts` and `parts_found`.

    Raises:
        RunError: from the engine.
    """
    open_parts(folder)
    parts = [documents[begin : begin + PER_PART] for begin in range(0, len(documents), PER_PART)]
    with ExitStack() as until_done:
        progress = until_done.enter_context(tqdm(total=len(documents), desc="extract", unit="document"))
        running = cache(lambda: until_done.enter_context(engine()))
        table, counts = all_parts(
            folder, parts, lambda part: _ask_part(running(), part, prompter, settings, seed, masses, progress), progress
        )
    observed.update(counts)
    return table


def _ask_part(
    engine: Any,
    part: Sequence[Document],
    prompter: Prompter,
    settings: ExtractDocuments,
    seed: int,
    masses: Path,
    progress: "tqdm[Any]",
) -> pl.DataFrame:
    prompts = [prompter.first(document) for document in part]
    reasoning: list[Said | None] = [None] * len(part)
    if settings.first == "reasoning":
        with tqdm(total=len(part), desc="reasoning", unit="document", leave=False) as thinking:
            bodies = [
                _body(engine, ids, document, place, settings, seed, settings.reasoning_tokens)
                for place, (ids, document) in enumerate(zip(prompts, part, strict=True))
            ]
            free = ask_together(engine, bodies, read_said, progress=thinking)
        reasoning = list(free)
        prompts = [prompter.second(document, said.text) for document, said in zip(part, free, strict=True)]
    names = [f"{document.document_id}.{document.condition}" for document in part]
    bodies = [
        _body(engine, ids, document, place, settings, seed, answer_tokens(document, settings))
        | _constraint(document, settings, names[place])
        for place, (ids, document) in enumerate(zip(prompts, part, strict=True))
    ]
    answers = ask_together(engine, bodies, read_said, progress=progress)
    seen = read_masses(masses, names)
    rows = []
    for document, name, prompt, thought, said in zip(part, names, prompts, reasoning, answers, strict=True):
        kept: list[Kept | None] = [seen[name].get(position) for position in range(len(said.token_ids))]
        rows.append((
            document.document_id, document.condition, len(prompt),
            thought.text if thought else None, len(thought.token_ids) if thought else 0,
            said.text, said.finished, list(said.token_ids), list(said.logprobs),
            [each and each.kept for each in kept], [each and each.at_one for each in kept],
            [each and each.moved for each in kept],
        ))  # fmt: skip
    return pl.DataFrame(rows, schema=RAW, orient="row")


def _body(
    engine: Any, ids: Sequence[int], document: Document, place: int, settings: ExtractDocuments, seed: int, limit: int
) -> dict[str, Any]:
    """A request without a grammar. The engine's own defaults for a model are turned off."""
    drawn = digest("extract", str(seed), document.document_id, document.condition)
    return {
        "model": engine.model_name,
        "prompt": list(ids),
        "seed": int(drawn[:8], 16) % 2**31,
        "priority": place,
        "max_tokens": limit,
        "temperature": settings.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": settings.frequency_penalty,
        "presence_penalty": settings.presence_penalty,
        "repetition_penalty": settings.repetition_penalty,
        "add_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _constraint(document: Document, settings: ExtractDocuments, name: str) -> dict[str, Any]:
    """What a request carries of its grammar."""
    schema = schema_of(document, settings)
    if settings.grammar == "engine":
        return {"structured_outputs": {"json": schema}}
    mask = int(settings.grammar == "processor")
    return {"vllm_xargs": {REQUEST: name, SCHEMA: json.dumps(schema), WHITESPACE: settings.whitespace, MASK: mask}}


def parts_folder(
    above: Path,
    checkpoint: Path,
    documents: Sequence[Document],
    prompter: Prompter,
    settings: ExtractDocuments,
    serve: Serve,
    *,
    seed: int,
) -> Path:
    """Where the parts of this run lie, by what decides them."""
    named = hashlib.sha256(folder_digest(checkpoint).encode())
    for document in documents:
        asked = (document.document_id, document.condition, prompter.first(document), schema_of(document, settings))
        named.update(repr(asked).encode())
    decided = {
        "seed": seed,
        "extract": settings.model_dump(),
        "serve": serve.model_dump(exclude={"port", "start_timeout_s", "max_restarts"}),
        "per_part": PER_PART,
        "columns": list(RAW),
        **engine_and_cores("xgrammar"),
    }
    named.update(json.dumps(decided, sort_keys=True).encode())
    return above / named.hexdigest()[:16]
