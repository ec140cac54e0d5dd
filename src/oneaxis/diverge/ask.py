"""Greedy requests in a closed loop: so many are under way at any moment, and each that ends lets the next one go.

Token ids come back with each output, and for every token the log-probability of the likeliest other one. The engine's
own defaults for a model (penalties) are turned off: what is asked for is the likeliest token.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from tqdm import tqdm

from oneaxis.errors import RunError

SILENCE_S = 3600
"""A request waits its turn without a word; after this long the engine hangs."""
LAST_WORDS_S = 2.0
"""A dying engine closes its connections a moment before it is gone."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: int
    repeat: int


@dataclass(frozen=True)
class Output:
    """What came back."""

    token_ids: tuple[int, ...]
    finished: bool
    """The model ended it; False: the token limit did."""
    gaps: tuple[float, ...] | None
    """Per token its log-probability less that of the likeliest other, nats."""
    runners_up: tuple[int, ...] | None
    """Per token the likeliest other."""


def ask_all(
    engine: Any,
    prompts: Mapping[int, Sequence[int]],
    asks: Sequence[Ask],
    *,
    concurrency: int,
    max_tokens: int,
    progress: "tqdm[Any]",
) -> list[Output]:
    """Every output, in the order of `asks`, which is also the order in which they are sent.

    Args:
        engine: with `base_url`, `model_name`, `headers` and `require_alive()`.
        prompts: number -> token ids.
        progress: moved on by one for each output.

    Raises:
        RunError: when the engine dies, or a request fails: naming its prompt and repeat. The others are given up.
    """
    return asyncio.run(_ask_all(engine, prompts, asks, concurrency, max_tokens, progress))


async def _ask_all(
    engine: Any,
    prompts: Mapping[int, Sequence[int]],
    asks: Sequence[Ask],
    concurrency: int,
    max_tokens: int,
    progress: "tqdm[Any]",
) -> list[Output]:
    waiting = iter(enumerate(asks))
    outputs: dict[int, Output] = {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, trust_env=False, headers=dict(engine.headers)
    ) as session:

        async def user() -> None:
            for place, ask in waiting:
                outputs[place] = await _ask(session, engine, ask, prompts[ask.prompt], max_tokens, concurrency)
                progress.update()

        users = [asyncio.create_task(user()) for _ in range(min(concurrency, len(asks)))]
        try:
            await asyncio.gather(*users)
        finally:
            for task in users:
                task.cancel()
            await asyncio.gather(*users, return_exceptions=True)
    return [outputs[place] for place in range(len(asks))]


async def _ask(
    session: aiohttp.ClientSession, engine: Any, ask: Ask, prompt: Sequence[int], max_tokens: int, concurrency: int
) -> Output:
    which = f"prompt {ask.prompt}, repeat {ask.repeat}, {concurrency} at a time"
    body = {
        "model": engine.model_name,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "add_special_tokens": False,
        "return_token_ids": True,
        # As identifiers: two tokens may read alike, and one of them would be lost.
        "return_tokens_as_token_ids": True,
        "logprobs": 2,
    }
    try:
        async with session.post(f"{engine.base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                said = " ".join((await response.text()).split())[:300]
                raise RunError(f"the engine answered {response.status} to {which}: {said}")
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        for _ in range(int(LAST_WORDS_S / 0.1)):
            engine.require_alive()
            await asyncio.sleep(0.1)
        raise RunError(f"{which}: the request failed: {type(error).__name__}: {error}") from error
    return read_answer(answer, which)


def read_answer(answer: Mapping[str, Any], which: str) -> Output:
    """An output from the answer of `/v1/completions`.

    Raises:
        RunError: naming `which`, for an answer without token ids, or one that neither the model nor the limit ended.
    """
    try:
        choice = answer["choices"][0]
        reason, ids = choice["finish_reason"], choice.get("token_ids")
    except (KeyError, IndexError, TypeError) as error:
        raise RunError(f"{which}: no completion in the answer: {str(answer)[:300]}") from error
    if ids is None:
        raise RunError(f"{which}: the server gives no token ids; allowed: one that knows return_token_ids (vLLM)")
    if reason not in ("stop", "length"):
        raise RunError(f"{which}: the output ended by {reason!r}; it should by stop or length")
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
    seconds = [_second(token, top) for token, top in zip(ids, tops, strict=False)]
    known = [second for second in seconds if second is not None]
    whole = len(known) == len(ids)
    return Output(
        token_ids=tuple(ids),
        finished=reason == "stop",
        gaps=tuple(gap for _, gap in known) if whole else None,
        runners_up=tuple(other for other, _ in known) if whole else None,
    )


def _second(token: int, top: Mapping[str, float] | None) -> tuple[int, float] | None:
    """The likeliest token but the one that was taken, and how far below it lies; None where that is not told."""
    read = {}
    for name, value in (top or {}).items():
        kind, _, number = name.rpartition(":")
        if kind != "token_id":
            return None
        read[int(number)] = float(value)
    own = read.pop(token, None)
    if own is None or not read:
        return None
    other = max(read, key=lambda each: read[each])
    return other, own - read[other]
