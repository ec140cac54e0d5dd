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

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.foreign import REQUEST_SCHEMA, Run, number, numbers, parse, text_of

TOOL = "AIPerf"
RATES = ("constant", "poisson", "gamma")


def read(path: Path) -> list[Run]:
    """The run of a file of records, or of the summary beside one.

    Raises:
        UserError: it is broken, or one of the two files is not there.
    """
    records, summary = _both(path)
    about = parse(text_of(summary), summary)
    prompts = _prompts(records.with_name("inputs.json"))
    rows, warmups, retokenised = [], 0, 0
    for place, line in enumerate(text_of(records).splitlines(), 1):
        if not line.strip():
            continue
        record = parse(line, records, place)
        metadata, metrics = (record.get(key) if isinstance(record, dict) else None for key in ("metadata", "metrics"))
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            raise UserError(f"{records}:{place}: has no metadata or metrics; allowed: a record of AIPerf")
        if metadata.get("benchmark_phase") == "warmup":
            warmups += 1
            continue
        row, differs = _request(record, prompts, f"{records}:{place}")
        rows.append(row)
        retokenised += differs
    notes = []
    if retokenised:
        notes.append(f"the client's tokenizer counted other output tokens than the server's usage in {retokenised} "
                     "answers; usage is taken, so that TPOT, ITL and tokens/s differ from AIPerf's own")  # fmt: skip
    cut = sum(row["status"] == "cut" for row in rows)
    if cut:
        notes.append(f"{cut} requests were cancelled by the tool, and count as misses")
    phase = _phase(about, summary)
    rated = phase.get("type") in RATES
    begun = min((row["sent_s"] for row in rows), default=0)
    for row in rows:
        # Nanoseconds since 1970 are more than a double holds: the difference first.
        row["intended_s"] = (row["intended_s"] - begun) / 1e9 if rated and row["intended_s"] is not None else None
        row["sent_s"] = (row["sent_s"] - begun) / 1e9
    config = about.get("input_config", {})
    models = [str(item.get("name")) for item in config.get("models", {}).get("items", [])]
    endpoint = config.get("endpoint", {})
    return [Run(
        tool=TOOL, version=about.get("aiperf_version"), source=records, model=", ".join(models), level=_level(phase),
        asked_rps=phase.get("rate") if rated else None, random_arrivals=phase.get("type") != "constant",
        started_at=begun / 1e9 or None, intended_is="the issue by the rate limiter" if rated else None,
        settings={"model": {"id": ", ".join(models)}, "declared": {}},
        load={"type": phase.get("type"), "concurrency": phase.get("concurrency"), "endpoint": endpoint.get("type"),
              "streaming": endpoint.get("streaming"), "extra": endpoint.get("extra")},
        conditions={"tool": f"{TOOL} {about.get('aiperf_version')}"}, warmup=f"{warmups} requests",
        requests=pl.DataFrame(rows, schema=REQUEST_SCHEMA).sort("sent_s", maintain_order=True), notes=notes,
    )]  # fmt: skip


def _both(path: Path) -> tuple[Path, Path]:
    """The records and the summary, given one of them."""
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


def _phase(about: Any, summary: Path) -> Mapping[str, Any]:
    """The phase that was measured, as configured."""
    phases = about.get("input_config", {}).get("phases") if isinstance(about, dict) else None
    measured = [phase for phase in phases or [] if phase.get("kind") != "warmup"]
    if len(measured) != 1:
        raise UserError(f"{summary}: has {len(measured)} measured phases; allowed: one load a file")
    return dict(measured[0])


def _level(phase: Mapping[str, Any]) -> str:
    if phase.get("type") in RATES:
        return f"r{phase.get('rate'):g}"
    if phase.get("concurrency"):
        return f"u{phase['concurrency']}"
    return {"fixed_schedule": "x1"}.get(str(phase.get("type")), str(phase.get("type")))


def _prompts(path: Path) -> dict[tuple[str, int], str]:
    """(conversation, turn) -> a digest of what was sent."""
    if not path.is_file():
        return {}
    digests = {}
    document = parse(text_of(path), path)
    for session in document.get("data", []) if isinstance(document, dict) else []:
        for turn, payload in enumerate(session.get("payloads", [])):
            asked = payload.get("messages") or payload.get("prompt")
            if asked:
                digests[str(session.get("session_id")), turn] = hashlib.sha256(str(asked).encode()).hexdigest()[:16]
    return digests


def _request(
    record: Mapping[str, Any], prompts: Mapping[tuple[str, int], str], where: str
) -> tuple[dict[str, Any], bool]:
    """One request, as a row of `REQUEST_SCHEMA` but in nanoseconds, and whether the client counted other tokens."""
    metadata, metrics = record["metadata"], record["metrics"]

    def value(name: str, unit: str) -> Any:
        found = metrics.get(name)
        if found is None:
            return None
        if found.get("unit") != unit:
            raise UserError(f"{where}: {name} is in {found.get('unit')}; allowed: {unit}")
        return found.get("value")

    def seconds(name: str) -> float | None:
        found = value(name, "ms")
        return None if found is None else number(found, f"{where}: {name}") / 1000

    def count(name: str) -> int | None:
        found = value(name, "tokens")
        return None if found is None else int(number(found, f"{where}: {name}"))

    failed = record.get("error") is not None
    status = "cut" if metadata.get("was_cancelled") else "failed" if failed else "ok"
    ok = status == "ok"
    gaps = value("inter_chunk_latency", "ms")
    ttft = seconds("time_to_first_token")
    own, used = count("output_sequence_length"), count("usage_completion_tokens")
    if gaps is None and ttft is not None:
        # One chunk has no gaps, and then AIPerf leaves the list out.
        gaps = []
    if gaps is not None:
        gaps = [gap / 1000 for gap in numbers(gaps, f"{where}: inter_chunk_latency")]
    issued, sent = metadata.get("credit_issued_ns"), metadata.get("request_start_ns")
    error = record.get("error") or {}
    return {
        "prompt": prompts.get((str(metadata.get("conversation_id")), metadata.get("turn_index") or 0)),
        "intended_s": None if issued is None else int(number(issued, f"{where}: credit_issued_ns")),
        "sent_s": int(number(sent, f"{where}: request_start_ns")),
        "ttft_s": ttft if ok else None,
        "e2e_s": seconds("request_latency") if ok else None,
        "prompt_tokens": count("usage_prompt_tokens") or count("input_sequence_length") or count("error_isl"),
        "asked_output_tokens": None,
        "output_tokens": (own if used is None else used) if ok else None,
        "chunks": len(gaps) + 1 if ok and gaps is not None else None,
        "gaps_s": gaps if ok else None,
        "cached_tokens": count("usage_prompt_cache_read_tokens"),
        "text": None,
        "status": status,
        "error": str(error.get("message") or error.get("type")) if failed else None,
    }, bool(ok and used is not None and own is not None and own != used)
