"""The open-loop client: a list of timed requests to one record each, over streaming completions.

One asyncio process sends every request at its moment whatever the engine does, with no limit on connections: a client
that waits for the server hides overload. Times count from the cell's start on one monotonic clock and are taken when
the bytes are read, before they are parsed. What a record says:

- `sent_s`: when the client started to send, before it connects. `sent_s - intended_s` is the client's own lag.
- `token_times`: the arrival of each token. A chunk's tokens are counted by the running usage that the engine attaches
  to every chunk, so two tokens in one chunk are two tokens of one time.
- `prompt_tokens`, `output_tokens`: the final usage record, never a count of chunks.
- `done_s`: the arrival of the finish reason, which comes with the last token. `ended_s`: the end, however it came.

A new connection for each request: an engine closes idle ones after a few seconds, and a request that is sent into
such a closing connection fails for no fault of the engine.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import polars as pl

STATUSES = ("ok", "refused", "timeout", "engine_died", "server_error", "unfinished")
"""ok: finish reason and usage were received. refused: no connection. timeout: not done `request_timeout_s` after its
intended moment. engine_died: the connection broke and the engine's process is gone. server_error: an HTTP status or
an error event. unfinished: the stream ended, or broke with the engine alive, before the answer did."""

REQUEST_SCHEMA = pl.Schema(
    {
        "shape": pl.String(),
        "level": pl.String(),
        "rate_rps": pl.Float64(),
        "request_id": pl.String(),
        "intended_s": pl.Float64(),
        "sent_s": pl.Float64(),
        "first_token_s": pl.Float64(),
        "done_s": pl.Float64(),
        "ended_s": pl.Float64(),
        "asked_prompt_tokens": pl.Int64(),
        "asked_output_tokens": pl.Int64(),
        "prompt_tokens": pl.Int64(),
        "output_tokens": pl.Int64(),
        "chunks": pl.Int64(),
        "token_times": pl.List(pl.Float64()),
        "status": pl.String(),
        "error": pl.String(),
        "finish_reason": pl.String(),
    }
)
"""One row per request; times in seconds from the start of the request's cell, null when absent."""

BROKEN_CONNECTION_GRACE_S = 0.3
"""How long after a broken connection the engine's process is looked at: the kernel closes sockets first."""


@dataclass(frozen=True)
class Request:
    """One request, ready to be sent."""

    shape: str
    level: str
    rate_rps: float | None
    request_id: str
    intended_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    body: bytes


@dataclass
class Record:
    """What became of one request: a row of `REQUEST_SCHEMA`."""

    shape: str
    level: str
    rate_rps: float | None
    request_id: str
    intended_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    sent_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    ended_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int = 0
    token_times: list[float] = field(default_factory=list)
    status: str = "unfinished"
    error: str | None = None
    finish_reason: str | None = None

    def fail(self, status: str, error: str) -> None:
        """End as a failure of this kind."""
        assert status in STATUSES, status
        self.status, self.error = status, error[:500]


def requests_of(plan: pl.DataFrame, model_name: str) -> list[Request]:
    """Requests of a plan: token ids in, exactly `asked_output_tokens` out, greedy, streamed with usage."""
    requests = []
    for row in plan.iter_rows(named=True):
        count = row["asked_output_tokens"]
        body = {
            "model": model_name,
            "prompt": row["prompt_token_ids"],
            "max_tokens": count,
            "min_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        requests.append(
            Request(
                shape=row["shape"],
                level=row["level"],
                rate_rps=row["rate_rps"],
                request_id=row["request_id"],
                intended_s=row["intended_s"],
                asked_prompt_tokens=len(row["prompt_token_ids"]),
                asked_output_tokens=count,
                body=json.dumps(body).encode(),
            )
        )
    return requests


def request_table(records: Iterable[Record]) -> pl.DataFrame:
    """Records as a table of `REQUEST_SCHEMA`."""
    return pl.DataFrame([asdict(record) for record in records], schema=REQUEST_SCHEMA)


def open_session() -> aiohttp.ClientSession:
    """A session without limits on connections or time; each request has its own time limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
    )


async def send_all(
    session: aiohttp.ClientSession,
    base_url: str,
    requests: Iterable[Request],
    *,
    timeout_s: float,
    alive: Callable[[], bool],
    ended: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Send each request at its `intended_s` from now, and return when all have ended.

    Args:
        timeout_s: a request that is not done this long after its intended moment is a timeout.
        alive: whether the engine's process is there, asked when a connection fails.
        ended: called with each record as it ends.
    """
    start = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start

    async def one(request: Request) -> Record:
        await asyncio.sleep(request.intended_s - clock())
        record = await _send(session, f"{base_url}/v1/completions", request, clock, timeout_s, alive)
        ended(record)
        return record

    return list(await asyncio.gather(*(one(request) for request in requests)))


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    request: Request,
    clock: Callable[[], float],
    timeout_s: float,
    alive: Callable[[], bool],
) -> Record:
    facts = asdict(request)
    del facts["body"]
    record = Record(**facts)
    headers = {"Content-Type": "application/json", "X-Request-Id": request.request_id}
    record.sent_s = clock()
    try:
        async with asyncio.timeout(request.intended_s + timeout_s - record.sent_s):
            async with session.post(url, data=request.body, headers=headers) as response:
                if response.status == 200:
                    await _read_stream(response.content, record, clock)
                else:
                    record.fail("server_error", f"HTTP {response.status}: {(await response.text())[:400]}")
        record.ended_s = clock()
    except TimeoutError:
        record.ended_s = clock()
        record.fail("timeout", f"not done {timeout_s:g} s after its intended moment")
    except (aiohttp.ClientError, OSError) as error:
        record.ended_s = clock()
        await asyncio.sleep(BROKEN_CONNECTION_GRACE_S)
        status = "refused" if isinstance(error, aiohttp.ClientConnectorError) else "unfinished"
        record.fail(status if alive() else "engine_died", f"{type(error).__name__}: {error}")
    except ValueError as error:
        record.ended_s = clock()
        record.fail("server_error", f"the answer is not server-sent events of JSON: {error}")
    return record


async def _read_stream(content: aiohttp.StreamReader, record: Record, clock: Callable[[], float]) -> None:
    """Read server-sent events to the end of the answer into `record`."""
    buffer = b""
    async for piece in content.iter_any():
        now = clock()
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if not event.startswith(b"data:") or data == b"[DONE]":
                continue
            _take(json.loads(data), record, now)
            if record.status == "server_error":
                return
    if record.finish_reason is None or record.output_tokens is None:
        missing = "finish reason" if record.finish_reason is None else "usage record"
        record.fail("unfinished", f"the stream ended without its {missing}, after {len(record.token_times)} tokens")
    else:
        record.status = "ok"


def _take(message: dict[str, Any], record: Record, now: float) -> None:
    """Enter one event: a chunk of tokens, the final usage record, or an error."""
    if "error" in message:
        record.fail("server_error", json.dumps(message["error"]))
        return
    usage = message.get("usage")
    if not message.get("choices"):
        if usage:
            record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return
    choice = message["choices"][0]
    # An engine without running usage: one chunk, one token.
    tokens = usage["completion_tokens"] - len(record.token_times) if usage else 1
    if tokens > 0:
        record.chunks += 1
        record.token_times += [now] * tokens
        if record.first_token_s is None:
            record.first_token_s = now
    if choice.get("finish_reason"):
        record.finish_reason, record.done_s = choice["finish_reason"], now
