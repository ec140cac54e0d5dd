"""A completions server whose tokens and gaps are known, as the oracle of the client's tests.

What is fake: the engine. No model runs; the answer to each request id is scripted (how many tokens in which chunk,
after which pause, and how it ends), and the token "text" is a letter. What is real: the sockets. It speaks HTTP by hand
over asyncio, in a thread with a loop of its own, and shares no code with the product. It keeps its own record of when
each request came in and when each chunk went out, on the machine's one monotonic clock.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A scripted answer."""

    chunks: tuple[tuple[float, int], ...] | None = None
    """(pause before it in s, tokens in it). None: as many single tokens as were asked, `gap_s` apart."""
    gap_s: float = 0.01
    http_status: int = 200
    ending: str = "complete"
    """complete; cut (the connection is reset); stop (clean end without finish reason and usage); hang (nothing more
    is sent); error (an error event)."""
    finish_reason: str = "length"
    usage_offset: int = 0
    """Added to the output tokens of the final usage record: a server that lies."""
    running_usage: bool = True
    """Whether each chunk carries the usage so far."""
    glue: bool = False
    """Whether every event is broken in two writes, in the middle of its JSON."""


@dataclass
class Seen:
    """The server's own record of one request."""

    received_at: float
    body: dict[str, Any]
    chunk_at: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)


@dataclass
class FakeServer:
    """Also an engine as the sweep sees it: base_url, model_name, alive and require_alive."""

    default: Answer
    answers: dict[str, Answer]
    model_name: str = "fake"
    base_url: str = ""
    dead: Exception | None = None
    """When set, the engine counts as dead, with these last words."""
    kill_after: int | None = None
    """The number of completion requests after which the engine dies: connections break, nothing answers."""
    offers_reset: bool = True
    reuse: bool = False
    """Whether the prefix cache counts every token of a prompt whose first 4 tokens it has seen as a hit."""
    seen: dict[str, Seen] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """What was asked, in order: request ids and paths."""
    counters: dict[str, float] = field(default_factory=dict)
    running: int = 0
    _starts: set[tuple[int, ...]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def alive(self) -> bool:
        """Whether it has not been killed."""
        return self.dead is None

    def require_alive(self) -> None:
        """Raise what killed it."""
        if self.dead is not None:
            raise self.dead

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        self._writers.add(writer)
        try:
            await self._handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received_at = time.perf_counter()
        lines = head.split("\r\n")
        _method, path, _version = lines[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/metrics":
            self.reply(writer, 200, self.page())
        elif path == "/reset_prefix_cache":
            self.calls.append(path)
            self._starts.clear()
            self.reply(writer, 200 if self.offers_reset else 404, '{"success": true}')
        else:
            assert path == "/v1/completions", path
            name = headers["x-request-id"]
            self.calls.append(name)
            self.seen[name] = Seen(received_at, json.loads(body))
            if self.kill_after is not None and len(self.seen) >= self.kill_after:
                self.die()
            else:
                self.running += 1
                try:
                    await self.answer(writer, self.seen[name], self.answers.get(name, self.default))
                finally:
                    self.running -= 1

    def die(self) -> None:
        """Break every connection; the process is gone a moment later, as with a real one."""
        for writer in list(self._writers):
            writer.transport.abort()
        asyncio.get_running_loop().call_later(0.15, self._gone)

    def _gone(self) -> None:
        from oneaxis.errors import RunError

        self.dead = RunError("the engine died: out of memory in block 7")

    def reply(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        """A whole plain answer."""
        data = text.encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)

    def page(self) -> str:
        """The Prometheus page: counters over two engines that must be summed, gauges, and lines to be ignored."""
        lines = ["# HELP vllm:generation_tokens_total x", "# TYPE vllm:generation_tokens_total counter"]
        for name, value in self.counters.items():
            lines += [f'vllm:{name}{{engine="0",model_name="fake"}} {value - 1}',
                      f'vllm:{name}{{engine="1",model_name="fake"}} 1.0']  # fmt: skip
        lines += [f'vllm:num_requests_running{{engine="0"}} {self.running}',
                  'vllm:num_requests_waiting{engine="0"} 0', 'vllm:kv_cache_usage_perc{engine="0"} 0.25',
                  'process_virtual_memory_bytes 1e9']  # fmt: skip
        return "\n".join(lines) + "\n"

    def count(self, name: str, amount: float) -> None:
        """Increase a server counter."""
        self.counters[name] = self.counters.get(name, 1.0) + amount

    async def answer(self, writer: asyncio.StreamWriter, seen: Seen, answer: Answer) -> None:
        """Send the scripted answer."""
        if answer.http_status != 200:
            self.reply(writer, answer.http_status, '{"error": "scripted"}')
            return
        prompt = seen.body["prompt"]
        self.count("prompt_tokens_total", len(prompt))
        self.count("prefix_cache_queries_total", len(prompt))
        if self.reuse and tuple(prompt[:4]) in self._starts:
            self.count("prefix_cache_hits_total", len(prompt))
        self._starts.add(tuple(prompt[:4]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunks = answer.chunks
        if chunks is None:
            chunks = ((answer.gap_s, 1),) * seen.body["max_tokens"]
        total = 0
        for index, (pause, tokens) in enumerate(chunks):
            await asyncio.sleep(pause)
            total += tokens
            last = index == len(chunks) - 1 and answer.ending == "complete"
            event: dict[str, Any] = {
                "choices": [{"index": 0, "text": "a" * tokens, "finish_reason": answer.finish_reason if last else None}]
            }
            if answer.running_usage:
                event["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": total}
            self.count("generation_tokens_total", tokens)
            seen.chunk_at.append(time.perf_counter())
            seen.chunk_tokens.append(tokens)
            await self.event(writer, event, answer.glue)
        if answer.ending == "cut":
            await writer.drain()
            writer.transport.abort()
            return
        if answer.ending == "hang":
            await asyncio.sleep(60)
        if answer.ending == "error":
            await self.event(writer, {"error": {"message": "scripted failure", "code": 500}}, False)
        if answer.ending == "complete":
            usage = {"prompt_tokens": len(prompt), "completion_tokens": total + answer.usage_offset}
            await self.event(writer, {"choices": [], "usage": usage}, answer.glue)
            await self.write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def event(self, writer: asyncio.StreamWriter, event: dict[str, Any], glue: bool) -> None:
        """One server-sent event."""
        data = f"data: {json.dumps(event)}\n\n".encode()
        if glue:
            middle = len(data) // 2
            await self.write_chunk(writer, data[:middle])
            await asyncio.sleep(0.002)
            data = data[middle:]
        await self.write_chunk(writer, data)

    async def write_chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """One chunk of the chunked transfer encoding."""
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()


@contextmanager
def fake_server(
    default: Answer | None = None, answers: dict[str, Answer] | None = None, **facts: Any
) -> Iterator[FakeServer]:
    """A running fake server, in a thread of its own."""
    server = FakeServer(default or Answer(), answers or {}, **facts)
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "num_preemptions_total"):  # fmt: skip
        server.count(name, 0)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.base_url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
