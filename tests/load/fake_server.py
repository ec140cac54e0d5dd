"""A golden server: an OpenAI-compatible server whose tokens, gaps and faults are known, the oracle of the load's tests.

What is fake: the engine. No model runs; the answer to each request id is scripted (how many tokens in which chunk,
after which pause, and how it ends), the token "text" is a letter of one to four bytes, and what it "runs" is a document
in this file. A real engine cannot serve as the oracle: its times are not known, and it does not lie on demand. What is
real: the sockets. It speaks HTTP by hand over asyncio, in a thread with a loop of its own, and shares no code with the
product. It keeps its own record of when each request came in and when each chunk went out, on the machine's one
monotonic clock, and its counters and histograms say what it did, unless it is told to lie.
"""

import asyncio
import json
import math
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LETTERS = "aé€😀"
"""Of one, two, three and four bytes in UTF-8."""
VOCABULARY = 8
"""Tokens that a sampled answer draws from, all equally likely: the log-probability of each is -ln 8."""
BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")


@dataclass(frozen=True)
class Answer:
    """A scripted answer."""

    chunks: tuple[tuple[float, int], ...] | None = None
    """(pause before it in s, tokens in it). None: as many tokens as asked, `per_chunk` at a time, `gap_s` apart."""
    gap_s: float = 0.01
    per_chunk: int = 1
    extra_tokens: int = 0
    """Beyond what was asked (below it where negative): a server that ignores max_tokens."""
    stall_s: float = 0.0
    """A pause more before the last chunk."""
    http_status: int = 200
    ending: str = "complete"
    """complete; cut (the connection is reset); stop (clean end without finish reason and usage); no_usage (without
    usage alone); hang (nothing more is sent); error (an error event); garbage (a line that is no event)."""
    finish_reason: str = "length"
    usage_offset: int = 0
    """Added to the output tokens of the final usage record: a server that lies."""
    prompt_offset: int = 0
    """Added to the prompt tokens of every usage record: a server that cuts the prompt, or adds to it."""
    running_usage: bool = True
    """Whether each chunk carries the usage so far."""
    split: str = "event"
    """How the bytes are written: event (one write each); middle (every event in two, in the middle of its JSON);
    character (in two, inside a character of several bytes); bytes (a write every 7 bytes, wherever that is); merged
    (last chunk, usage and end in one); held (each event with the one after it, as a proxy that buffers does)."""
    ping: bool = False
    """A comment line between events, as servers send to keep a connection open."""


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
    headers: dict[str, str] = field(default_factory=dict)
    dead: Exception | None = None
    """When set, the engine counts as dead, with these last words."""
    kill_after: int | None = None
    """The number of completion requests after which the engine dies: connections break, nothing answers."""
    offers_reset: bool = True
    reuse: bool = False
    """Whether the prefix cache counts every token of a prompt whose first 4 tokens it has seen as a hit."""
    reuse_all: bool = False
    """Whether it counts every token of every prompt as a hit."""
    block_tokens: int | None = None
    """When set, it has a prefix cache of such blocks, and counts as hits what of a prompt is cached as it comes: its
    leading whole blocks, if another prompt had them and its first token came."""
    prefill_s: float = 0.0
    """How long it takes to compute a token of a prompt that is not cached."""
    seeds: int | None = None
    """How many seeds it tells apart (1: sampled answers are all the same); None: all."""
    freeze_at: int | None = None
    """The number of completion requests after which nothing moves for `freeze_s`: no answer gets a token."""
    freeze_s: float = 0.0
    lies: dict[str, float] = field(default_factory=dict)
    """Counter or histogram -> what its true increase is multiplied by."""
    without: tuple[str, ...] = ()
    """Counters that its page lacks."""
    other_tokens: int = 0
    """Tokens that another client takes beside each request."""
    service_s: float = 0.0
    """When set, requests are served one at a time, in the order in which they came, and each is held for so long before
    its answer: a queue of known capacity."""
    client_pause_s: float = 0.0
    """How long `require_alive`, which the client calls, takes: a client whose process is held up."""
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What differs in the engine's configuration: section -> its keys. See `server_info`."""
    cache_labels: dict[str, str] = field(default_factory=dict)
    """Labels of `vllm:cache_config_info` that differ."""
    seen: dict[str, Seen] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """What was asked, in order: request ids and paths."""
    counters: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    """What each histogram has observed, in seconds."""
    running: int = 0
    _frozen_until: float = 0.0
    _served: asyncio.Lock = field(default_factory=asyncio.Lock)
    _starts: set[tuple[int, ...]] = field(default_factory=set)
    _blocks: set[tuple[int, ...]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    connections: dict[asyncio.Task[Any], asyncio.WriteTransport] = field(default_factory=dict)
    """All that there were, by the task that handles them."""

    def alive(self) -> bool:
        """Whether it has not been killed."""
        return self.dead is None

    def require_alive(self) -> None:
        """Raise what killed it."""
        time.sleep(self.client_pause_s)
        if self.dead is not None:
            raise self.dead

    def get(self, path: str) -> str:
        """A page of its own, over the network."""
        with urllib.request.urlopen(f"{self.base_url}{path}", timeout=30) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request to itself, over the network."""
        request = urllib.request.Request(f"{self.base_url}{path}", json.dumps(body).encode(), {"Connection": "close"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, its requests one after another until it is closed."""
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer.transport
        try:
            while await self._handle(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received_at = time.perf_counter()
        lines = head.split("\r\n")
        _method, target, _version = lines[0].split(" ")
        path = target.partition("?")[0]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/metrics":
            self.reply(writer, 200, self.page())
        elif path == "/health":
            self.reply(writer, 200, "")
        elif path == "/v1/models":
            model = {"id": self.model_name, "object": "model", "max_model_len": 4096}
            self.reply(writer, 200, json.dumps({"object": "list", "data": [model]}))
        elif path == "/server_info":
            self.reply(writer, 200, json.dumps(self.server_info()))
        elif path == "/reset_prefix_cache":
            self.calls.append(path)
            self._starts.clear()
            self._blocks.clear()
            self.reply(writer, 200 if self.offers_reset else 404, '{"success": true}')
        else:
            assert path in ("/v1/completions", "/v1/chat/completions"), path
            request = json.loads(body)
            if not request.get("stream"):
                self.reply(writer, 200, json.dumps(self.whole(request, chat="chat" in path)))
                return headers.get("connection", "").lower() != "close"
            name = headers["x-request-id"]
            self.calls.append(name)
            self.seen[name] = Seen(received_at, request)
            if self.kill_after is not None and len(self.seen) >= self.kill_after:
                self.die()
                return False
            if len(self.seen) == self.freeze_at:
                self._frozen_until = received_at + self.freeze_s
            self.running += 1
            try:
                if self.service_s:
                    async with self._served:
                        await asyncio.sleep(self.service_s)
                chat = path == "/v1/chat/completions"
                await self.answer(writer, self.seen[name], self.answers.get(name, self.default), chat=chat)
            finally:
                self.running -= 1
        return headers.get("connection", "").lower() != "close"

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
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    def server_info(self) -> dict[str, Any]:
        """What it says it runs, in the places where vLLM has it, with `config` laid over."""
        told: dict[str, dict[str, Any]] = {
            "model_config": {"dtype": "torch.bfloat16", "max_model_len": 512, "enforce_eager": True,
                             "quantization": None},
            "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": False, "kv_cache_size_tokens": 1048576,
                             "block_size": 128, "kv_cache_memory_bytes": 2**29},
            "scheduler_config": {"max_num_seqs": 8, "max_num_batched_tokens": 2048, "enable_chunked_prefill": True,
                                 "async_scheduling": False, "policy": "fcfs"},
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
            "device_config": {"device": "cpu"},
        }  # fmt: skip
        for section, values in self.config.items():
            told.setdefault(section, {}).update(values)
        environment = {"vllm_version": "0.32.0", "env_vars": "OMP_NUM_THREADS=1\nHOME=/"}
        environment.update(self.config.get("system_env", {}))
        return {"vllm_config": told, "system_env": environment}

    def whole(self, request: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        """A plain answer: greedy tokens, or drawn evenly from `VOCABULARY` by the request's seed."""
        count = request["max_tokens"]
        if request.get("temperature", 1.0) == 0:
            tokens = [index % VOCABULARY for index in range(count)]
        else:
            seed = request.get("seed", 0)
            draw = random.Random(seed if self.seeds is None else seed % self.seeds)
            tokens = [draw.randrange(VOCABULARY) for _ in range(count)]
        text = "".join(LETTERS[token % len(LETTERS)] for token in tokens)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": tokens}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
            if request.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": [-math.log(VOCABULARY)] * count}
        prompt = request.get("prompt") or []
        return {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}}

    def page(self) -> str:
        """The Prometheus page: counters over two engines that must be summed, histograms, gauges, and lines to be
        ignored."""
        lines = ["# HELP vllm:generation_tokens_total x", "# TYPE vllm:generation_tokens_total counter"]
        for name, value in self.counters.items():
            if name not in self.without:
                lines += [f'vllm:{name}{{engine="0",model_name="fake"}} {value - 1}',
                          f'vllm:{name}{{engine="1",model_name="fake"}} 1.0']  # fmt: skip
        for name, values in self.histograms.items():
            if name in self.without:
                continue
            lines.append(f"# TYPE vllm:{name} histogram")
            for bound in (*BUCKETS, math.inf):
                le = "+Inf" if bound == math.inf else f"{bound}"
                count = sum(value <= bound for value in values)
                lines.append(f'vllm:{name}_bucket{{engine="0",le="{le}",model_name="fake"}} {count}.0')
            lines += [f'vllm:{name}_count{{engine="0",model_name="fake"}} {len(values)}.0',
                      f'vllm:{name}_sum{{engine="0",model_name="fake"}} {sum(values)}']  # fmt: skip
        labels = {"block_size": "128", "cache_dtype": "auto", "enable_prefix_caching": "False",
                  "kv_cache_size_tokens": "1048576"} | self.cache_labels  # fmt: skip
        listed = ",".join(f'{name}="{value}"' for name, value in labels.items())
        lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{listed}}} 1.0",
                  f'vllm:num_requests_running{{engine="0"}} {self.running}',
                  'vllm:num_requests_waiting{engine="0"} 0', 'vllm:kv_cache_usage_perc{engine="0"} 0.25',
                  'process_virtual_memory_bytes 1e9']  # fmt: skip
        return "\n".join(lines) + "\n"

    def count(self, name: str, amount: float) -> None:
        """Increase a server counter."""
        self.counters[name] = self.counters.get(name, 1.0) + amount * self.lies.get(name, 1.0)

    def observe(self, name: str, seconds: float) -> None:
        """Enter a value into a histogram."""
        self.histograms[name].append(seconds * self.lies.get(name, 1.0))

    async def answer(self, writer: asyncio.StreamWriter, seen: Seen, answer: Answer, *, chat: bool = False) -> None:
        """Send the scripted answer."""
        if answer.http_status != 200:
            self.reply(writer, answer.http_status, '{"error": "scripted"}')
            return
        prompt = seen.body.get("prompt") or []
        self.count("prompt_tokens_total", len(prompt) + answer.prompt_offset + self.other_tokens)
        self.count("prefix_cache_queries_total", len(prompt))
        if self.reuse_all or (self.reuse and tuple(prompt[:4]) in self._starts):
            self.count("prefix_cache_hits_total", len(prompt))
        self.count("generation_tokens_total", self.other_tokens)
        self._starts.add(tuple(prompt[:4]))
        # A chain of blocks is known by the whole prompt up to its end.
        block = self.block_tokens or len(prompt) + 1
        chains = [tuple(prompt[:end]) for end in range(block, len(prompt) + 1, block)]
        cached = max((len(chain) for chain in chains if chain in self._blocks), default=0)
        self.count("prefix_cache_hits_total", cached)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunks = answer.chunks
        if chunks is None:
            left = max(seen.body["max_tokens"] + answer.extra_tokens, 0)
            sizes = [min(answer.per_chunk, left - start) for start in range(0, left, answer.per_chunk)]
            chunks = tuple((answer.gap_s, size) for size in sizes)
        wire = Wire(self, writer, answer)
        total = 0
        for index, (pause, tokens) in enumerate(chunks):
            last = index == len(chunks) - 1
            prefill_s = 0.0 if index else self.prefill_s * (len(prompt) - cached)
            await asyncio.sleep(pause + prefill_s + (answer.stall_s if last else 0.0))
            await asyncio.sleep(max(self._frozen_until - time.perf_counter(), 0.0))
            text = "".join(LETTERS[(total + k) % len(LETTERS)] for k in range(tokens))
            total += tokens
            says_why = last and answer.ending in ("complete", "no_usage")
            choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason if says_why else None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            event: dict[str, Any] = {"choices": [choice]}
            if answer.running_usage:
                event["usage"] = {"prompt_tokens": len(prompt) + answer.prompt_offset, "completion_tokens": total}
            self.count("generation_tokens_total", tokens)
            now = time.perf_counter()
            if seen.chunk_at:
                # As vLLM: one a step, whatever it gave.
                self.observe("inter_token_latency_seconds", now - seen.chunk_at[-1])
            else:
                self.observe("time_to_first_token_seconds", now - seen.received_at)
                self._blocks.update(chains)
            seen.chunk_at.append(now)
            seen.chunk_tokens.append(tokens)
            await wire.event(event)
        self.observe("e2e_request_latency_seconds", time.perf_counter() - seen.received_at)
        await self.end(wire, answer, len(prompt), total)

    async def end(self, wire: "Wire", answer: Answer, prompt_tokens: int, total: int) -> None:
        """The scripted ending."""
        if answer.ending == "cut":
            await wire.flush()
            wire.writer.transport.abort()
            return
        if answer.ending == "hang":
            await wire.flush()
            await asyncio.sleep(60)
        if answer.ending == "error":
            await wire.event({"error": {"message": "scripted failure", "code": 500}})
        if answer.ending == "garbage":
            await wire.write(b"data: {this is no JSON\n\n")
        if answer.ending == "complete":
            usage = {"prompt_tokens": prompt_tokens + answer.prompt_offset,
                     "completion_tokens": total + answer.usage_offset}  # fmt: skip
            await wire.event({"choices": [], "usage": usage})
        if answer.ending in ("complete", "no_usage"):
            wire.held += b"data: [DONE]\n\n"
        await wire.flush()
        wire.writer.write(b"0\r\n\r\n")
        await wire.writer.drain()


@dataclass
class Wire:
    """Server-sent events as bytes, broken into writes as the answer's script says."""

    server: FakeServer
    writer: asyncio.StreamWriter
    answer: Answer
    held: bytes = b""

    async def event(self, event: dict[str, Any]) -> None:
        """One event."""
        # As vLLM writes it: characters stand for themselves.
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        if self.answer.ping:
            await self.write(b": ping\n\n")
        split = self.answer.split
        if split == "held" or (split == "merged" and self.ends(event)):
            self.held += data
            if split == "held" and self.held.count(b"\n\n") > 1:
                await self.flush()
            return
        cuts = {
            "middle": [len(data) // 2],
            "character": [at for at in range(1, len(data)) if data[at] & 0xC0 == 0x80][:1],
            "bytes": list(range(7, len(data), 7)),
        }.get(split, [])
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            await self.write(data[start:end])
            if end < len(data):
                # Each part is a packet of its own.
                await asyncio.sleep(0.002 if split != "bytes" else 0)

    @staticmethod
    def ends(event: dict[str, Any]) -> bool:
        """Whether it is the last chunk or what follows it."""
        choices = event.get("choices")
        return not choices or choices[0].get("finish_reason") is not None

    async def flush(self) -> None:
        """Send what was held back."""
        if self.held:
            await self.write(self.held)
            self.held = b""

    async def write(self, data: bytes) -> None:
        """One chunk of the chunked transfer encoding."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()


@contextmanager
def fake_server(
    default: Answer | None = None, answers: dict[str, Answer] | None = None, **facts: Any
) -> Iterator[FakeServer]:
    """A running fake server, in a thread of its own."""
    server = FakeServer(default or Answer(), answers or {}, **facts)
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "num_preemptions_total"):  # fmt: skip
        server.count(name, 0)
    server.histograms = {name: [] for name in HISTOGRAMS}
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.base_url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        # A handler that is cancelled before it began closes no connection: only those that began are.
        while asyncio.all_tasks() - {asyncio.current_task()}:
            for task, transport in server.connections.items():
                task.cancel()
                transport.abort()
            await asyncio.sleep(0.01)

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
