"""The client: a list of planned requests to one record each, over streaming completions.

One process with one event loop sends every request at its moment whatever the engine does, with no limit on
connections: a client that waits for the server hides overload. (In closed loop each user waits for its own answers,
which is what is asked there.) While a load runs, nothing is done with what arrives but to note its time and keep its
bytes; events are told apart and parsed when the load is over. Times count from the cell's start on one monotonic clock.
What a record says:

- `sent_s`: when the client started to send, before it connects. `sent_s - intended_s` is the client's own lag.
- `token_times`: the arrival of each token. A chunk's tokens are counted by the running usage that the engine attaches
  to every chunk, so two tokens in one chunk are two tokens of one time.
- `prompt_tokens`, `output_tokens`: the final usage record, never a count of chunks.
- `done_s`: the arrival of the finish reason, which comes with the last token. `ended_s`: the end, however it came.

A new connection for each request: an engine closes idle ones after a few seconds, and a request that is sent into
such a closing connection fails for no fault of the engine.
"""

import asyncio
import gc
import json
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson
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
        "service_class": pl.String(),
        "request_id": pl.String(),
        "user": pl.Int64(),
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
"""One row per request; times in seconds from the start of the request's cell, null when absent. In closed loop
`intended_s` is when the user was ready: its answer before, and its pause."""

BROKEN_CONNECTION_GRACE_S = 0.3
"""How long after a broken connection the engine's process is looked at: the kernel closes sockets first."""

KEPT_BYTES = 512 << 20
"""Answers kept unparsed; beyond it those that have ended are parsed while the load runs."""

EVENT_END = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class Request:
    """One request, ready to be sent."""

    shape: str
    level: str
    rate_rps: float | None
    service_class: str
    request_id: str
    user: int | None
    intended_s: float | None
    """None in closed loop, where `user` sends its requests in their order."""
    think_s: float | None
    asked_prompt_tokens: int
    asked_output_tokens: int
    body: bytes


@dataclass
class Record:
    """What became of one request: a row of `REQUEST_SCHEMA`."""

    shape: str
    level: str
    rate_rps: float | None
    service_class: str
    request_id: str
    user: int | None
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
                service_class=row["service_class"],
                request_id=row["request_id"],
                user=row["user"],
                intended_s=row["intended_s"],
                think_s=row["think_s"],
                asked_prompt_tokens=len(row["prompt_token_ids"]),
                asked_output_tokens=count,
                body=json.dumps(body).encode(),
            )
        )
    return requests


def request_table(records: Iterable[Record]) -> pl.DataFrame:
    """Records as a table of `REQUEST_SCHEMA`."""
    return pl.DataFrame([asdict(record) for record in records], schema=REQUEST_SCHEMA)


async def send_all(
    base_url: str,
    requests: Sequence[Request],
    *,
    timeout_s: float,
    alive: Callable[[], bool],
    ended: Callable[[], object] = lambda: None,
    until_s: float = math.inf,
    headers: Mapping[str, str] | None = None,
) -> list[Record]:
    """Send each request at its moment, counted from now, and return the records when all have ended, in their order.

    Args:
        timeout_s: a request that is not done this long after its intended moment is a timeout.
        alive: whether the engine's process is there, asked when a connection fails.
        ended: called as each request ends.
        until_s: in closed loop, no user sends after this; requests that were never sent have no record.
        headers: more of them, for each request: a key, where one is needed.
    """
    where = await _address(base_url)
    started = time.perf_counter()
    sending = _Sending(where, started, timeout_s, alive, ended, headers or {})
    open_loop = [(index, request) for index, request in enumerate(requests) if request.intended_s is not None]
    users: dict[tuple[str, int | None], list[tuple[int, Request]]] = {}
    for index, request in enumerate(requests):
        if request.intended_s is None:
            users.setdefault((request.shape, request.user), []).append((index, request))
    # A garbage collection over all that is kept would hold up requests and stamps; nothing here needs one to be freed.
    collects = gc.isenabled()
    gc.disable()
    try:
        async with asyncio.TaskGroup() as group:
            for own in users.values():
                group.create_task(sending.closed_loop(own, until_s))
            for index, request in sorted(open_loop, key=lambda one: one[1].intended_s or 0.0):
                assert request.intended_s is not None
                await _until(started + request.intended_s)
                group.create_task(sending.one(index, request))
    finally:
        if collects:
            gc.enable()
    return sending.records()


async def _until(moment: float) -> None:
    """Sleep to this time of `perf_counter`. An event loop may wake up to a millisecond early."""
    while (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left)


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    tls: ssl.SSLContext | None
    name: str
    """Of the server, as it is asked for."""
    path: str


async def _address(base_url: str) -> _Address:
    """Where completions are asked for. The name is resolved once, before the load."""
    url = urlsplit(base_url)
    assert url.hostname is not None, base_url
    tls = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if tls else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.hostname, port, type=1)
        host = str(found[0][4][0])
    except OSError:
        # Each request fails by itself, and says so.
        host = url.hostname
    return _Address(host, port, tls, url.hostname, f"{url.path.rstrip('/')}/v1/completions")


class _Answer(asyncio.Protocol):
    """One request on a connection of its own: what arrived, and when. Times are of `perf_counter`."""

    def __init__(self, message: bytes, done: asyncio.Future[None]) -> None:
        self.message, self.done = message, done
        self.parser = httptools.HttpResponseParser(self)
        self.now = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.complete = False
        self.status_code = 0
        self.broken: Exception | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.broken = error
            self._end()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self.now, body))

    def on_message_complete(self) -> None:
        self.complete = True
        self.status_code = self.parser.get_status_code()
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.complete and self.broken is None:
            self.now = time.perf_counter()
            self.broken = exc or ConnectionError("the server closed the connection before the end of its answer")
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        """End the connection, however far it has come."""
        if self.transport is not None:
            self.transport.abort()
        # The parser knows the answer: without this they would keep each other.
        del self.parser


class _Sending:
    """The requests under way, and what became of those that ended."""

    def __init__(
        self,
        where: _Address,
        started: float,
        timeout_s: float,
        alive: Callable[[], bool],
        ended: Callable[[], object],
        headers: Mapping[str, str],
    ) -> None:
        self.headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.where, self.started, self.timeout_s, self.alive, self.ended = where, started, timeout_s, alive, ended
        self.loop = asyncio.get_running_loop()
        self.outcomes: dict[int, tuple[Record, _Answer | None]] = {}
        self.kept_bytes = 0

    def clock(self) -> float:
        return time.perf_counter() - self.started

    async def closed_loop(self, own: Sequence[tuple[int, Request]], until_s: float) -> None:
        """One user: each request when the one before has ended and the pause is over."""
        ready_s = 0.0
        for index, request in own:
            ready_s += request.think_s or 0.0
            if ready_s >= until_s:
                return
            await _until(self.started + ready_s)
            await self.one(index, replace(request, intended_s=ready_s))
            record, answer = self.outcomes[index]
            assert record.ended_s is not None
            # After a broken connection the engine was looked at first: the user was not ready before.
            ready_s = self.clock() if answer is None or answer.broken else record.ended_s

    async def one(self, index: int, request: Request) -> None:
        """Send one request now, and keep what came of it."""
        sent_s = self.clock()
        assert request.intended_s is not None
        record = Record(
            request.shape, request.level, request.rate_rps, request.service_class, request.request_id, request.user,
            request.intended_s, request.asked_prompt_tokens, request.asked_output_tokens, sent_s,
        )  # fmt: skip
        head = (
            f"POST {self.where.path} HTTP/1.1\r\nHost: {self.where.name}:{self.where.port}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
            f"{self.headers}X-Request-Id: {request.request_id}\r\nContent-Length: {len(request.body)}\r\n\r\n"
        )
        answer = _Answer(head.encode() + request.body, self.loop.create_future())
        connected = False
        try:
            async with asyncio.timeout(request.intended_s + self.timeout_s - sent_s):
                await self.loop.create_connection(
                    lambda: answer, self.where.host, self.where.port, ssl=self.where.tls,
                    server_hostname=self.where.name if self.where.tls else None,
                )  # fmt: skip
                connected = True
                await answer.done
            record.ended_s = answer.now - self.started
        except TimeoutError:
            record.ended_s = self.clock()
            record.fail("timeout", f"not done {self.timeout_s:g} s after its intended moment")
        except OSError as error:
            record.ended_s = self.clock()
            answer.broken = error
        finally:
            answer.close()
        if answer.broken is not None and record.status != "timeout":
            if isinstance(answer.broken, httptools.HttpParserError):
                record.fail("server_error", f"the answer is not HTTP: {answer.broken}")
            else:
                await asyncio.sleep(BROKEN_CONNECTION_GRACE_S)
                said = f"{type(answer.broken).__name__}: {answer.broken}"
                status = "unfinished" if connected else "refused"
                record.fail(status if self.alive() else "engine_died", said)
        self.outcomes[index] = record, answer
        self.kept_bytes += sum(len(piece) for _, piece in answer.pieces)
        if self.kept_bytes > KEPT_BYTES:
            self.parse()
        self.ended()

    def parse(self) -> None:
        """Read what was kept into the records."""
        for index, (record, answer) in self.outcomes.items():
            if answer is not None:
                _read(answer, record, self.started)
                self.outcomes[index] = record, None
        self.kept_bytes = 0

    def records(self) -> list[Record]:
        """Of all that were sent, in the order in which they were given."""
        self.parse()
        return [self.outcomes[index][0] for index in sorted(self.outcomes)]


def _read(answer: _Answer, record: Record, started: float) -> None:
    """Read the server-sent events of an answer into its record."""
    if answer.complete and answer.status_code != 200:
        text = b"".join(piece for _, piece in answer.pieces).decode(errors="replace")
        record.fail("server_error", f"HTTP {answer.status_code}: {text[:400]}")
        return
    buffer = b""
    try:
        for moment, piece in answer.pieces:
            *events, buffer = EVENT_END.split(buffer + piece)
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if not event.startswith(b"data:") or data == b"[DONE]":
                    continue
                _take(orjson.loads(data), record, moment - started)
                if record.status == "server_error":
                    return
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        record.fail("server_error", f"the answer is not server-sent events of completions: {error!r}")
        return
    if not answer.complete:
        # Why was said when it ended: a broken connection, or the time limit.
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
