"""AIPerf's records: `profile_export.jsonl`, one request a line, with the summary and `inputs.json` beside it.

Read in the source of AIPerf 0.13 (`common/models/record_models.py`, `metrics/types/`):

- `inter_chunk_latency` is the gaps between chunks. `inter_token_latency` is one figure a request, (E2E - TTFT) over
  output tokens less those of the first chunk (1 where the server does not say): nearly TPOT, not ITL.
- `output_sequence_length` is counted by the client's tokenizer over the text, unless `--use-server-token-count`; the
  server's own `usage_completion_tokens` is beside it wherever the server sends usage, and is what is taken here.
- `credit_issued_ns` is when the rate limiter let the request go, before it reached a worker: the nearest to a schedule
  that the file has. `request_start_ns` is when it was sent.
- Records of the warm-up phase are in the file, and are left out here. A request that failed has no latencies.
- The summary says the model, the load and the version; `adj_*` in it counts failed requests, the others leave them out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.document import LEAST_RPS, LONGEST_S, Node, as_node, digest, numbers, parse, refuse, text_of
from oneaxis.judge.foreign import REQUEST_SCHEMA, Run

TOOL = "AIPerf"
RATES = ("constant", "poisson", "gamma")


def read(path: Path) -> list[Run]:
    """The run of a file of records, or of the summary beside one.

    Raises:
        UserError: it is broken, or one of the two files is not there.
    """
    records, summary = records_and_summary(path)
    about = as_node(parse(text_of(summary), str(summary)), str(summary))
    prompts = _prompts(records.with_name("inputs.json"))
    rows, warmups, retokenised = [], 0, 0
    for place, line in enumerate(text_of(records).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{records}:{place}"
        record = as_node(parse(line, where), where)
        if "metadata" not in record.value or "metrics" not in record.value:
            raise UserError(f"{where}: has no metadata or metrics; allowed: a record of AIPerf")
        if record.node("metadata").text("benchmark_phase") == "warmup":
            warmups += 1
            continue
        row, differs = _request(record, prompts)
        rows.append(row)
        retokenised += differs
    notes = []
    if retokenised:
        notes.append(f"the client's tokenizer counted other output tokens than the server's usage in {retokenised} "
                     "answers; usage is taken, so that TPOT, ITL and tokens/s differ from AIPerf's own")  # fmt: skip
    cut = sum(row["status"] == "cut" for row in rows)
    if cut:
        notes.append(f"{cut} requests were cancelled by the tool, and count as misses")
    phase = _phase(about)
    kind, rate, users = phase.text("type"), phase.number("rate", least=LEAST_RPS), phase.whole("concurrency")
    rated = kind in RATES
    if rated and rate is None:
        raise UserError(f"{phase.at('rate')} is missing; allowed: requests a second")
    begun = min((row["sent_s"] for row in rows), default=0)
    for row in rows:
        # Nanoseconds since 1970 are more than a double holds: the difference first.
        row["intended_s"] = (row["intended_s"] - begun) / 1e9 if rated and row["intended_s"] is not None else None
        row["sent_s"] = (row["sent_s"] - begun) / 1e9
    config = about.node("input_config")
    models = ", ".join(str(item.text("name")) for item in config.node("models").nodes("items"))
    endpoint, version = config.node("endpoint"), about.text("aiperf_version")
    return [Run(
        tool=TOOL, version=version, source=records, model=models,
        level=f"r{rate:g}" if rated else f"u{users}" if users else {"fixed_schedule": "x1"}.get(str(kind), str(kind)),
        asked_rps=rate if rated else None, random_arrivals=kind != "constant",
        started_at=begun / 1e9 or None, intended_is="the issue by the rate limiter" if rated else None,
        settings={"model": {"id": models}, "declared": {}},
        load={"type": kind, "concurrency": users, "endpoint": endpoint.raw("type"),
              "streaming": endpoint.raw("streaming"), "extra": endpoint.raw("extra")},
        conditions={"tool": f"{TOOL} {version}"}, warmup=f"{warmups} requests",
        requests=pl.DataFrame(rows, schema=REQUEST_SCHEMA).sort("sent_s", maintain_order=True), notes=notes,
    )]  # fmt: skip


def records_and_summary(path: Path) -> tuple[Path, Path]:
    """Both files of a run, given one of them.

    Raises:
        UserError: the other is not beside it.
    """
    if path.suffix == ".jsonl":
        records, named = path, re.sub(r"\.jsonl$", "_aiperf.json", path.name)
        options = [path.with_name(named), path.with_suffix(".json"), path.with_name("profile_export_aiperf.json")]
        summary = next((each for each in options if each.is_file()), None)
        if summary is None:
            raise UserError(f"{path}: {options[0].name} is not beside it, which says the model and the load; allowed: "
                            "both files of a run")  # fmt: skip
        return records, summary
    options = [path.with_name(re.sub(r"_aiperf\.json$", ".jsonl", path.name)), path.with_suffix(".jsonl")]
    found = next((each for each in options if each.is_file()), None)
    if found is None:
        raise UserError(f"{path}: a summary without its records ({options[0].name}); allowed: recorded with "
                        "--export-level records")  # fmt: skip
    return found, path


def _phase(about: Node) -> Node:
    """The phase that was measured, as configured."""
    phases = about.node("input_config").nodes("phases")
    measured = [phase for phase in phases if phase.text("kind") != "warmup"]
    if len(measured) != 1:
        raise UserError(f"{about.source}: has {len(measured)} measured phases; allowed: one load a file")
    return measured[0]


def _prompts(path: Path) -> dict[tuple[str, int], str]:
    """(conversation, turn) -> a digest of what was sent."""
    if not path.is_file():
        return {}
    digests = {}
    for session in as_node(parse(text_of(path), str(path)), str(path)).nodes("data"):
        for turn, payload in enumerate(session.nodes("payloads")):
            asked = digest(payload.raw("messages") or payload.raw("prompt"))
            if asked:
                digests[str(session.text("session_id")), turn] = asked
    return digests


LAST_NS = 2**63 - 1
APART_S, APART_SHARE = 0.010, 0.01
"""Between what must be equal but for clocks and rounding, of which the larger counts."""


def _request(record: Node, prompts: Mapping[tuple[str, int], str]) -> tuple[dict[str, Any], bool]:
    """One request, as a row of `REQUEST_SCHEMA` but in nanoseconds, and whether the client counted other tokens."""
    metadata, metrics = record.node("metadata"), record.node("metrics")

    def measured(name: str, unit: str) -> Node:
        found = metrics.node(name)
        if found.value and found.raw("unit") != unit:
            refuse(found.raw("unit"), found.at("unit"), unit)
        return found

    def seconds(name: str) -> float | None:
        found = measured(name, "ms").number("value", most=1000 * LONGEST_S)
        return None if found is None else found / 1000

    def count(name: str) -> int | None:
        return measured(name, "tokens").whole("value")

    error = record.node("error")
    failed = record.raw("error") is not None
    status = "cut" if metadata.flag("was_cancelled") else "failed" if failed else "ok"
    ok = status == "ok"
    ttft, e2e = seconds("time_to_first_token"), seconds("request_latency")
    own, used = count("output_sequence_length"), count("usage_completion_tokens")
    chunks = measured("inter_chunk_latency", "ms")
    gaps = None
    if chunks.raw("value") is not None:
        told = numbers(chunks.raw("value"), chunks.at("value"), most=1000 * LONGEST_S)
        gaps = [gap / 1000 for gap in told]
    elif ttft is not None:
        # One chunk has no gaps, and then AIPerf leaves the list out.
        gaps = []
    issued, sent, ended = (metadata.whole(name, most=LAST_NS)
                           for name in ("credit_issued_ns", "request_start_ns", "request_end_ns"))  # fmt: skip
    if sent is None:
        raise UserError(f"{metadata.at('request_start_ns')} is missing; allowed: nanoseconds since 1970")
    if ok:
        _possible(record.source, ttft, e2e, gaps, None if ended is None else (ended - sent) / 1e9)
    return {
        "prompt": prompts.get((str(metadata.text("conversation_id")), metadata.whole("turn_index") or 0)),
        "intended_s": issued,
        "sent_s": sent,
        "ttft_s": ttft if ok else None,
        "e2e_s": e2e if ok else None,
        "prompt_tokens": count("usage_prompt_tokens") or count("input_sequence_length") or count("error_isl"),
        "asked_output_tokens": None,
        "output_tokens": (own if used is None else used) if ok else None,
        "chunks": len(gaps) + 1 if ok and gaps is not None else None,
        "gaps_s": gaps if ok else None,
        "cached_tokens": count("usage_prompt_cache_read_tokens"),
        "text": None,
        "status": status,
        "error": str(error.text("message") or error.text("type")) if failed else None,
    }, bool(ok and used is not None and own is not None and own != used)


def _possible(
    where: str, ttft_s: float | None, e2e_s: float | None, gaps_s: list[float] | None, took_s: float | None
) -> None:
    """Raise UserError where the times of an answer contradict each other. All but `took_s` come from one clock, and of
    chunks with content only; what an answer without its last chunk took is longer."""

    def apart(one: float, other: float) -> bool:
        return abs(one - other) > max(APART_S, APART_SHARE * other)

    if took_s is not None and took_s < 0:
        raise UserError(f"{where}: request_end_ns is {-took_s:.6g} s before request_start_ns; allowed: not before it")
    if e2e_s is None:
        return
    if took_s is not None and took_s < e2e_s and apart(e2e_s, took_s):
        raise UserError(f"{where}: request_latency is {e2e_s:.6g} s, and from request_start_ns to request_end_ns there "
                        f"are {took_s:.6g}; allowed: at most that")  # fmt: skip
    if ttft_s is None:
        return
    parts = ttft_s + sum(gaps_s or [])
    if e2e_s < ttft_s - 1e-6 or (gaps_s and apart(e2e_s, parts)):
        raise UserError(f"{where}: request_latency is {e2e_s:.6g} s, time_to_first_token {ttft_s:.6g} and "
                        f"inter_chunk_latency {sum(gaps_s or []):.6g} in all; allowed: they add up to request_latency, "
                        f"within {1000 * APART_S:g} ms or {APART_SHARE:.0%}")  # fmt: skip
