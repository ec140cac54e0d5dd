"""`vllm bench serve --save-result --save-detailed`: one JSON object, or one a line with `--append-result`.

Read in the source of vLLM 0.32, `vllm/benchmarks/serve.py` and `lib/endpoint_request_func.py`:

- `itls` is one gap a *chunk*, whatever it holds; `output_lens` is the usage record's, or, where the server sends none,
  a count of the text by the client's tokenizer (the file does not say which); 1 for all without a tokenizer. A failed
  request has 0. Over the chat API the first chunk is the role, without a token, and counts for TTFT: vLLM sends it
  with the first token, another server may send it at once.
- `ttfts` and `latencies` count from the moment of sending, after the client's own queue (`--max-concurrency`).
  `start_times` - `queue_times` is when the request came to that queue: after the sleep until its arrival, so that how
  late the client itself was is nowhere.
- Arrivals at a rate are drawn and then stretched so that the last falls on N / rate: no Poisson count.
- Percentiles leave failed requests out. A stream that ends early counts as a success.
- The seed, the number of warm-ups and the version are not written. `--metadata KEY=VALUE` is, and names an axis here.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.document import (
    LEAST_RPS,
    LONGEST_S,
    Node,
    as_node,
    digest,
    number,
    numbers,
    parse,
    refuse,
    text,
    text_of,
    whole,
)
from oneaxis.judge.foreign import REQUEST_SCHEMA, Run

TOOL = "vllm bench serve"
DETAILED = ("ttfts", "itls", "input_lens", "output_lens", "errors")
OPTIONAL = ("start_times", "queue_times", "latencies", "generated_texts")
OWN = re.compile(
    r"^(date|endpoint_type|backend|label|model_id|tokenizer_id|request_rate|ramp_up_strategy|"
    r"(mean|median|std|p[\d.]+)_\w+|spec_decode_\w+|diffusion_\w+)$"
)
"""Keys of the tool's own whose values may be strings; any other string is of `--metadata`."""


def read(path: Path) -> list[Run]:
    """The runs of a file.

    Raises:
        UserError: it is broken, or holds no requests of its own.
    """
    whole_text = text_of(path)
    # (Not splitlines: an answer may hold a separator of lines of Unicode's.)
    lines = [(f"{path}:{place}", line) for place, line in enumerate(whole_text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and all(line.startswith("{") for _, line in lines):
        return [_run(as_node(parse(line, where), where), path) for where, line in lines]
    return [_run(as_node(parse(whole_text, str(path)), str(path)), path)]


def _run(document: Node, path: Path) -> Run:
    missing = [key for key in DETAILED if key not in document.value]
    if missing:
        why = "a benchmark of embeddings" if "input_lens" in document.value else "no requests of their own"
        raise UserError(
            f"{document.source}: {why} (no {', '.join(missing)}); allowed: recorded with --save-result --save-detailed"
        )
    told = [*DETAILED, *(key for key in OPTIONAL if document.raw(key) is not None)]
    lists = {key: document.raw(key) for key in told}
    for key, values in lists.items():
        if not isinstance(values, list):
            refuse(values, document.at(key), "a list with an entry a request")
    num = len(lists["ttfts"])
    for key, values in lists.items():
        if len(values) != num:
            raise UserError(f"{document.at(key)} is no list of {num}, as ttfts is; allowed: an entry a request")
    rows = [_request({key: values[place] for key, values in lists.items()}, f"{document.source}: request {place}")
            for place in range(num)]  # fmt: skip
    notes = []
    ok = [row for row in rows if row["status"] == "ok"]
    if ok and all(row["output_tokens"] == 1 for row in ok) and any(row["chunks"] > 2 for row in ok):
        # Without a tokenizer and without usage the tool writes 1.
        rows = [row | {"output_tokens": None} for row in rows]
        notes.append("output_lens is 1 for answers of many chunks: the tool had neither usage nor a tokenizer")
    backend = document.text("backend") or document.text("endpoint_type") or ""
    if backend.endswith("chat"):
        rows, roles = _without_role(rows)
        if roles:
            notes.append(f"the first chunk of {roles} answers is the role and holds no token: TTFT is that of the next")
    declared = document.whole("failed")
    failed = num - len(ok)
    if declared is not None and declared != failed:
        notes.append(f"the tool counts {declared} failed requests, and {failed} gave no answer")
    if any(row["ttft_s"] == 0 for row in ok):
        rows = [row | {"ttft_s": None, "gaps_s": None, "chunks": None} for row in rows]
    rate, users = document.raw("request_rate"), document.whole("max_concurrency")
    burstiness = document.number("burstiness")
    closed = rate in ("inf", None) or rate == float("inf")
    if closed:
        rows = [row | {"intended_s": None} for row in rows]
    asked = None if closed or document.text("ramp_up_strategy") else document.number("request_rate", least=LEAST_RPS)
    model = document.text("model_id")
    return Run(
        tool=TOOL, version=None, source=path, model=str(model),
        level=_level(document, asked), asked_rps=asked,
        random_arrivals=True, started_at=_date(document.raw("date")),
        intended_is=None if closed or "queue_times" not in lists else "the arrival in the client's own queue",
        settings={"model": {"id": model}, "declared": _declared(document)},
        load={"backend": backend, "burstiness": 1.0 if burstiness is None else burstiness, "max_concurrency": users},
        conditions={"tool": TOOL}, warmup=None,
        requests=pl.DataFrame(rows, schema=REQUEST_SCHEMA).sort("sent_s", maintain_order=True), notes=notes,
    )  # fmt: skip


def _level(document: Node, asked_rps: float | None) -> str:
    if asked_rps is not None:
        return f"r{asked_rps:g}"
    if document.text("ramp_up_strategy"):
        return f"ramp{document.number('ramp_up_start_rps')}-{document.number('ramp_up_end_rps')}"
    users = document.whole("max_concurrency")
    return f"u{users}" if users else "all"


ROLE_GAP = 0.05
"""A second chunk that follows the first within this share of the usual gap was made with it."""


def _without_role(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Chat answers without their first chunk where that is the role alone: there is one chunk more than tokens, or
    the next one came with it."""
    kept, roles = [], 0
    for row in rows:
        gaps = row["gaps_s"]
        spare = gaps and row["chunks"] == (row["output_tokens"] or 0) + 1
        glued = gaps and len(gaps) > 1 and gaps[0] < ROLE_GAP * sorted(gaps[1:])[len(gaps[1:]) // 2]
        if spare or glued:
            roles += 1
            row = row | {"ttft_s": row["ttft_s"] + gaps[0], "chunks": row["chunks"] - 1, "gaps_s": gaps[1:]}
        kept.append(row)
    return kept, roles


def _declared(document: Node) -> dict[str, str | None]:
    found = [key for key, value in document.value.items() if isinstance(value, str) and not OWN.match(key)]
    return {str(text(key, document.at("a key"))): document.text(key) for key in found}


def _date(text: Any) -> float | None:
    try:
        # Local time without a zone: good for the order of runs on one machine.
        return datetime.strptime(str(text), "%Y%m%d-%H%M%S").timestamp()
    except (ValueError, OverflowError):
        return None


APART_S, APART_SHARE = 0.010, 0.01
"""Between a latency and its parts, of which the larger counts: the tool takes all from one clock, and older releases
also counted a last chunk without a token."""


def _request(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One request, as a row of `REQUEST_SCHEMA`."""
    ttft = number(found["ttfts"], f"{where}: ttfts", most=LONGEST_S)
    tokens = whole(found["output_lens"], f"{where}: output_lens")
    gaps = numbers(found["itls"], f"{where}: itls")
    sent = number(found["start_times"], f"{where}: start_times", least=None) if "start_times" in found else None
    # The semaphore is passed a moment after the request came to it; less than nothing is rounding.
    waited = None
    if "queue_times" in found:
        waited = number(found["queue_times"], f"{where}: queue_times", least=-1e-3, most=LONGEST_S)
    parts = ttft + sum(gaps)
    e2e = number(found["latencies"], f"{where}: latencies", most=LONGEST_S) if "latencies" in found else parts
    # The reason of a failure may be an empty string; no failed request has output tokens.
    error = text(found["errors"], f"{where}: errors")
    failed = bool(error) or tokens == 0
    # (What failed is cut anywhere; without streaming there is no first token.)
    if not failed and ttft and (e2e < ttft - 1e-6 or abs(e2e - parts) > max(APART_S, APART_SHARE * parts)):
        raise UserError(f"{where}: latencies is {e2e:.6g} s, ttfts {ttft:.6g} and itls {sum(gaps):.6g} in all; "
                        "allowed: ttfts and itls add up to latencies, within "
                        f"{1000 * APART_S:g} ms or {APART_SHARE:.0%}")  # fmt: skip
    return {
        "prompt": None,
        "intended_s": None if sent is None or waited is None else sent - max(waited, 0.0),
        "sent_s": sent,
        "ttft_s": None if failed else ttft,
        "e2e_s": None if failed else e2e,
        "prompt_tokens": whole(found["input_lens"], f"{where}: input_lens"),
        "asked_output_tokens": None,
        "output_tokens": None if failed else tokens,
        "chunks": None if failed else len(gaps) + 1,
        "gaps_s": None if failed else gaps,
        "cached_tokens": None,
        "text": digest(found.get("generated_texts")),
        "status": "failed" if failed else "ok",
        "error": error if failed and error else None,
    }
