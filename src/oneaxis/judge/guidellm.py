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

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.errors import UserError
from oneaxis.judge.document import LEAST_RPS, LONGEST_S, Node, as_node, digest, parse, text_of
from oneaxis.judge.foreign import REQUEST_SCHEMA, SCHEDULE, Run

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
    report = as_node(parse(text_of(path), str(path)), str(path))
    benchmarks = report.nodes("benchmarks")
    if not benchmarks:
        raise UserError(f"{path}: holds no benchmarks; allowed: a report of guidellm that ran to its end")
    return [_run(benchmark, report, path) for benchmark in benchmarks]


def _run(benchmark: Node, report: Node, path: Path) -> Run:
    config, state, groups = (benchmark.node(key) for key in ("config", "scheduler_state", "requests"))
    if not (config.value and state.value and groups.value):
        raise UserError(f"{path}: a benchmark has no config, scheduler_state or requests; allowed: guidellm 0.8")
    for group, counted in (("successful", "successful_requests"), ("errored", "errored_requests")):
        held, made = len(groups.nodes(group)), state.whole(counted)
        if made is not None and held < made:
            raise UserError(f"{path}: holds {held} of {made} {group} requests; allowed: all, without a "
                            "sample_size in --metrics")  # fmt: skip
    strategy, backend = config.node("strategy"), config.node("backend")
    kind, rate = strategy.text("type_"), strategy.number("rate", least=LEAST_RPS)
    if kind in ("constant", "poisson") and rate is None:
        raise UserError(f"{strategy.at('rate')} is missing; allowed: requests a second")
    rows = [_request(found, STATUS[group]) for group in STATUS for found in groups.nodes(group)]
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
    labels = report.node("config").node("metadata").node("labels")
    about = report.node("metadata")
    version, model = about.text("guidellm_version"), backend.text("model")
    scheduled = kind in SCHEDULED and not off
    return Run(
        tool=TOOL, version=version, source=path, model=str(model),
        level=_level(strategy, kind, rate), asked_rps=rate if kind in ("constant", "poisson") else None,
        random_arrivals=kind == "poisson", started_at=begun or None, intended_is=SCHEDULE if scheduled else None,
        settings={"model": {"id": model}, "declared": {key: labels.text(key) for key in labels.value}},
        load={"strategy": kind, "request_format": backend.raw("request_format"), "stream": backend.raw("stream"),
              "extras": backend.raw("extras")},
        conditions={"tool": f"{TOOL} {version}", "python": about.text("python_version"),
                    "platform": about.text("platform")},
        warmup=f"warm-up {_phase(config.node('warmup'))}, cool-down {_phase(config.node('cooldown'))}",
        requests=pl.DataFrame(rows, schema=REQUEST_SCHEMA).sort("sent_s", maintain_order=True), notes=notes,
    )  # fmt: skip


def _level(strategy: Node, kind: str | None, rate: float | None) -> str:
    if kind in ("constant", "poisson"):
        return f"r{rate:g}"
    if kind == "concurrent":
        return f"u{strategy.whole('streams')}"
    return {"synchronous": "u1", "throughput": "all", "trace": "x1"}.get(str(kind), str(kind))


def _phase(phase: Node) -> str:
    percent, value = phase.number("percent"), phase.number("value")
    if percent is None and value is None:
        return "none"
    return f"{value:g}" if percent is None else f"{percent:.0%}"


def _measured(rows: Sequence[dict[str, Any]], benchmark: Node, config: Node) -> tuple[list[dict[str, Any]], int]:
    """The requests that were sent between warm-up and cool-down, and how many were not."""
    if _phase(config.node("warmup")) == _phase(config.node("cooldown")) == "none":
        return list(rows), 0
    window = benchmark.node("scheduler_metrics")
    low, high = window.number("measure_start_time"), window.number("measure_end_time")
    kept = [row for row in rows if (low or 0.0) <= row["sent_s"] and (high is None or row["sent_s"] <= high)]
    return kept, len(rows) - len(kept)


STEP_S = 0.001
"""Moments of one request are of a wall clock, which may be set back a little between two of them."""


def _request(found: Node, status: str) -> dict[str, Any]:
    """One request, as a row of `REQUEST_SCHEMA`."""
    info = found.node("info")
    times = info.node("timings")
    order = ("request_start", "first_token_iteration", "last_token_iteration", "request_end")
    told = [(name, moment) for name in order if (moment := times.number(name, least=None)) is not None]
    moments = dict(told)
    sent, first, last = (moments.get(name) for name in order[:3])
    ok = status == "ok"
    if ok and (sent is None or last is None):
        raise UserError(f"{times.source}: {times.place} has no request_start or last_token_iteration; allowed: a "
                        "streamed answer's times")  # fmt: skip
    for (before, earlier), (after, later) in pairwise(told if ok else []):
        if not earlier - STEP_S <= later <= earlier + LONGEST_S:
            raise UserError(f"{times.at(after)} is {later:.6f}, {before} {earlier:.6f}; allowed: not before it, and at "
                            f"most {LONGEST_S:g} s after")  # fmt: skip
    given, made = found.node("input_metrics"), found.node("output_metrics")
    prompt, exactly = _asked(found)
    tokens, chunks = made.whole("total_tokens"), times.whole("token_iterations")
    return {
        "prompt": prompt,
        "intended_s": times.number("targeted_start", least=None),
        "sent_s": sent if sent is not None else times.number("resolve_start", least=None),
        "ttft_s": max(first - sent, 0.0) if ok and first is not None and sent is not None else None,
        "e2e_s": max(last - sent, 0.0) if ok and last is not None and sent is not None else None,
        "prompt_tokens": given.whole("total_tokens"),
        "asked_output_tokens": exactly,
        "output_tokens": tokens if ok else None,
        "chunks": chunks if ok else None,
        "gaps_s": None,
        "cached_tokens": given.whole("cached_tokens"),
        "text": digest(found.text("output")),
        "status": status,
        "error": info.text("error"),
    }


def _asked(found: Node) -> tuple[str | None, int | None]:
    """A digest of the prompt, and the output tokens where the server had to give exactly as many."""
    where = found.at("request_args")
    if not isinstance(found.raw("request_args"), str):
        return None, None
    body = as_node(parse(found.raw("request_args"), where), where).node("body")
    limit = body.whole("max_completion_tokens") or body.whole("max_tokens")
    prompt = body.raw("messages") or body.raw("prompt")
    return digest(prompt), limit if limit and body.flag("ignore_eos") else None
