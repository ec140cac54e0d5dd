"""guidellm's `benchmarks.json`: a report of one benchmark a load, each with its requests by how they ended.

Read in the source of guidellm 0.8.1 (`schemas/base/{request_stats,info}.py`, `benchmark/schemas/`,
`scheduler/strategies.py`, `backends/openai/http.py`):

- Of an answer the first and the last arrival of text and the number of arrivals are kept, none between.
  `inter_token_latency_ms` is (last - first) / (output tokens - 1), one a request: TPOT, not ITL.
- Output tokens are the server's usage; where it sends none, what was *asked* (and the file does not say which); where
  nothing was asked, chunks are counted as tokens (`output_tokens` then, with no `output_metrics.total_tokens`).
- `targeted_start` is the schedule of a constant rate. With `kind=poisson` it is set before the start is known, and the
  requests were seen to be sent at once: such times are no schedule here, and the rate that was achieved tells.
- Requests that overlap the warm-up or cool-down are in the lists; here only those sent in between count.
- `--constraint kind=max_duration` cuts requests off (`incomplete`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.foreign import REQUEST_SCHEMA, SCHEDULE, Run, number, parse, text_of

TOOL = "guidellm"
STATUS = {"successful": "ok", "errored": "failed", "incomplete": "cut"}
SCHEDULED = ("constant", "poisson", "trace")
NO_TIME_S = 86_400.0
"""A target this far from the sending is no moment of the run."""


def read(path: Path) -> list[Run]:
    """One run for each benchmark of a report.

    Raises:
        UserError: it is broken, or lacks requests.
    """
    report = parse(text_of(path), path)
    benchmarks = report.get("benchmarks") if isinstance(report, dict) else None
    if not isinstance(benchmarks, list) or not benchmarks:
        raise UserError(f"{path}: holds no benchmarks; allowed: a report of guidellm that ran to its end")
    return [_run(benchmark, report, path) for benchmark in benchmarks]


def _run(benchmark: Mapping[str, Any], report: Mapping[str, Any], path: Path) -> Run:
    config, state = benchmark.get("config"), benchmark.get("scheduler_state")
    groups = benchmark.get("requests")
    if not isinstance(config, dict) or not isinstance(groups, dict) or not isinstance(state, dict):
        raise UserError(f"{path}: a benchmark has no config, scheduler_state or requests; allowed: guidellm 0.8")
    for group, counted in (("successful", "successful_requests"), ("errored", "errored_requests")):
        held, made = len(groups.get(group) or []), state.get(counted)
        if isinstance(made, int) and held < made:
            raise UserError(f"{path}: holds {held} of {made} {group} requests; allowed: all, without a "
                            "sample_size in --metrics")  # fmt: skip
    strategy, backend = config.get("strategy", {}), config.get("backend", {})
    kind = strategy.get("type_")
    rows = [_request(found, STATUS[group], f"{path}: {group}[{place}]")
            for group in STATUS for place, found in enumerate(groups.get(group) or [])]  # fmt: skip
    rows = [row for row in rows if row["sent_s"] is not None]
    notes = []
    rows, left_out = _measured(rows, benchmark, config)
    if left_out:
        notes.append(f"{left_out} requests sent in the warm-up or cool-down are left out")
    off = [row for row in rows if row["intended_s"] is not None and abs(row["intended_s"] - row["sent_s"]) > NO_TIME_S]
    if kind not in SCHEDULED or off:
        rows = [row | {"intended_s": None} for row in rows]
    if kind in SCHEDULED and off:
        notes.append(f"the schedule of {len(off)} requests is no time of the run (targeted_start "
                     f"{off[0]['intended_s']:.3f}): guidellm began before it knew its start")  # fmt: skip
    cut = sum(row["status"] == "cut" for row in rows)
    if cut:
        notes.append(f"{cut} requests were cut off at the end of the window, and count as misses "
                     "(--constraint kind=max_requests cuts none)")  # fmt: skip
    # One clock, and numbers small enough to keep microseconds.
    begun = min((row["sent_s"] for row in rows), default=0.0)
    for row in rows:
        row["sent_s"] -= begun
        row["intended_s"] = None if row["intended_s"] is None else row["intended_s"] - begun
    labels = report.get("config", {}).get("metadata", {}).get("labels", {})
    about = report.get("metadata", {})
    scheduled = kind in SCHEDULED and not off
    return Run(
        tool=TOOL, version=about.get("guidellm_version"), source=path, model=str(backend.get("model")),
        level=_level(strategy), asked_rps=strategy.get("rate") if kind in ("constant", "poisson") else None,
        random_arrivals=kind == "poisson", started_at=begun or None, intended_is=SCHEDULE if scheduled else None,
        settings={"model": {"id": backend.get("model")}, "declared": dict(labels)},
        load={"strategy": kind, "request_format": backend.get("request_format"), "stream": backend.get("stream"),
              "extras": backend.get("extras")},
        conditions={"tool": f"{TOOL} {about.get('guidellm_version')}", "python": about.get("python_version"),
                    "platform": about.get("platform")},
        warmup=f"warm-up {_phase(config.get('warmup'))}, cool-down {_phase(config.get('cooldown'))}",
        requests=pl.DataFrame(rows, schema=REQUEST_SCHEMA).sort("sent_s", maintain_order=True), notes=notes,
    )  # fmt: skip


def _level(strategy: Mapping[str, Any]) -> str:
    kind = strategy.get("type_")
    if kind in ("constant", "poisson"):
        return f"r{strategy.get('rate'):g}"
    if kind == "concurrent":
        return f"u{strategy.get('streams')}"
    return {"synchronous": "u1", "throughput": "all", "trace": "x1"}.get(str(kind), str(kind))


def _phase(phase: Any) -> str:
    if not isinstance(phase, dict) or (phase.get("percent") is None and phase.get("value") is None):
        return "none"
    return f"{phase['percent']:.0%}" if phase.get("percent") is not None else f"{phase['value']:g}"


def _measured(
    rows: Sequence[dict[str, Any]], benchmark: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """The requests that were sent between warm-up and cool-down, and how many were not."""
    if _phase(config.get("warmup")) == _phase(config.get("cooldown")) == "none":
        return list(rows), 0
    window = benchmark.get("scheduler_metrics", {})
    low, high = window.get("measure_start_time", 0.0), window.get("measure_end_time", float("inf"))
    kept = [row for row in rows if low <= row["sent_s"] <= high]
    return kept, len(rows) - len(kept)


def _request(found: Mapping[str, Any], status: str, where: str) -> dict[str, Any]:
    """One request, as a row of `REQUEST_SCHEMA`."""
    times = found.get("info", {}).get("timings", {})

    def moment(name: str) -> float | None:
        value = times.get(name)
        return None if value is None else number(value, f"{where}: {name}", least=None)

    sent, first, last = moment("request_start"), moment("first_token_iteration"), moment("last_token_iteration")
    if status == "ok" and (sent is None or last is None):
        raise UserError(f"{where}: has no request_start or last_token_iteration; allowed: a streamed answer's times")
    given, made = found.get("input_metrics") or {}, found.get("output_metrics") or {}
    prompt, exactly = _asked(found.get("request_args"), where)
    ok = status == "ok"
    tokens = made.get("total_tokens")
    text = found.get("output")
    return {
        "prompt": prompt,
        "intended_s": moment("targeted_start"),
        "sent_s": sent if sent is not None else moment("resolve_start"),
        "ttft_s": number(first - sent, f"{where}: time to first token") if ok and first and sent else None,
        "e2e_s": number(last - sent, f"{where}: time to last token") if ok and last and sent else None,
        "prompt_tokens": _count(given.get("total_tokens"), f"{where}: prompt tokens"),
        "asked_output_tokens": exactly,
        "output_tokens": _count(tokens, f"{where}: output tokens") if ok else None,
        "chunks": _count(times.get("token_iterations"), f"{where}: token_iterations") if ok else None,
        "gaps_s": None,
        "cached_tokens": _count(given.get("cached_tokens"), f"{where}: cached_tokens"),
        "text": hashlib.sha256(text.encode()).hexdigest()[:16] if isinstance(text, str) and text else None,
        "status": status,
        "error": found.get("info", {}).get("error"),
    }


def _count(value: Any, where: str) -> int | None:
    return None if value is None else int(number(value, where))


def _asked(arguments: Any, where: str) -> tuple[str | None, int | None]:
    """A digest of the prompt, and the output tokens where the server had to give exactly as many."""
    if not isinstance(arguments, str):
        return None, None
    body = parse(arguments, Path(where)).get("body") or {}
    prompt = body.get("messages") or body.get("prompt")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    digest = hashlib.sha256(str(prompt).encode()).hexdigest()[:16] if prompt else None
    return digest, int(limit) if limit and body.get("ignore_eos") else None
