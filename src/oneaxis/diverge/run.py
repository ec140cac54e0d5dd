"""The prompts, asked of an engine one at a time and many at a time, part by part, so that a killed run goes on.

A part is some of the prompts with all their repeats at one level, in an order of its own, so that the neighbours of a
request differ from one repeat to the next. The prefix cache is emptied before each part: within a part a prompt is
computed at first and found in the cache later, and what ran before has no share in it. Finished parts lie in a folder
that is named by what decides them, the session among it: a new `measure.session` asks again.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tqdm import tqdm

from oneaxis.artifacts import read_json, write_json
from oneaxis.config.schema import DivergeGreedy, ServeAttach, ServeSection
from oneaxis.diverge.ask import Ask, ask_all
from oneaxis.diverge.measure import LEVELS, OUTPUTS, PROMPTS, summarise, with_first_divergence
from oneaxis.errors import RunError, UserError
from oneaxis.parts import all_parts, engine_and_cores, folder_digest, open_parts
from oneaxis.serve import Endpoint, metric_total, realised_config

PROMPTS_PER_PART = 16
"""At least; more where so many at a time would not fill two rounds."""
REALISED = "realised.json"
COUNTERS = {
    "generated": "vllm:generation_tokens_total",
    "steps": "vllm:iteration_tokens_total_count",
    "cached": "vllm:prefix_cache_hits_total",
    "queried": "vllm:prefix_cache_queries_total",
}
SETTLE_S = 2.0
"""The server's counters lag behind its last answer by a moment."""


def check_length(settings: DivergeGreedy, max_model_len: int) -> None:
    """Refuse prompts and outputs that the engine could not take (a hand-edited `params.yaml`; else the schema does).

    Raises:
        UserError: with both lengths and the allowed one.
    """
    if said := settings.too_long(max_model_len):
        raise UserError(said)


def cut_prompts(text: np.ndarray, settings: DivergeGreedy, *, seed: int) -> dict[int, list[int]]:
    """Number -> token ids: pieces of the text in a drawn order, which overlap only where the text is too short.

    Raises:
        UserError: when the text has fewer places than prompts are asked for.
    """
    count, tokens = settings.prompts, settings.prompt_tokens
    draw = np.random.default_rng(seed)
    pieces, places = len(text) // tokens, len(text) - tokens + 1
    if pieces >= count:
        starts = draw.permutation(pieces)[:count] * tokens
    elif places >= count:
        starts = draw.permutation(np.linspace(0, places - 1, count).astype(int))
    else:
        raise UserError(f"diverge.prompts={count}, diverge.prompt_tokens={tokens}: the held-out text has {len(text)} "
                        f"tokens; allowed: fewer or shorter prompts, or a larger data.prose")  # fmt: skip
    return {number: text[start : start + tokens].tolist() for number, start in enumerate(starts)}


def parts_of(settings: DivergeGreedy, *, seed: int) -> list[tuple[str, int, list[Ask]]]:
    """Level, requests at a time, and the requests in the order in which they are sent; levels alternate."""
    size = max(PROMPTS_PER_PART, -(-2 * settings.concurrency // settings.repeats))
    found = []
    for begin in range(0, settings.prompts, size):
        numbers = range(begin, min(begin + size, settings.prompts))
        asks = [Ask(prompt, repeat) for repeat in range(settings.repeats) for prompt in numbers]
        for place, level in enumerate(LEVELS):
            order = np.random.default_rng([seed, begin, place]).permutation(len(asks))
            together = settings.concurrency if level == "loaded" else 1
            found.append((level, together, [asks[index] for index in order]))
    return found


def run_divergence(
    prompts: Mapping[int, Sequence[int]],
    settings: DivergeGreedy,
    checkpoint: Path,
    *,
    seed: int,
    folder: Path | None,
    engine: Callable[[], AbstractContextManager[Endpoint]],
    observed: dict[str, Any],
) -> tuple[pl.DataFrame, dict[str, Any], bool]:
    """A table of `OUTPUTS`, what the engine runs (`realised_config`), and whether its prefix cache was emptied.

    Args:
        folder: of this run's parts (`parts_folder`); None: nothing is kept. engine: starts the engine; called only when
            a part is missing.
        observed: gets `parts`, `parts_found`, and `tokens_per_s` of each level that was asked in this run.

    Raises:
        RunError: from the engine, or for a request that fails.
    """
    if folder:
        open_parts(folder)
    realised: dict[str, Any] | None = None
    emptied = True
    spent: dict[str, list[float]] = {}
    parts = parts_of(settings, seed=seed)
    with ExitStack() as until_done:
        total = sum(len(asks) for _, _, asks in parts)
        progress = until_done.enter_context(tqdm(total=total, desc="diverge", unit="output"))

        @cache
        def running() -> Endpoint:
            nonlocal realised
            found = until_done.enter_context(engine())
            realised = realised_config(found, checkpoint)
            if folder:
                write_json(folder / REALISED, realised)
            return found

        def asked(part: tuple[str, int, list[Ask]]) -> pl.DataFrame:
            nonlocal emptied
            level, together, asks = part
            emptied = empty_prefix_cache(running()) and emptied
            began = time.perf_counter()
            table = _part(running(), prompts, level, together, asks, settings.output_tokens, progress)
            took = spent.setdefault(level, [0.0, 0.0])
            took[0] += float(table["token_ids"].list.len().sum())
            took[1] += time.perf_counter() - began
            return table

        outputs, counts = all_parts(folder, parts, asked, progress)
    observed.update(counts)
    observed["tokens_per_s"] = {level: tokens / seconds for level, (tokens, seconds) in spent.items()}
    if realised is None:
        assert folder
        realised = read_json(folder / REALISED)
    return outputs, realised, emptied


def write_record(
    out: Path,
    table: pl.DataFrame,
    prompts: Mapping[int, Sequence[int]],
    realised: Mapping[str, Any],
    serve: ServeSection,
    *,
    emptied: bool,
) -> dict[str, Any]:
    """Write outputs.parquet, prompts.parquet, realised.json and summary.json to `out`; the summary.

    Args:
        table, realised, emptied: as `run_divergence` gives them.
    """
    ours = None if isinstance(serve, ServeAttach) else serve
    summary = summarise(
        table, max_num_seqs=ours.max_num_seqs if ours else None,
        prefix_caching=ours is not None and ours.prefix_caching,
        differences=["{key}: asked {asked}, runs {resolved}: {reason}".format(**each)
                     for each in realised["differences"]],
        emptied=emptied,
    )  # fmt: skip
    with_first_divergence(table).write_parquet(out / "outputs.parquet")
    asked = pl.DataFrame({"prompt": list(prompts), "token_ids": list(prompts.values())}, schema=PROMPTS)
    asked.write_parquet(out / "prompts.parquet")
    write_json(out / REALISED, realised)
    write_json(out / "summary.json", summary)
    return summary


def _part(
    engine: Endpoint,
    prompts: Mapping[int, Sequence[int]],
    level: str,
    together: int,
    asks: Sequence[Ask],
    max_tokens: int,
    progress: "tqdm[Any]",
) -> pl.DataFrame:
    before = _counters(engine)
    outputs = ask_all(engine, prompts, asks, concurrency=together, max_tokens=max_tokens, progress=progress)
    wanted = sum(len(output.token_ids) for output in outputs)
    gained = _gained(engine, before, wanted)
    rows = [
        (ask.prompt, level, together, ask.repeat, list(output.token_ids), output.finished,
         output.gaps and list(output.gaps), output.runners_up and list(output.runners_up),
         _ratio(gained, "generated", "steps"), _ratio(gained, "cached", "queried"))
        for ask, output in zip(asks, outputs, strict=True)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=OUTPUTS, orient="row").sort("prompt", "repeat")


def empty_prefix_cache(engine: Endpoint) -> bool:
    """Empty it; False where the server does not offer that, or does not do it."""
    try:
        answer = engine.post("/reset_prefix_cache", {})
    except RunError:
        engine.require_alive()
        return False
    return bool(answer.get("success", True))


def _counters(engine: Endpoint) -> dict[str, float]:
    """`COUNTERS` as they stand; without those that the server does not have."""
    try:
        page = engine.metrics()
    except RunError:
        engine.require_alive()
        return {}
    found = {}
    for name, metric in COUNTERS.items():
        try:
            found[name] = metric_total(page, metric)
        except KeyError:
            continue
    return found


def _gained(engine: Endpoint, before: Mapping[str, float], wanted: int) -> dict[str, float]:
    """What the counters gained, once the tokens of all outputs are among them."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = _counters(engine)
        gained = {name: value - before[name] for name, value in now.items() if name in before}
        if gained.get("generated", wanted) >= wanted or time.monotonic() > deadline:
            return gained
        time.sleep(0.05)


def _ratio(gained: Mapping[str, float], above: str, below: str) -> float | None:
    if above not in gained or below not in gained:
        return None
    return gained[above] / gained[below] if gained[below] else 0.0


def parts_folder(
    above: Path,
    checkpoints: Sequence[Path],
    prompts: Mapping[int, Sequence[int]],
    settings: DivergeGreedy,
    serve: ServeSection,
    *,
    drawn: Mapping[str, Any],
) -> Path | None:
    """Where the parts of this run lie, by what decides them; None with a server of another's, which may have changed.

    Args:
        checkpoints: of the served model, and of a draft. drawn: seed, session and repetition.
    """
    if serve.kind == "attach":
        return None
    decided = {
        "checkpoints": [folder_digest(checkpoint) for checkpoint in checkpoints],
        "prompts": [list(ids) for ids in prompts.values()],
        "diverge": settings.model_dump(),
        "serve": serve.model_dump(exclude={"port", "start_timeout_s", "max_restarts"}),
        "prompts_per_part": PROMPTS_PER_PART,
        "columns": list(OUTPUTS),
        **engine_and_cores(),
        **drawn,
    }
    return above / hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
