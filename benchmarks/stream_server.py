"""A completions server that streams on a clock and writes down what it did: the other end of `client_rate.py`.

    taskset -c 0 python benchmarks/stream_server.py --port 8123 --record DIR

What is fake: the engine. Every answer is `CHUNKS` tokens, one a chunk, the first `--ttft-ms` after its request was read
and the others `--itl-ms` apart, whatever was asked. The bytes are those of vLLM's completions (running usage only
where it was asked for), prebuilt, so that a chunk costs one `send`. Sockets and epoll are used by hand: through an
event loop a write would be noted before it is made. Kept-alive and closing connections are both served.

`POST /record/NAME` writes `DIR/NAME.json`: for each request of a completion since the last record its `x-request-id`,
when it was read, and when each chunk was sent, all of `time.perf_counter`, the clock of every process of the machine;
and the share of the time that the server was busy, which says whether it was the limit.
"""

import argparse
import json
import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

CHUNKS = 50


@dataclass
class Stream:
    """One request, from its last byte to its last chunk."""

    connection: "Connection"
    name: str
    read_at: float
    usage: bool
    chat: bool
    closes: bool
    sent_at: list[float] = field(default_factory=list)
    dropped: bool = False


@dataclass
class Connection:
    """An accepted socket and what has come of a request so far."""

    socket: socket.socket
    received: bytes = b""


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _events(*, usage: bool, chat: bool) -> list[bytes]:
    """The bytes of each chunk, in the chunked transfer encoding; the last has the end of the stream behind it."""
    found = []
    head = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "golden"}
    for index in range(CHUNKS):
        last = index == CHUNKS - 1
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length" if last else None}
        choice |= {"delta": {"content": " word"}} if chat else {"text": " word", "stop_reason": None}
        event: dict[str, object] = {**head, "choices": [choice]}
        if usage:
            event["usage"] = {"prompt_tokens": 32, "total_tokens": 33 + index, "completion_tokens": index + 1}
        found.append(_framed(b"data: " + json.dumps(event).encode() + b"\n\n"))
    whole = {"prompt_tokens": 32, "total_tokens": 32 + CHUNKS, "completion_tokens": CHUNKS}
    final = json.dumps({**head, "choices": [], "usage": whole}).encode()
    found[-1] += _framed(b"data: " + final + b"\n\n") + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return found


EVENTS = {(usage, chat): _events(usage=usage, chat=chat) for usage in (False, True) for chat in (False, True)}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """One epoll loop over everything."""

    def __init__(self, port: int, ttft_s: float, itl_s: float, record: Path) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.ttft_s, self.itl_s, self.record = ttft_s, itl_s, record
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        # The pauses are the same for all, so two queues are sorted by when their heads are due.
        self.first: deque[tuple[float, Stream]] = deque()
        self.next: deque[tuple[float, Stream]] = deque()
        self.streams: list[Stream] = []
        self.since, self.idle_s = time.perf_counter(), 0.0

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            heads = [queue[0][0] for queue in (self.first, self.next) if queue]
            now = time.perf_counter()
            wait = min(heads) - now if heads else 1.0
            # epoll sleeps whole milliseconds: what falls due within one goes out together, and is noted as it goes.
            ready = self.epoll.poll(max(0.0, wait))
            if wait > 0:
                self.idle_s += time.perf_counter() - now
            for number, _ in ready:
                if number == self.listener.fileno():
                    self._accept()
                else:
                    self._read(self.connections[number])
            self._send_due()

    def _accept(self) -> None:
        for _ in range(64):
            try:
                accepted, _ = self.listener.accept()
            except BlockingIOError:
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections[accepted.fileno()] = Connection(accepted)
            self.epoll.register(accepted, select.EPOLLIN)

    def _close(self, connection: Connection) -> None:
        number = connection.socket.fileno()
        if number in self.connections:
            self.epoll.unregister(number)
            del self.connections[number]
            connection.socket.close()

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        connection.received += data
        head, found, rest = connection.received.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        body, connection.received = rest[:length], rest[length:]
        self._answer(connection, lines[0].split(" ")[1], headers, body)

    def _answer(self, connection: Connection, path: str, headers: dict[str, str], body: bytes) -> None:
        closes = headers.get("connection", "").lower() == "close"
        if path in ("/v1/completions", "/v1/chat/completions"):
            now = time.perf_counter()
            usage = b'"continuous_usage_stats": true' in body or b'"continuous_usage_stats":true' in body
            stream = Stream(connection, headers.get("x-request-id", ""), now, usage, "chat" in path, closes)
            self.streams.append(stream)
            self.first.append((now + self.ttft_s, stream))
            return
        if path.startswith("/record/"):
            self._write_record(path.removeprefix("/record/"))
        answer: object = {"object": "list", "data": [{"id": "golden", "object": "model", "max_model_len": 4096}]}
        text = b"" if path == "/metrics" else json.dumps(answer).encode()
        ending = b"connection: close\r\n" if closes else b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(text)
        connection.socket.send(head + ending + b"\r\n" + text)
        if closes:
            self._close(connection)

    def _send_due(self) -> None:
        for queue in (self.first, self.next):
            while queue and queue[0][0] <= time.perf_counter():
                due, stream = queue.popleft()
                events = EVENTS[stream.usage, stream.chat]
                place = len(stream.sent_at)
                data = events[place] if place else HEAD + events[0]
                now = time.perf_counter()
                try:
                    sent = stream.connection.socket.send(data)
                    assert sent == len(data), "a client reads so slowly that its socket is full"
                except OSError:
                    stream.dropped = True
                    self._close(stream.connection)
                    continue
                stream.sent_at.append(now)
                if place < CHUNKS - 1:
                    self.next.append((due + self.itl_s, stream))
                elif stream.closes:
                    self._close(stream.connection)

    def _write_record(self, name: str) -> None:
        now = time.perf_counter()
        rows = [{"id": s.name, "read_at": s.read_at, "sent_at": s.sent_at, "dropped": s.dropped} for s in self.streams]
        busy = 1 - self.idle_s / (now - self.since)
        (self.record / f"{name}.json").write_text(json.dumps({"busy": busy, "requests": rows}))
        self.streams, self.since, self.idle_s = [], time.perf_counter(), 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    given = parser.parse_args()
    Server(given.port, given.ttft_ms / 1000, given.itl_ms / 1000, given.record).run()
