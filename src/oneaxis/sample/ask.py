"""Responses from a running engine, each drawn with a seed of its own, the same whenever the same ones are asked again.

What a model says in low precision depends on what it is computed beside, so equal seeds alone do not give equal texts:
the engine's batches must be the same too. Hence a batch of requests is handed over while the engine is paused, and
every request has a priority, its place in the list: what runs first, and beside what, then follows from the list alone.
A streamed request that has sent its headers is with the engine (vLLM starts it before anything else is read from the
network), so the engine goes on when all have.

The engine is asked for tokens with its own defaults for a model turned off (`top_k`, `min_p`, penalties): what is
sampled is the model, at `temperature`, within `top_p`.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from tqdm import tqdm

from oneaxis.config.schema import Serve
from oneaxis.errors import RunError, UserError

T = TypeVar("T")

SILENCE_S = 3600
"""A request waits its turn without a word; after this long the engine hangs."""


@dataclass(frozen=True)
class Ask:
    """One response to draw."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Answer:
    """One response."""

    text: str
    tokens: int
    """Tokens generated, the one that ended it among them."""
    finished: bool
    """The model ended it; False: the token limit did."""


def for_asking(settings: Serve, *, drawn: bool) -> Serve:
    """The settings of an engine that is asked by this module: requests are scheduled by their priority.

    Args:
        drawn: answers are drawn, each with a seed. vLLM 0.32 then winds a request's generator back after each piece of
            its prompt, which a CPU's generator cannot, and the engine dies: there prompts are computed whole.

    Raises:
        UserError: when `engine_args` ask for pieces where they cannot be.
    """
    from oneaxis.serve.command import engine_device

    arguments = {**settings.engine_args, "scheduling_policy": "priority"}
    if drawn and engine_device() == "cpu":
        if arguments.get("enable_chunked_prefill"):
            raise UserError(
                "serve.engine_args.enable_chunked_prefill=True: an engine on a CPU dies of a prompt in "
                "pieces whose answer is drawn by a seed (vLLM 0.32); allowed: False, or leave the key out"
            )
        arguments["enable_chunked_prefill"] = False
    return settings.model_copy(update={"engine_args": arguments})


def ask_all(
    engine: Any, asks: Sequence[Ask], *, temperature: float, top_p: float, max_tokens: int, progress: "tqdm[Any]"
) -> list[Answer]:
    """Draw every response of one batch, in the order of `asks`.

    Args:
        engine: a running engine with `scheduling_policy: priority` that nobody else uses (`base_url`, `model_name`,
            `post()`, `require_alive()`).
        progress: moved on by one for each response.

    Raises:
        RunError: when the engine dies, refuses a request, or its answer is not whole.
    """
    bodies = [
        {
            "model": engine.model_name,
            "prompt": list(ask.prompt_ids),
            "seed": ask.seed,
            "priority": place,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "add_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for place, ask in enumerate(asks)
    ]
    return ask_together(engine, bodies, read_events, progress=progress)


def ask_together(
    engine: Any, bodies: Sequence[dict[str, Any]], read: Callable[[bytes], T], *, progress: "tqdm[Any]"
) -> list[T]:
    """One batch of requests to `/v1/completions`, in the order of `bodies`, as the module says.

    Args:
        engine, progress: as `ask_all`.
        bodies: streamed requests with `priority` rising in their order.
        read: of a whole stream of server-sent events, the answer.

    Raises:
        RunError: as `ask_all`, and from `read`.
    """
    return asyncio.run(_ask_together(engine, bodies, read, progress))


async def _ask_together(
    engine: Any, bodies: Sequence[dict[str, Any]], read: Callable[[bytes], T], progress: "tqdm[Any]"
) -> list[T]:
    loop = asyncio.get_running_loop()
    # Blocks that an earlier batch left in the cache were computed beside others.
    await loop.run_in_executor(None, engine.post, "/reset_prefix_cache", {})
    await loop.run_in_executor(None, engine.post, "/pause?mode=keep", {})
    # The engine is on this machine: a proxy named by the environment must not come between.
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
        taken = [loop.create_future() for _ in bodies]

        async def one(body: dict[str, Any], accepted: "asyncio.Future[None]") -> T:
            try:
                async with session.post(f"{engine.base_url}/v1/completions", json=body) as response:
                    if response.status != 200:
                        raise RunError(f"the engine answered {response.status} to a sampling request: "
                                       f"{(await response.text())[:300]}")  # fmt: skip
                    accepted.set_result(None)
                    answer = read(await response.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                engine.require_alive()
                raise RunError(f"a sampling request failed: {type(error).__name__}: {error}") from error
            progress.update()
            return answer

        async def go() -> None:
            await asyncio.gather(*taken)
            await loop.run_in_executor(None, engine.post, "/resume", {})

        tasks = [asyncio.create_task(one(*each)) for each in zip(bodies, taken, strict=True)]
        released = asyncio.create_task(go())
        try:
            await asyncio.gather(*tasks, released)
            return [task.result() for task in tasks]
        finally:
            for task in (*tasks, released):
                task.cancel()
            await asyncio.gather(*tasks, released, return_exceptions=True)


def read_events(stream: bytes) -> Answer:
    """A whole answer of `/v1/completions` from its server-sent events.

    Raises:
        RunError: an error event, or no finish reason or usage record.
    """
    text, tokens, reason = [], None, None
    for event in stream.split(b"\n\n"):
        data = event.removeprefix(b"data:").strip()
        if not event.startswith(b"data:") or data == b"[DONE]":
            continue
        try:
            message = json.loads(data)
            if "error" in message:
                raise RunError(f"the engine broke a sampled answer off: {json.dumps(message['error'])[:300]}")
            if usage := message.get("usage"):
                tokens = int(usage["completion_tokens"])
            for choice in message.get("choices", []):
                text.append(str(choice["text"]))
                reason = choice.get("finish_reason") or reason
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"a sampled answer has an event that cannot be read: {data[:200]!r}") from error
    if reason is None or tokens is None:
        raise RunError(f"a sampled answer ended without its {'finish reason' if reason is None else 'usage record'}")
    if reason not in ("stop", "length"):
        raise RunError(f"a sampled answer ended by {reason!r}; it should by stop or length")
    return Answer("".join(text), tokens, reason == "stop")
