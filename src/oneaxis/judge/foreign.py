"""What another load generator recorded, as one record: a table of requests, the load, and what its file cannot say.

Files of `vllm bench serve`, guidellm and AIPerf are read (`vllm_bench`, `guidellm`, `aiperf`); docs/judge-others.md
says what of each. Every figure is computed again from the requests, by the definitions of `oneaxis.load.metrics` as far
as the files go, and by the same one in both arms:

- A request that failed, or was cut off by the tool, is a miss: its latencies are infinite, and a percentile that falls
  on it is *not reached* (None).
- TTFT from the moment at which the request was to be sent where all files say it alike, else from its sending. E2E to
  the last token, in the same way.
- TPOT = (last token - first) / (output tokens - 1).
- ITL. The files hold arrivals of chunks and no count of the tokens in each. With one token a chunk a gap is a sample.
  Else each chunk of a request is taken to hold the mean, output tokens / chunks: a gap is that many samples of
  gap / mean. Their sum is right whatever the packing, and so is `itl_mean_ms` (but for the first chunk, taken as mean);
  a percentile is right where the packing is even, which no file shows.
- Tokens per second and rates over the time from the first request sent to the last token of any.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from oneaxis.errors import UserError
from oneaxis.load.metrics import PERCENTILES

REQUEST_SCHEMA = pl.Schema(
    {
        "prompt": pl.String(),
        "intended_s": pl.Float64(),
        "sent_s": pl.Float64(),
        "ttft_s": pl.Float64(),
        "e2e_s": pl.Float64(),
        "prompt_tokens": pl.Int64(),
        "asked_output_tokens": pl.Int64(),
        "output_tokens": pl.Int64(),
        "chunks": pl.Int64(),
        "gaps_s": pl.List(pl.Float64()),
        "cached_tokens": pl.Int64(),
        "text": pl.String(),
        "status": pl.String(),
        "error": pl.String(),
    }
)
"""One row per request that was sent, in the order of sending; null: the file does not say. `prompt` and `text` (the
answer) are digests. `intended_s`, `sent_s` in seconds on one clock of the file's; `ttft_s`, `e2e_s` from `sent_s`;
`gaps_s` between chunks. `asked_output_tokens`: where the server had to give exactly as many. `status`: ok, failed, or
cut off by the tool."""

HEAD_BYTES = 4096
SCHEDULE = "the schedule"
"""`Run.intended_is` of moments that were drawn before the run: only against these is the client's lag known."""
LATENCIES = ("ttft", "tpot", "e2e", "itl")
METRICS = (*(f"{name}_p{percent}_ms" for name in LATENCIES for percent in PERCENTILES),
           *(f"{name}_mean_ms" for name in LATENCIES), "output_tok_s", "achieved_rate_rps", "failed")  # fmt: skip
OF_A_CLASS = ("attainment", "goodput_tok_s")
"""Metrics that there are once bounds are given."""


@dataclass(frozen=True)
class Bound:
    """What a request has to keep to count as good; None: no bound. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Latency -> its bound."""
        bounds = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: bound for name, bound in bounds.items() if bound is not None}


@dataclass(frozen=True)
class Run:
    """One run of a load generator under one load."""

    tool: str
    version: str | None
    source: Path
    model: str
    level: str
    """The load, as a sweep's cells are labelled: r2 (2 requests/s), u4 (4 users, closed loop), all (at once), ..."""
    asked_rps: float | None
    """Of an open loop at one rate."""
    random_arrivals: bool
    started_at: float | None
    """Unix time, to order runs."""
    intended_is: str | None
    """What `intended_s` is, in words (`SCHEDULE`, or something after it); None: it is not known."""
    settings: Mapping[str, Any]
    """Section -> its settings, without the load: what may be an axis."""
    load: Mapping[str, Any]
    """What the load is beside its level: two arms must have the same."""
    conditions: Mapping[str, Any]
    """Client, platform: two arms should have the same."""
    warmup: str | None
    """What was sent before what is measured; None: the file does not say."""
    requests: pl.DataFrame
    notes: Sequence[str] = field(default_factory=tuple)
    """What was corrected in reading, and what the file shows of the tool's own faults."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    @property
    def ok(self) -> pl.DataFrame:
        """The requests that succeeded."""
        return self.requests.filter(pl.col("status") == "ok")


# --- which files ----------------------------------------------------------------------------------------------------


def is_foreign(path: Path) -> bool:
    """Whether a path (of a file, several joined by commas, or a folder) is for this module; broken files too."""
    parts = _parts(path)
    return len(parts) > 1 or path.is_file() or any(map(sniff, _inside(path)))


def read_arm(path: Path) -> list[Run]:
    """The runs under a path: each file, or each load in it, is one.

    Raises:
        UserError: for a file that is none of these tools', is broken, or holds no requests that can be used; in a
            folder too, where it would be missed as a repetition.
    """
    files = []
    for part in _parts(path):
        found = _results(part) if part.is_dir() else [part]
        if not found:
            raise UserError(f"{part}: holds no results; allowed: {FORMATS}")
        files += found
    doubled = {file for file in files if files.count(file) > 1}
    if doubled:
        raise UserError(f"{sorted(doubled)[0]}: given twice; allowed: each run once")
    return [checked(run) for file in files for run in _read(file)]


FORMATS = "`vllm bench serve --save-result --save-detailed`, guidellm's benchmarks.json, AIPerf's profile_export.jsonl"


def _parts(path: Path) -> list[Path]:
    text = str(path)
    return [path] if path.exists() or "," not in text else [Path(part) for part in text.split(",") if part]


BESIDE = re.compile(
    r".+\.pytorch\.json|"
    r"(inputs|outputs|run_config|mlflow_export)\.json|(gpu_telemetry|server_metrics)_export\.jsonl?|"
    r".+_(timeslices|server_metrics|aggregate|collated|sweep)\.json|"
    r".+_(raw|server_metrics|gpu_telemetry|network_latency|accuracy)\.jsonl"
)
"""Names of what the tools leave beside their results: `vllm bench serve` for PyTorch's dashboard, AIPerf of what it
sent and of other sources (0.13, `config/artifacts.py`; with a prefix of the user's before `_`). guidellm leaves none
in JSON."""


def _inside(path: Path) -> list[Path]:
    """The files in a folder that ought to be results; AIPerf gives each run a folder of its own."""
    if not path.is_dir() or (path / "artifacts").is_dir():
        return []
    files = [*path.glob("*.json"), *path.glob("*.jsonl")]
    for depth in ("*", "*/*"):
        files += [*path.glob(f"{depth}/profile_export*.json"), *path.glob(f"{depth}/profile_export*.jsonl")]
    return sorted(file for file in files if file.is_file() and not BESIDE.fullmatch(file.name))


def _results(folder: Path) -> list[Path]:
    """The files of results in a folder.

    Raises:
        UserError: for a file that is none, and nothing that a tool leaves beside.
    """
    from oneaxis.judge import aiperf

    files = []
    for file in _inside(folder):
        kind = sniff(file)
        if kind is None:
            fault = "of no format that is read here" if file.stat().st_size else "empty"
            raise UserError(f"{file}: {fault}; allowed in a folder of repetitions: {FORMATS}, and nothing else (take "
                            "it out, or name the files, joined by commas)")  # fmt: skip
        # A summary of AIPerf's stands for the records beside it, and those are read.
        files.append(aiperf.records_and_summary(file)[0] if kind == "aiperf summary" else file)
    return sorted(set(files))


def sniff(path: Path) -> str | None:
    """Whose file this is, from its first bytes: `vllm`, `guidellm`, `aiperf`, `aiperf summary`, or None."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).decode("utf-8", errors="replace")
    if '"benchmark_phase"' in head and path.suffix == ".jsonl":
        return "aiperf"
    if '"aiperf_version"' in head:
        return "aiperf summary"
    if '"guidellm_version"' in head:
        return "guidellm"
    if re.search(r'"(endpoint_type|backend)"', head) and '"num_prompts"' in head:
        return "vllm"
    return None


def _read(path: Path) -> list[Run]:
    from oneaxis.judge import aiperf, guidellm, vllm_bench

    if not path.is_file():
        raise UserError(f"{path}: no such file; allowed: {FORMATS}")
    if not path.stat().st_size:
        raise UserError(f"{path}: empty; allowed: {FORMATS}")
    kind = sniff(path)
    if kind is None:
        raise UserError(f"{path}: of no format that is read here; allowed: {FORMATS}")
    if kind == "vllm":
        return vllm_bench.read(path)
    return guidellm.read(path) if kind == "guidellm" else aiperf.read(path)


# --- checks that all formats share ----------------------------------------------------------------------------------


def checked(run: Run) -> Run:
    """The run itself.

    Raises:
        UserError: it has no requests, or none that succeeded.
    """
    if run.requests.is_empty():
        raise UserError(f"{run.source}: holds no request; allowed: a run with some")
    if run.ok.is_empty():
        errors = run.requests["error"].drop_nulls().to_list()
        first = f": {_line(errors[0])}" if errors else ""
        raise UserError(f"{run.source}: all {run.requests.height} requests failed{first}; allowed: a run with answers")
    return run


def _line(text: str) -> str:
    """The last line of an error, which names it where there is a traceback."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:120]


# --- metrics of one run ---------------------------------------------------------------------------------------------


def basis(runs: Iterable[Run]) -> str | None:
    """From which moment latencies count in all of these runs: what `intended_is` says of each; None: from sending."""
    said = {run.intended_is if not run.requests["intended_s"].null_count() else None for run in runs}
    return said.pop() if len(said) == 1 else None


def refusals(runs: Sequence[Run]) -> dict[str, str]:
    """Metric, or the part of its name before `_`, -> why it cannot be had alike from all of these runs."""
    found: dict[str, str] = {}
    for run in runs:
        ok = run.ok
        lacking = {
            name: f"{run.name}: {why}"
            for name, column, why in (
                ("ttft", "ttft_s", "has no first token of its requests (no streaming)"),
                ("e2e", "e2e_s", "has no end of its requests"),
                ("output", "output_tokens", "does not say how many tokens were made"),
                ("achieved", "sent_s", "does not say when its requests were sent"),
                ("itl", "chunks", "does not say in how many chunks the answers came"),
            )
            if ok[column].null_count()
        }
        if "output" in lacking or "ttft" in lacking:
            for name in ("tpot", "itl"):
                lacking[name] = lacking.get("output") or lacking["ttft"]
        if "achieved" in lacking:
            lacking["output"] = lacking["achieved"]
        if ok["gaps_s"].null_count():
            why = f"{run.name}: {run.tool} keeps the first and the last arrival of an answer, and none between"
            lacking |= {f"itl_p{percent}_ms": why for percent in PERCENTILES}
        found = lacking | found
    return found


def one_token_a_chunk(runs: Iterable[Run]) -> bool:
    """Whether every answer came in as many chunks as it has tokens."""
    return all((run.ok["chunks"] == run.ok["output_tokens"]).all() for run in runs)


def latencies(run: Run, from_intended: bool) -> dict[str, np.ndarray]:
    """Per request in milliseconds, in the table's order; infinite for a miss, nan where undefined (one token has no
    TPOT)."""
    table = run.requests
    ok = (table["status"] == "ok").to_numpy()
    columns = {name: table[name].cast(pl.Float64).to_numpy() for name in ("ttft_s", "e2e_s", "output_tokens", "chunks")}
    waited = (table["sent_s"] - table["intended_s"]).to_numpy() if from_intended else np.zeros(len(ok))
    decode = columns["e2e_s"] - columns["ttft_s"]
    tokens = columns["output_tokens"]
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, decode / (tokens - 1), np.nan)
        # The first chunk holds the mean too; where there are more chunks than tokens, some are empty, and it holds one.
        after_first = tokens - np.maximum(tokens / columns["chunks"], 1.0)
    found = {"ttft": waited + columns["ttft_s"], "e2e": waited + columns["e2e_s"], "tpot": tpot, "decode": decode}
    made = {name: np.where(ok, 1000 * values, np.inf) for name, values in found.items()}
    made["after_first"] = np.where(ok, after_first, np.nan)
    return made


def itl_samples(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """ITL in milliseconds a token (see the module), and how many tokens each stands for; of a request that failed
    infinite for as many tokens as answers have on average, since nobody knows what it would have had."""
    share = pl.max_horizontal(pl.col("output_tokens") / pl.col("chunks"), 1.0)
    gaps = run.ok.select("gaps_s", share=share).filter(pl.col("gaps_s").list.len() > 0).explode("gaps_s")
    values, weights = (1000 * gaps["gaps_s"] / gaps["share"]).to_numpy(), gaps["share"].to_numpy()
    missed = run.requests.height - run.ok.height
    if missed:
        each = max(float(run.ok["output_tokens"].sum()) / run.ok.height - 1, 1.0)
        values, weights = np.append(values, math.inf), np.append(weights, missed * each)
    return values, weights


def weighted_percentile(values: np.ndarray, weights: np.ndarray, percent: int) -> float | None:
    """Nearest-rank percentile of values that stand for several each; None when infinite (not reached) or no values."""
    if not len(values):
        return None
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    # With weights of 1 the ceil(percent/100 * n)-th; what is equal but for rounding counts as reached.
    place = int(np.searchsorted(reached, reached[-1] * (percent / 100 - 1e-12)))
    value = float(values[order][place])
    return value if math.isfinite(value) else None


def good(run: Run, bound: Bound, from_intended: bool) -> np.ndarray:
    """Whether each request kept its bounds. A miss did not; nor did an answer without a TPOT, unless one token was all
    that was asked for."""
    timed = latencies(run, from_intended)
    kept = (run.requests["status"] == "ok").to_numpy()
    one = (run.requests["asked_output_tokens"] == 1).fill_null(False).to_numpy()
    for name, limit in bound.parts.items():
        with np.errstate(invalid="ignore"):
            within = timed[name] <= limit
        kept = kept & (within | one if name == "tpot" else within)
    return np.asarray(kept)


def metric(run: Run, name: str, from_intended: bool, bound: Bound | None = None) -> float | None:
    """One of `METRICS`, or with bounds of `OF_A_CLASS`; None: not reached, or undefined (no answer has two tokens).
    The caller knows of `refusals`."""
    if bound and name in OF_A_CLASS:
        kept = good(run, bound, from_intended)
        if name == "attainment":
            return float(kept.mean())
        return float(run.requests.filter(pl.Series(kept))["output_tokens"].sum()) / window_s(run)
    if name == "failed":
        return float(run.requests.height - run.ok.height)
    if name == "output_tok_s":
        return float(run.ok["output_tokens"].sum()) / window_s(run)
    if name == "achieved_rate_rps":
        return achieved_rps(run)
    kind, what = name.removesuffix("_ms").split("_")
    if kind == "itl" and what != "mean":
        return weighted_percentile(*itl_samples(run), int(what[1:]))
    timed = latencies(run, from_intended)
    if kind == "itl":
        return itl_mean(timed)
    value = mean(timed[kind]) if what == "mean" else nearest_rank(timed[kind], int(what[1:]))
    return value if math.isfinite(value) else None


def mean(values: np.ndarray) -> float:
    """Without undefined values; infinite with a miss, nan without values."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def nearest_rank(values: np.ndarray, percent: int) -> float:
    """The ceil(percent/100 * n)-th smallest, without undefined values; infinite where it is not reached."""
    known = values[~np.isnan(values)]
    place = -(-percent * len(known) // 100) - 1
    return float(np.partition(known, place)[place]) if len(known) else math.nan


def itl_mean(timed: Mapping[str, np.ndarray], rows: np.ndarray | None = None) -> float | None:
    """Milliseconds per token after the first chunk, over the answers that came; None where none has any.

    Misses are left out here and only here: a mean with one of them is infinite.
    """
    decode, tokens = (timed[name] if rows is None else timed[name][rows] for name in ("decode", "after_first"))
    known = np.isfinite(decode) & np.isfinite(tokens) & (tokens > 0)
    total = float(tokens[known].sum())
    return float(decode[known].sum()) / total if total else None


def window_s(run: Run) -> float:
    """From the first request sent to the last token of any."""
    ended = (run.ok["sent_s"] + run.ok["e2e_s"]).max()
    first = run.requests["sent_s"].min()
    assert isinstance(ended, float)
    assert isinstance(first, float)
    return max(ended - first, 1e-9)


def achieved_rps(run: Run, column: str = "sent_s") -> float | None:
    """Requests a second between the first and the last moment of a column; None for fewer than two moments."""
    moments = run.requests[column].drop_nulls()
    length = float(moments.max()) - float(moments.min()) if len(moments) > 1 else 0.0  # type: ignore[arg-type]
    return (len(moments) - 1) / length if length > 0 else None
