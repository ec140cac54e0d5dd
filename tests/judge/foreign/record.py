"""How the files beside this one were recorded: a completions server whose chunks are known, and the three tools.

What is fake: the engine. Each request is answered with `max_tokens` tokens (the text of one is `--token-text`), several
in a chunk, `--gap-ms` apart; every `--fail-every`-th answer is an HTTP 500. What is real: the tools, as released, and
the sockets between. The server writes what it did to `--truth`, on its own clock: of each request, in the order of
their coming, when it came, and when each chunk went out with how many tokens. That is the oracle of `test_foreign.py`.

    python tests/judge/foreign/record.py serve --port 8123 --truth truth.json
    python tests/judge/foreign/record.py scrub RECORDED COPY     # paths, hosts and prompts of the machine are taken out

README.md beside this file holds the commands of the tools.
"""

import argparse
import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

from aiohttp import web

MODEL = "known"


class Server:
    """Answers completions and chat completions, and keeps its own record."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seen: list[dict[str, Any]] = []

    async def models(self, request: web.Request) -> web.Response:
        """The one model."""
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]})

    async def health(self, request: web.Request) -> web.Response:
        """Always well; also /metrics, which is empty."""
        return web.Response(text="")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """A streamed answer."""
        received = time.perf_counter()
        body = json.loads(await request.text())
        chat = "messages" in body
        prompt = json.dumps(body["messages"]) if chat else str(body["prompt"])
        num_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        seen: dict[str, Any] = {"received": received, "prompt_tokens": len(prompt), "chunks": [], "failed": False}
        self.seen.append(seen)
        if self.options.fail_every and len(self.seen) % self.options.fail_every == 0:
            seen["failed"] = True
            return web.json_response({"error": {"message": "scripted failure", "code": 500}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        left = num_tokens
        gap_s = self.options.gap_ms / 1000
        await asyncio.sleep(3 * gap_s)
        while left:
            tokens = min(left, self.options.tokens_per_chunk)
            left -= tokens
            text, finish = self.options.token_text * tokens, None if left else "length"
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            choice |= {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
            kind = "chat.completion.chunk" if chat else "text_completion"
            event = {"id": f"r{len(self.seen)}", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}
            seen["chunks"].append([time.perf_counter(), tokens])
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if left:
                await asyncio.sleep(gap_s)
        if not self.options.no_usage:
            usage = {"prompt_tokens": seen["prompt_tokens"], "completion_tokens": num_tokens,
                     "total_tokens": seen["prompt_tokens"] + num_tokens,
                     "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
            event = {
                "id": "u",
                "object": "text_completion",
                "created": 0,
                "model": MODEL,
                "choices": [],
                "usage": usage,
            }
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def write(self, app: web.Application) -> None:
        """The record, when the server is stopped."""
        Path(self.options.truth).write_text(json.dumps(self.seen), encoding="utf-8")


def serve(options: argparse.Namespace) -> None:
    """Until it is interrupted."""
    server = Server(options)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.health)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.on_shutdown.append(server.write)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


def scrub(recorded: Path, copy: Path) -> None:
    """Copy a recorded file without what belongs to the machine and what is long and never read: paths, addresses,
    tracebacks, summaries, HTTP traces, and keys without a value."""
    text = recorded.read_text(encoding="utf-8")
    documents = text.splitlines() if recorded.suffix == ".jsonl" else [text]
    copy.write_text("".join(json.dumps(_kept(json.loads(each), "")) + "\n" for each in documents), encoding="utf-8")


UNREAD = ("metrics.http_", "benchmarks.metrics", "benchmarks.warnings", "config.warnings", "config.spec.", "traceback",
          "constraints", "config.profile", "config.requests", "benchmarks.scheduler_metrics.", "words", "characters",
          "api_routes", "warmup_metrics", "worker_id",
          "record_processor_id", "cli_command", "environment", "telemetry_data")  # fmt: skip
MACHINE = {"platform": "-", "target": "-", "urls": [], "dir": "-", "path": "-", "tokenizer_id": "known"}


def _kept(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_kept(each, where) for each in value]
    if isinstance(value, str) and ("/tmp/" in value or "127.0.0.1" in value):
        return re.sub(r"(/tmp/\S*?known|/tmp/[\w/.]+|http://127\.0\.0\.1:\d+)", "-", value)
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, inner in value.items():
        path = f"{where}.{key}".lstrip(".")
        summary = not where and isinstance(inner, dict) and "unit" in inner
        if inner is None or summary or (any(name in path for name in UNREAD) and "measure_" not in path):
            continue
        kept[key] = MACHINE[key] if key in MACHINE else _kept(inner, path)
    return kept


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("serve")
    run.add_argument("--port", type=int, required=True)
    run.add_argument("--truth", required=True)
    run.add_argument("--tokens-per-chunk", type=int, default=1)
    run.add_argument("--gap-ms", type=float, default=20)
    run.add_argument("--fail-every", type=int, default=0)
    run.add_argument("--token-text", default="a")
    run.add_argument("--no-usage", action="store_true")
    clean = commands.add_parser("scrub")
    clean.add_argument("recorded", type=Path)
    clean.add_argument("copy", type=Path)
    options = parser.parse_args()
    if options.command == "serve":
        serve(options)
    else:
        scrub(options.recorded, options.copy)


if __name__ == "__main__":
    main()
