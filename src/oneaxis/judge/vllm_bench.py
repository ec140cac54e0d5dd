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

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.foreign import REQUEST_SCHEMA, Run, number, numbers, parse, text_of

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
    text = text_of(path)
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(line.startswith("{") for line in lines):
        return [_run(parse(line, path, place), path) for place, line in enumerate(lines, 1)]
    return [_run(parse(text, path), path)]


def _run(document: Mapping[str, Any], path: Path) -> Run:
    if not isinstance(document, dict):
        raise UserError(f"{path}: holds no object; allowed: what vllm bench serve writes")
    missing = [key for key in DETAILED if key not in document]
    if missing:
        why = "a benchmark of embeddings" if "input_lens" in document else "no requests of their own"
        raise UserError(
            f"{path}: {why} (no {', '.join(missing)}); allowed: recorded with --save-result --save-detailed"
        )
    lists: dict[str, Sequence[Any]] = {key: document[key] for key in (*DETAILED, *OPTIONAL) if key in document}
    num = len(document["ttfts"])
    for key, values in lists.items():
        if not isinstance(values, list) or len(values) != num:
            raise UserError(f"{path}: {key} is no list of {num}, as ttfts is; allowed: an entry a request")
    rows = [_request({key: values[place] for key, values in lists.items()}, f"{path}: request {place}")
            for place in range(num)]  # fmt: skip
    notes = []
    ok = [row for row in rows if row["status"] == "ok"]
    if ok and all(row["output_tokens"] == 1 for row in ok) and any(row["chunks"] > 2 for row in ok):
        # Without a tokenizer and without usage the tool writes 1.
        rows = [row | {"output_tokens": None} for row in rows]
        notes.append("output_lens is 1 for answers of many chunks: the tool had neither usage nor a tokenizer")
    if str(document.get("backend", document.get("endpoint_type"))).endswith("chat"):
        rows, roles = _without_role(rows)
        if roles:
            notes.append(f"the first chunk of {roles} answers is the role and holds no token: TTFT is that of the next")
    declared = document.get("failed")
    failed = num - len(ok)
    if isinstance(declared, int) and declared != failed:
        notes.append(f"the tool counts {declared} failed requests, and {failed} gave no answer")
    if any(row["ttft_s"] == 0 for row in ok):
        rows = [row | {"ttft_s": None, "gaps_s": None, "chunks": None} for row in rows]
    rate, users = document.get("request_rate"), document.get("max_concurrency")
    closed = rate in ("inf", None) or rate == float("inf")
    if closed:
        rows = [row | {"intended_s": None} for row in rows]
    ramp = document.get("ramp_up_strategy")
    asked = None if closed or ramp else number(rate, f"{path}: request_rate")
    return Run(
        tool=TOOL, version=None, source=path, model=str(document.get("model_id")),
        level=_level(document, asked), asked_rps=asked,
        random_arrivals=True, started_at=_date(document.get("date")),
        intended_is=None if closed or "queue_times" not in document else "the arrival in the client's own queue",
        settings={"model": {"id": document.get("model_id")}, "declared": _declared(document)},
        load={"backend": document.get("backend", document.get("endpoint_type")),
              "burstiness": document.get("burstiness", 1.0), "max_concurrency": users},
        conditions={"tool": TOOL}, warmup=None,
        requests=pl.DataFrame(rows, schema=REQUEST_SCHEMA).sort("sent_s", maintain_order=True), notes=notes,
    )  # fmt: skip


def _level(document: Mapping[str, Any], asked_rps: float | None) -> str:
    if asked_rps is not None:
        return f"r{asked_rps:g}"
    if document.get("ramp_up_strategy"):
        return f"ramp{document.get('ramp_up_start_rps')}-{document.get('ramp_up_end_rps')}"
    return f"u{document['max_concurrency']}" if document.get("max_concurrency") else "all"


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


def _declared(document: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in document.items() if isinstance(value, str) and not OWN.match(key)}


def _date(text: Any) -> float | None:
    try:
        # Local time without a zone: good for the order of runs on one machine.
        return datetime.strptime(str(text), "%Y%m%d-%H%M%S").timestamp()
    except ValueError:
        return None


def _request(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One request, as a row of `REQUEST_SCHEMA`."""
    ttft = number(found["ttfts"], f"{where}: ttfts")
    tokens = int(number(found["output_lens"], f"{where}: output_lens"))
    gaps = numbers(found["itls"], f"{where}: itls")
    sent = number(found["start_times"], f"{where}: start_times", least=None) if "start_times" in found else None
    # The semaphore is passed a moment after the request came to it; less than nothing is rounding.
    waited = number(found["queue_times"], f"{where}: queue_times", least=-1e-3) if "queue_times" in found else None
    e2e = number(found["latencies"], f"{where}: latencies") if "latencies" in found else ttft + sum(gaps)
    # The reason of a failure may be an empty string; no failed request has output tokens.
    failed = bool(found["errors"]) or tokens == 0
    text = found.get("generated_texts")
    return {
        "prompt": None,
        "intended_s": None if sent is None or waited is None else sent - max(waited, 0.0),
        "sent_s": sent,
        "ttft_s": None if failed else ttft,
        "e2e_s": None if failed else e2e,
        "prompt_tokens": int(number(found["input_lens"], f"{where}: input_lens")),
        "asked_output_tokens": None,
        "output_tokens": None if failed else tokens,
        "chunks": None if failed else len(gaps) + 1,
        "gaps_s": None if failed else gaps,
        "cached_tokens": None,
        "text": hashlib.sha256(text.encode()).hexdigest()[:16] if isinstance(text, str) and text else None,
        "status": "failed" if failed else "ok",
        "error": str(found["errors"]) if failed and found["errors"] else None,
    }
