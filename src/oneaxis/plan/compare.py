"""Plans beside a finished run: what the arithmetic predicts, what was measured, and their ratio (measured / predicted).

    weights       bytes by the config against the tensors' bytes in the checkpoint: exact
    kv            tokens of the KV cache by its size against what the engine reports: exact for whole blocks
    decode        the bandwidth ceiling of one stream against the fastest request; the step of the batch that ran, with
                  t0 = 0, against the median TPOT: the ratio is what the engine adds
    prefill       FLOPs by this machine's peaks against the fastest TTFT, and the median one
    transfer      prompt tokens that a split sent over its link against those that were prompted: 0 is no split
    slots         rate x tokens x time against the requests that the server saw running (Little's law)
    speculation   tokens a verification from the acceptance, per position and as if uniform, against those counted

Decode and prefill take the least loaded cell of the shape with the longest answers, and with the longest prompts.
Pure functions of the artifacts and the ceilings.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import ARTIFACTS
from oneaxis.errors import UserError
from oneaxis.plan import serving, speculation
from oneaxis.plan.hardware import IDENTITY, Device
from oneaxis.plan.model import Model, read_model
from oneaxis.report.results import Results, read_results

ARITHMETIC = {"none": "", "w4a16": "", "w8a8_fp8": "fp8", "w8a8_int8_dynamic": "int8", "w8a8_int8_static": "int8"}
"""Of the linears, by how they are stored; empty: that of the dtype."""
DTYPE_ARITHMETIC = {"bfloat16": "bf16", "float16": "bf16", "float32": "f32"}
KV_BYTES = {"auto": None, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Compared:
    """One prediction beside what was measured."""

    plan: str
    what: str
    unit: str
    predicted: float | None
    measured: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        """measured / predicted."""
        if self.predicted is None or self.measured is None or self.predicted == 0:
            return None
        return self.measured / self.predicted

    def as_row(self) -> dict[str, Any]:
        """For the table."""
        return {"plan": self.plan, "what": self.what, "unit": self.unit, "predicted": self.predicted,
                "measured": self.measured, "ratio": self.ratio, "note": self.note}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a comparison reads of a run."""

    results: Results
    checkpoint: Path
    model: Model
    realised: Mapping[str, Any]
    """What the engine ran (`resolved` of realised.json); empty where `serve` did not run."""

    @property
    def threads(self) -> int | None:
        """Of the engine; None on a GPU, or where it is not known."""
        threads = self.realised.get("threads")
        return threads if isinstance(threads, int) else None

    @property
    def hardware(self) -> Mapping[str, Any]:
        """That the sweep ran on, or `serve`."""
        for stage in ("sweep", "serve"):
            if stage in self.results.provenance:
                return dict(self.results.provenance[stage].get("hardware", {}))
        return {}


def read_run(path: Path) -> Run:
    """A project's root, an artifact folder, or a job's record.

    Raises:
        UserError: it is none, or neither `serve` nor `sweep` has run in it.
    """
    inside = path / ARTIFACTS
    folder = inside if inside.is_dir() else path
    results = read_results(folder)
    if results.table("sweep", "requests.parquet") is None and "serve" not in results.manifests:
        raise UserError(f"{path}: neither serve nor sweep has run there; allowed: a project's root, artifacts/, or "
                        "multirun/ID/points/POINT/rN of a run that has")  # fmt: skip
    for name in ("requests", "cells"):
        table = results.table("sweep", f"{name}.parquet")
        if table is not None and "level" not in table.columns:
            raise UserError(f"{folder}/sweep/{name}.parquet: has no column `level`; allowed: a sweep of this version: "
                            "`dvc repro sweep`")  # fmt: skip
    checkpoint = _checkpoint(results, folder)
    realised = results.document("serve", "realised.json") or {}
    model = read_model(checkpoint)
    served = realised.get("checkpoint", {})
    if served and bool(served.get("quantization_config")) != (model.storage.kind != "none" or model.storage.kv_fp8):
        raise UserError(f"{folder}: the engine served another checkpoint than {checkpoint}; allowed: artifacts of one "
                        "run: `dvc repro` brings them together")  # fmt: skip
    return Run(results, checkpoint, model, realised.get("resolved", {}))


def _checkpoint(results: Results, folder: Path) -> Path:
    """The one that was served, by the settings that the stages recorded."""
    settings = {name: results.section(name) for name in ("train", "quantize")}
    trained = settings["train"].get("kind", "none") != "none"
    quantized = any(settings["quantize"].get(key, "none") != "none" for key in ("kind", "kv"))
    stage = "quantize" if quantized else "train_dpo" if trained else "fetch_model"
    return folder / stage / "checkpoint"


def compare(run: Run, device: Device | None) -> list[Compared]:
    """Every plan that the run has something to say of.

    Args:
        device: the ceilings of the machine that the run ran on; None: what needs them is left out.
    """
    found = [*weights(run), *kv_cache(run)]
    if device is not None:
        found += [*decode(run, device), *prefill(run, device)]
    return [*found, *slots(run), *transferred(run), *speculated(run)]


def require_same(run: Run, hardware: Mapping[str, Any]) -> None:
    """Refuse to lay a run beside ceilings of another machine.

    Raises:
        UserError: the run's CPU is another.
    """
    there = {key: run.hardware.get(key) for key in IDENTITY}
    here = {key: hardware.get(key) for key in IDENTITY}
    if there != here:
        words = [f"{one['cpu']} with {one['cpus']} CPUs" for one in (there, here)]
        raise UserError(f"{run.results.folder}: ran on {words[0]}, and the ceilings are of {words[1]}; allowed: "
                        "measure on that machine, or --hardware NAME")  # fmt: skip


def require_same_kind(run: Run, device: Device) -> None:
    """Refuse to lay a run on a CPU beside a GPU's figures, and the other way round.

    Raises:
        UserError: naming both.
    """
    ran = str(run.realised.get("device") or "")
    kind = "cpu" if ran.startswith("cpu") else "gpu"
    if ran and kind != device.kind:
        raise UserError(f"{run.results.folder}: its engine ran on a {kind.upper()} ({ran}), and {device.name} is a "
                        f"{device.kind.upper()}; allowed: --hardware of the device that it ran on")  # fmt: skip


def weights(run: Run) -> list[Compared]:
    """Bytes of the checkpoint's tensors."""
    files = sorted(run.checkpoint.glob("*.safetensors"))
    if not files:
        return []
    size = sum(file.stat().st_size - 8 - _header_bytes(file) for file in files)
    return [Compared("kv", "weights as stored", "B", run.model.weight_bytes(), size,
                     f"{run.model.num_parameters:,} parameters, {run.model.storage.kind}")]  # fmt: skip


def _header_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return int(struct.unpack("<Q", opened.read(8))[0])


def _kv_dtype_bytes(run: Run) -> float:
    named = KV_BYTES.get(str(run.realised.get("kv_cache_dtype", "auto")))
    return named or run.model.kv_dtype_bytes


def kv_cache(run: Run) -> list[Compared]:
    """Tokens that the cache holds, where its size is a setting (a CPU's engine) and every layer keeps all."""
    size, block, told = (run.realised.get(key) for key in ("kv_cache_gib", "block_size", "kv_cache_tokens"))
    if not (size and block and told and run.model.uniform):
        return []
    per_token = run.model.kv_bytes_per_token(_kv_dtype_bytes(run))
    tokens = serving.cache_tokens(size * 2**30, per_token, block)
    note = f"{size:g} GiB of {per_token:,.0f} B a token in blocks of {block}"
    if run.realised.get("speculative"):
        note += "; a draft model's own cache is not counted"
    return [Compared("kv", "tokens of the KV cache", "tokens", tokens, told, note)]


# --- timings -------------------------------------------------------------------------------------------------


def _requests(run: Run) -> pl.DataFrame | None:
    """Those that ended well, with latencies in seconds; `cell` names shape and level."""
    table = run.results.table("sweep", "requests.parquet")
    if table is None:
        return None
    done = pl.col("done_s") - pl.col("first_token_s")
    return table.filter(pl.col("status") == "ok").with_columns(
        ttft_s=pl.col("first_token_s") - pl.col("sent_s"),
        tpot_s=pl.when(pl.col("output_tokens") > 1).then(done / (pl.col("output_tokens") - 1)),
        spent_s=pl.col("done_s") - pl.col("sent_s"),
    )


def _least_loaded(requests: pl.DataFrame, most: str) -> pl.DataFrame:
    """The requests of the cell whose requests were least in each other's way, of the shape with most of `most`."""
    shape = requests.sort(most, descending=True)["shape"][0]
    cells = requests.filter(pl.col("shape") == shape).partition_by("level", maintain_order=True)
    return min(cells, key=_concurrency)


def _concurrency(cell: pl.DataFrame) -> float:
    """Requests under way at once, on average over the cell."""
    return float(cell["spent_s"].sum()) / float(cell["done_s"].max())  # type: ignore[arg-type]


def _running(run: Run, cell: pl.DataFrame) -> float | None:
    """Requests that the server saw running, on average over the samples in which any were."""
    samples = run.results.table("sweep", "server_samples.parquet")
    if samples is None:
        return None
    own = samples.filter((pl.col("shape") == cell["shape"][0]) & (pl.col("level") == cell["level"][0]))
    busy = own.filter(pl.col("running") > 0)["running"]
    return float(busy.mean()) if len(busy) else None  # type: ignore[arg-type]


def decode(run: Run, device: Device) -> list[Compared]:
    """The bandwidth's ceiling, and the step of the batch that ran."""
    requests = _requests(run)
    timed = None if requests is None else requests.filter(pl.col("tpot_s").is_not_null())
    if timed is None or not timed.height:
        return []
    cell = _least_loaded(timed, "asked_output_tokens")
    context = round(float((cell["prompt_tokens"] + cell["output_tokens"] / 2).mean()))  # type: ignore[arg-type]
    kv = run.model.kv_bytes(context, _kv_dtype_bytes(run))
    read = run.model.read_bytes()
    alone = serving.step_s(read, kv, 1, device.bandwidth_bytes_s)
    where = f"{cell['shape'][0]} {cell['level'][0]}"
    fastest = float(cell["tpot_s"].min())  # type: ignore[arg-type]
    found: list[Compared] = []
    found.append(Compared("decode", "ceiling, one stream", "tok/s", 1 / alone, 1 / fastest,
                      f"{read / 1e6:.1f} MB of weights and {kv / 1e6:.2f} MB of cache at "
                      f"{device.bandwidth_bytes_s / 1e9:.1f} GB/s; fastest request of {where}"))  # fmt: skip
    batch = _running(run, cell)
    if batch is not None:
        weights_read = run.model.read_bytes(max(1, round(batch)))
        step = serving.step_s(weights_read, kv, batch, device.bandwidth_bytes_s)
        median = float(cell["tpot_s"].median())  # type: ignore[arg-type]
        found.append(Compared("decode", f"step at a batch of {batch:.1f}", "ms", 1e3 * step, 1e3 * median,
                              f"median TPOT of {where}"))  # fmt: skip
    return found


def prefill(run: Run, device: Device) -> list[Compared]:
    """Compute-bound time of a prompt, in the arithmetic that each part runs in."""
    requests = _requests(run)
    if requests is None or not requests.height:
        return []
    cell = _least_loaded(requests, "asked_prompt_tokens")
    tokens = round(float(cell["prompt_tokens"].mean()))  # type: ignore[arg-type]
    dtype = DTYPE_ARITHMETIC.get(str(run.realised.get("dtype", run.model.dtype)), "bf16")
    linears = ARITHMETIC[run.model.storage.kind] or dtype
    flops = run.model.prefill(tokens)
    where = f"{cell['shape'][0]} {cell['level'][0]}"
    missing = [name for name in (linears, dtype) if name not in device.peak_flops_s]
    fastest, median = float(cell["ttft_s"].min()), float(cell["ttft_s"].median())  # type: ignore[arg-type]
    if missing:
        note = f"not predicted: {device.name} has no peak for {missing[0]}"
        return [Compared("prefill", f"{tokens} tokens, fastest TTFT", "ms", None, 1e3 * fastest, note)]
    bound = flops.linears / device.peak(linears) + (flops.head + flops.attention) / device.peak(dtype)
    note = f"{flops.total / 1e9:.1f} GFLOP, linears at {device.peak(linears) / 1e9:.0f} GFLOP/s ({linears}); {where}"
    return [
        Compared("prefill", f"{tokens} tokens, fastest TTFT", "ms", 1e3 * bound, 1e3 * fastest, note),
        Compared("prefill", f"{tokens} tokens, median TTFT", "ms", 1e3 * bound, 1e3 * median, "with its queue"),
    ]


def slots(run: Run) -> list[Compared]:
    """Little's law: arrivals x tokens x time a token against requests seen running."""
    requests = _requests(run)
    timed = None if requests is None else requests.filter(pl.col("tpot_s").is_not_null())
    samples = run.results.table("sweep", "server_samples.parquet")
    if timed is None or not timed.height or samples is None:
        return []
    cell = _least_loaded(timed, "asked_output_tokens")
    own = samples.filter((pl.col("shape") == cell["shape"][0]) & (pl.col("level") == cell["level"][0]))
    # Over the time in which the cell had requests: before the first and after the last there is no rate.
    first, last = float(cell["sent_s"].min()), float(cell["done_s"].max())  # type: ignore[arg-type]
    inside = own.filter(pl.col("time_s").is_between(first, last))
    if not inside.height or last <= first:
        return []
    rate = cell.height / (last - first)
    held = serving.decode_slots(rate, float(cell["output_tokens"].mean()), float(cell["tpot_s"].mean()))  # type: ignore[arg-type]
    seen = float(inside["running"].mean())  # type: ignore[arg-type]
    note = f"{rate:.2f} req/s; the server's count has prefill in it; {cell['shape'][0]} {cell['level'][0]}"
    return [Compared("transfer", "decode slots held", "slots", held, seen, note)]


def transferred(run: Run) -> list[Compared]:
    """Of a prefill/decode split, whether caches were sent at all: a split that sends none is a split in name."""
    cells = run.results.table("sweep", "cells.parquet")
    if cells is None or not run.realised.get("engine_args.kv_transfer_config"):
        return []
    names = ("server_prompt_tokens", "server_prompt_tokens_transferred")
    if any(name not in cells.columns or cells[name].null_count() for name in names):
        return []
    asked, sent = (float(cells[name].sum()) for name in names)
    note = "a split whose caches are not sent computes each prompt again" if sent == 0 else "over the whole sweep"
    return [Compared("transfer", "prompt tokens sent over", "tokens", asked, sent, note)]


def speculated(run: Run) -> list[Compared]:
    """Each cell in which drafts were verified."""
    cells = run.results.table("sweep", "cells.parquet")
    found: list[Compared] = []
    for cell in cells.to_dicts() if cells is not None else ():
        counted = cell.get("tokens_per_verification")
        reached = _reached(cell)
        if counted is None or not reached:
            continue
        where = f"{cell['shape']} {cell['level']}"
        given = conditional(reached)
        shown = ", ".join(f"{value:.2f}" for value in given)
        found += [
            Compared("speculation", "tokens a verification, per position", "tokens",
                     speculation.tokens_per_verification(given), counted, f"acceptance {shown}; {where}"),
            Compared("speculation", "the same, uniform", "tokens",
                     speculation.uniform_tokens(given[0], len(given)), counted,
                     f"acceptance {given[0]:.2f} at all {len(given)}; {where}"),
        ]  # fmt: skip
    return found


def _reached(cell: Mapping[str, Any]) -> list[float]:
    """Share of the drafts whose first, second ... token was accepted."""
    found: list[float] = []
    while (value := cell.get(f"accepted_at_{len(found) + 1}")) is not None:
        found.append(float(value))
    return found


def conditional(reached: Sequence[float]) -> list[float]:
    """Acceptance of each position, given that all before it were accepted; 0 from where none was."""
    found, before = [], 1.0
    for value in reached:
        found.append(value / before if before else 0.0)
        before = value
    return found
