"""Log-probabilities of continuations by a vLLM engine: `/v1/completions` with token ids and `prompt_logprobs`.

The engine answers with one entry per prompt token: a mapping of token ids to log-probabilities that always holds the
token itself and, where that is another, the most likely one. The first entry is null. One token is generated, since
the engine does not take zero, and left unused.

vLLM 0.32 takes nothing from its prefix cache for such a request, whatever `serve.prefix_caching` says (its sampling
parameters set `skip_reading_prefix_cache`: cached tokens have no logits). So every option pays for its prompt; in
`local` it does not.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
from tqdm import tqdm

from oneaxis.errors import RunError
from oneaxis.score.boundary import Target

REQUEST_TIMEOUT_S = 300


def log_probabilities(engine: Any, targets: Sequence[Target], concurrency: int) -> list[list[float]]:
    """Log-probability of every token of every target from its start on (nats); equal sequences are asked once.

    Args:
        engine: a running engine (`base_url`, `model_name`, `require_alive()`).
        targets: what to score.
        concurrency: requests in flight.

    Raises:
        RunError: when the engine dies, or refuses a request.
    """
    return asyncio.run(_log_probabilities(engine, targets, concurrency))


async def _log_probabilities(engine: Any, targets: Sequence[Target], concurrency: int) -> list[list[float]]:
    distinct = list(dict.fromkeys(target.ids for target in targets))
    slots = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    # The engine is on this machine: a proxy named by the environment must not come between.
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False, headers=engine.headers) as session:
        with tqdm(total=len(distinct), desc="score", unit="option") as progress:

            async def one(ids: tuple[int, ...]) -> list[float]:
                async with slots:
                    scored = await _prompt_logprobs(session, engine, ids)
                progress.update()
                return scored

            tasks = [asyncio.create_task(one(ids)) for ids in distinct]
            try:
                answers = dict(zip(distinct, await asyncio.gather(*tasks), strict=True))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[target.ids][target.start - 1 :] for target in targets]


async def _prompt_logprobs(session: aiohttp.ClientSession, engine: Any, ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities of ids[1:], each given what stands before it."""
    body = {
        "model": engine.model_name,
        "prompt": list(ids),
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
        "add_special_tokens": False,
    }
    try:
        async with session.post(f"{engine.base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RunError(f"the engine answered {response.status} to a scoring request: {await response.text()}")
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        engine.require_alive()
        raise RunError(f"a scoring request failed: {type(error).__name__}: {error}") from error
    return token_logprobs(answer, ids)


def token_logprobs(answer: dict[str, Any], ids: Sequence[int]) -> list[float]:
    """The log-probability of each of ids[1:] in an answer of `/v1/completions`.

    Raises:
        RunError: when the answer is not about these tokens.
    """
    try:
        entries = answer["choices"][0].get("prompt_logprobs")
    except (LookupError, TypeError, AttributeError) as error:
        raise RunError(f"no completion in the answer to a scoring request: {str(answer)[:300]}") from error
    if entries is None or len(entries) != len(ids):
        found = "none" if entries is None else str(len(entries))
        raise RunError(f"the engine returned prompt_logprobs for {found} of {len(ids)} tokens")
    values = []
    for place, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        if place == 0:
            continue
        if str(token) not in (entry or {}):
            raise RunError(f"the engine returned no log-probability for token {token} at position {place}")
        values.append(float(entry[str(token)]["logprob"]))
    return values
