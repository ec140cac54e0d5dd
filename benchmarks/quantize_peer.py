"""W8A8 by oneaxis and by llm-compressor, on the same model and text: wall time, peak memory, perplexity.

    oneaxis run train=none experiment.targets='[prepare_data]'   # or any run: the model and the text are then there
    python benchmarks/quantize_peer.py --out peer.md             # alternating, three runs each
    python benchmarks/quantize_peer.py --quick                   # one run each on little text, to see that it works

llm-compressor pins other versions of what oneaxis needs, so it gets an environment of its own (`--peer`, made with uv
when it is not there; `--python` names one that is). Both tools get the same token ids, threads and CPU. A run is what
a user waits for, from starting Python to a checkpoint on disk:

- llm-compressor: `benchmarks/peer/oneshot.py`.
- oneaxis, "making": `stages/calibrate.py`, then `stages/quantize.py`, with as little measuring as the settings allow
  (one held-out sequence, no exact-copy tasks). What that leaves is still counted.
- oneaxis, "whole": the same stages as a pipeline runs them, perplexity, coverage and exact-copy tasks included, which
  llm-compressor has no counterpart of. Its second checkpoint needs no second `calibrate`.

In every round each contestant runs once, in the next round in reverse order. Perplexity is measured by
`benchmarks/peer/evaluate.py` on both tools' checkpoints, with the peer's Python; on ours it is held against two other
readers (compressed-tensors' own, and `oneaxis.checkpoint.load`). Peak memory is the sum over the processes of a run,
sampled, or the kernel's own maximum where that is more.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent / "peer"
sys.path.insert(0, str(ROOT / "src"))
PEER_PACKAGES = ("llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0")
WHOLE, AGAIN = "whole: ", "only quantize: "
LEAST = ("calibrate.heldout_sequences=1", "calibrate.copying.sequences=0")
"""The settings of `calibrate` that leave out measuring, as far as they can."""
SAMPLE_S = 0.25
"""Of memory. At 0.02 the sampling itself slowed what was measured by a tenth."""
NOISE = 1e-6
"""Relative; what two right readers may differ by is what this does to one of them."""


@dataclass(frozen=True)
class Contestant:
    """A tool with its settings."""

    tool: str
    kind: str
    settings: tuple[str, ...]
    """Of oneaxis: overrides. Of llm-compressor: arguments of oneshot.py."""
    label: str
    only_once: bool = False
    """A recipe that is shown beside, not timed against ours."""


@dataclass(frozen=True)
class Run:
    """One run and what it took."""

    label: str
    round: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    anonymous_mib: float
    """Of the peak, without pages of files (which the kernel can take back)."""
    others_cpu: float
    """Share of the machine that other processes used meanwhile."""
    sha256: str
    checkpoint: str


def peer_contestants(quick: bool) -> list[Contestant]:
    """llm-compressor's: its default strength and observer, then what its examples and its users choose."""

    def one(kind: str, alpha: str, observer: str = "minmax", rounding: str = "rtn", once: bool = False) -> Contestant:
        words = ["alpha " + alpha] + ([f"observer {observer}"] if kind == "static" else [])
        words += ["GPTQ"] if rounding == "gptq" else []
        settings = ("--alpha", alpha, "--observer", observer, "--rounding", rounding)
        return Contestant("llm-compressor", kind, settings, f"{kind}: {', '.join(words)}", once)

    main = [one("dynamic", "0.5"), one("static", "0.8")]
    beside = [
        one("dynamic", "0.8", once=True),
        one("dynamic", "0.8", rounding="gptq", once=True),
        one("static", "0.5", once=True),
        one("static", "0.5", "static_minmax", once=True),
        one("static", "0.8", "static_minmax", once=True),
    ]
    return main if quick else main + beside


# --- running -------------------------------------------------------------------------------------------------


def measured(command: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path) -> dict[str, float]:
    """Run a command to its end: wall and CPU seconds, peak MiB of its process tree, and the others' share of the CPU.

    Raises:
        SystemExit: it failed; the end of its log.
    """
    busy_before, began = _busy_s(), time.monotonic()
    with log.open("ab") as file:
        process = subprocess.Popen(command, cwd=cwd, env=dict(environment), stdout=file, stderr=file)
    peak, anonymous, over = [0], [0], threading.Event()

    def sample() -> None:
        tree = psutil.Process(process.pid)
        while not over.wait(SAMPLE_S):
            resident, own = 0, 0
            try:
                for one in [tree, *tree.children(recursive=True)]:
                    memory = one.memory_info()
                    resident, own = resident + memory.rss, own + memory.rss - memory.shared
            except psutil.Error:
                continue
            peak[0], anonymous[0] = max(peak[0], resident), max(anonymous[0], own)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - began
    over.set()
    thread.join()
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{tail}")
    cpu_s = usage.ru_utime + usage.ru_stime
    cores = psutil.cpu_count() or 1
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_mib": max(peak[0] / 2**20, usage.ru_maxrss / 2**10),
        "anonymous_mib": anonymous[0] / 2**20,
        "others_cpu": max(0.0, _busy_s() - busy_before - cpu_s) / (wall_s * cores),
    }


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def combined(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """One after the other: times add up, the peak is the higher."""
    wall_s = sum(part["wall_s"] for part in parts)
    return {
        "wall_s": wall_s,
        "cpu_s": sum(part["cpu_s"] for part in parts),
        "peak_mib": max(part["peak_mib"] for part in parts),
        "anonymous_mib": max(part["anonymous_mib"] for part in parts),
        "others_cpu": sum(part["others_cpu"] * part["wall_s"] for part in parts) / wall_s,
    }


def digest(folder: Path) -> str:
    """SHA-256 over the weights of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Bench:
    """The model, the text and the environments that all runs share."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.model, self.data = options.model.resolve(), options.data.resolve()
        self.log = work / "log.txt"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads)),
            **dict.fromkeys(("HF_HUB_OFFLINE", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY"), "1"),
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.counts = (8, 4) if options.quick else (options.sequences, options.heldout)
        self.peer_python = str(options.python or make_peer(options.peer, options.uv))

    @property
    def sequence_tokens(self) -> int:
        from oneaxis.config import compose

        return compose(ROOT / "conf").calibrate.sequence_tokens

    def overrides(self, settings: Sequence[str]) -> list[str]:
        return [
            "train=none",
            f"calibrate.num_sequences={self.counts[0]}",
            f"calibrate.heldout_sequences={self.counts[1]}",
            *settings,
        ]

    def tree(self, name: str, settings: Sequence[str]) -> Path:
        """A fresh folder in which the stages find params.yaml, the model and the text."""
        from oneaxis.config import compose, write_params

        tree = self.work / name
        shutil.rmtree(tree, ignore_errors=True)
        (tree / "artifacts" / "fetch_model").mkdir(parents=True)
        (tree / "artifacts" / "fetch_model" / "checkpoint").symlink_to(self.model)
        (tree / "artifacts" / "prepare_data").symlink_to(self.data)
        write_params(compose(ROOT / "conf", self.overrides(settings)), tree)
        return tree

    def stage(self, tree: Path, name: str) -> dict[str, float]:
        environment = {**self.environment, "PYTHONPATH": str(ROOT / "src")}
        return measured([sys.executable, str(ROOT / "stages" / f"{name}.py")], tree, environment, self.log)

    def token_ids(self) -> None:
        """Write calibration.npy and heldout.npy [S, T], packed as `calibrate` packs them."""
        from oneaxis.checkpoint.load import load_tokenizer
        from oneaxis.quantize.text import pack

        tokenizer = load_tokenizer(self.model)
        for name, count in zip(("calibration", "heldout"), self.counts, strict=True):
            path = self.data / f"{name}.parquet"
            text = pack(pl.read_parquet(path), tokenizer, count, self.sequence_tokens, origin=str(path))
            if text.num_prefix > 1:
                raise SystemExit("evaluate.py predicts every token but the first; this tokenizer has a longer prefix")
            np.save(self.work / f"{name}.npy", text.token_ids_ST.numpy())

    # --- contestants -----------------------------------------------------------------------------------------

    def ours(self, one: Contestant, round_number: int) -> list[Run]:
        """calibrate and quantize with the least measuring."""
        settings = [f"quantize=w8a8_int8_{one.kind}", *LEAST, *one.settings]
        tree = self.tree(f"ours-{one.kind}-{round_number}", settings)
        took = combined([self.stage(tree, "calibrate"), self.stage(tree, "quantize")])
        self.same_text(tree / "artifacts" / "calibrate")
        return [self.run(one.label, round_number, took, tree / "artifacts" / "quantize" / "checkpoint")]

    def whole(self, contestants: Sequence[Contestant], round_number: int) -> list[Run]:
        """calibrate once, with all its measuring, then quantize with each kind, as a pipeline does."""
        runs = []
        calibrated: dict[str, float] | None = None
        for one in contestants:
            tree = self.tree(f"whole-{one.kind}-{round_number}", [f"quantize=w8a8_int8_{one.kind}", *one.settings])
            if calibrated is None:
                calibrated = self.stage(tree, "calibrate")
                self.same_text(tree / "artifacts" / "calibrate")
                first = tree
            else:
                (tree / "artifacts" / "calibrate").symlink_to(first / "artifacts" / "calibrate")
            quantized = self.stage(tree, "quantize")
            checkpoint = tree / "artifacts" / "quantize" / "checkpoint"
            runs.append(self.run(WHOLE + one.label, round_number, combined([calibrated, quantized]), checkpoint))
            runs.append(self.run(AGAIN + one.label, round_number, quantized, checkpoint))
        return runs

    def same_text(self, calibrated: Path) -> None:
        """What the stage read must be what the peer was given (of the held-out text, as far as it read)."""
        for name in ("calibration", "heldout"):
            path = calibrated / f"{name}_tokens.parquet"
            if path.is_file():
                found = pl.read_parquet(path).sort("sequence", "position")["token_id"].to_numpy()
                given = np.load(self.work / f"{name}.npy").flatten()
                if not np.array_equal(found, given if name == "calibration" else given[: len(found)]):
                    raise SystemExit(f"{path}: other tokens than the peer was given")

    def peer(self, one: Contestant, round_number: int) -> list[Run]:
        """oneshot.py."""
        out = self.work / f"peer-{one.kind}-{'-'.join(one.settings).replace('--', '')}-{round_number}"
        shutil.rmtree(out, ignore_errors=True)
        command = [self.peer_python, "-P", str(HERE / "oneshot.py"), "--model", str(self.model),
                   "--tokens", str(self.work / "calibration.npy"), "--kind", one.kind, *one.settings,
                   "--batch", str(self.options.peer_batch), "--dtype", self.options.peer_dtype,
                   "--out", str(out)]  # fmt: skip
        return [self.run(one.label, round_number, measured(command, self.work, self.environment, self.log), out)]

    def run(self, label: str, round_number: int, took: dict[str, float], checkpoint: Path) -> Run:
        done = Run(label=label, round=round_number, sha256=digest(checkpoint), checkpoint=str(checkpoint), **took)
        print(f"round {round_number}  {label:48}  {done.wall_s:6.1f} s  {done.cpu_s:6.1f} CPU-s  "
              f"{done.peak_mib:6.0f} MiB ({done.anonymous_mib:.0f} anonymous)  others {done.others_cpu:.0%}",
              flush=True)  # fmt: skip
        return done

    def warm_up(self) -> None:
        """Import everything once: files are read and compiled before the first run is timed."""
        measured([self.peer_python, "-P", str(HERE / "oneshot.py"), "--help"], self.work, self.environment, self.log)
        environment = {**self.environment, "PYTHONPATH": str(ROOT / "src")}
        modules = "import oneaxis.stage, oneaxis.quantize.calibrate, oneaxis.quantize.apply"
        measured([sys.executable, "-c", modules], self.work, environment, self.log)

    # --- perplexity ------------------------------------------------------------------------------------------

    def nll(self, checkpoint: Path, by: str = "hand", noise: float = 0.0) -> np.ndarray[Any, Any]:
        """NLL [S, T - 1] of the held-out tokens."""
        out = self.work / "nll.npy"
        command = [self.peer_python, "-P", str(HERE / "evaluate.py"), "--checkpoint", str(checkpoint), "--by", by,
                   "--noise", str(noise),
                   "--tokens", str(self.work / "heldout.npy"), "--out", str(out)]  # fmt: skip
        measured(command, self.work, self.environment, self.log)
        return np.load(out)

    def nll_by_oneaxis(self, checkpoint: Path) -> np.ndarray[Any, Any]:
        """The same by the loader that the pipeline itself measures with."""
        import torch

        from oneaxis.checkpoint.load import load_for_measuring

        sys.path.insert(0, str(HERE))
        from evaluate import token_nll

        torch.set_num_threads(self.options.threads)
        model, _ = load_for_measuring(checkpoint, torch.float32)
        return token_nll(model, torch.from_numpy(np.load(self.work / "heldout.npy")), 4).numpy()


def make_peer(folder: Path, uv: str) -> Path:
    """The Python of the peer's environment, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.is_file():
        torch = [f"torch=={_version('torch')}"]
        index = [] if os.environ.get("UV_FIND_LINKS") else ["--torch-backend", "cpu"]
        subprocess.run([uv, "venv", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--compile-bytecode", *index, "--python", str(python),
                        *PEER_PACKAGES, *torch], check=True)  # fmt: skip
    return python


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


# --- the tables ----------------------------------------------------------------------------------------------


def perplexity(nll: Any) -> float:
    """exp of the mean."""
    return float(np.exp(nll.mean()))


def span(values: Sequence[float], form: str) -> str:
    """`median (least to most)`, or the one value."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)} to {format(max(values), form)})"


def table(runs: Sequence[Run], nlls: Mapping[str, Any], order: Sequence[tuple[str, str, str]]) -> list[str]:
    """Markdown: one row per contestant. order: (tool, kind, label)."""
    lines = ["| Tool | Scales | Settings | Wall s | CPU s | Peak RSS MiB | anonymous MiB | Perplexity | Bytes |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for tool, kind, label in order:
        own = [run for run in runs if run.label == label]
        if not own:
            continue
        distinct = list(dict.fromkeys(run.sha256 for run in own))
        perplexities = [perplexity(nlls[sha]) for sha in distinct]
        same = "one run" if len(own) == 1 else f"same in {len(own)}" if len(distinct) == 1 else f"{len(distinct)} kinds"
        cells = [tool, kind, label.replace(f"{kind}: ", ""), span([run.wall_s for run in own], ".1f"),
                 span([run.cpu_s for run in own], ".1f"), span([run.peak_mib for run in own], ".0f"),
                 span([run.anonymous_mib for run in own], ".0f"), span(perplexities, ".3f"), same]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def comparison(kind: str, ours: str, peers: Sequence[str], runs: Sequence[Run], nlls: Mapping[str, Any]) -> list[str]:
    """What the rows say about one kind: speed and memory by round, perplexity paired by sequence against the best."""
    from oneaxis.judge.paired import paired_difference

    by = {(run.label, run.round): run for run in runs}
    timed = next(label for label in peers if (label, 1) in by)
    rounds = sorted(number for label, number in by if label == ours and (timed, number) in by)
    faster = [by[timed, number].wall_s / by[ours, number].wall_s for number in rounds]
    cpu = [by[timed, number].cpu_s / by[ours, number].cpu_s for number in rounds]
    memory = [by[ours, number].peak_mib / by[timed, number].peak_mib for number in rounds]
    own = nlls[by[ours, rounds[0]].sha256].mean(axis=1)
    candidates = {run.sha256: run.label for run in runs if run.label in peers}
    best = min(candidates, key=lambda sha: float(nlls[sha].mean()))
    effect = paired_difference(nlls[best].mean(axis=1), own)
    return [
        f"- {kind}: {span(faster, '.2f')} times as fast ({span(cpu, '.2f')} by CPU seconds), "
        f"{span(memory, '.2f')} of the memory; NLL per token against llm-compressor's best ({candidates[best]}): "
        f"{effect.effect:+.4f} [{effect.ci_low:+.4f}, {effect.ci_high:+.4f}], paired over {len(own)} sequences."
    ]


def main() -> int:
    """Run the rounds; print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    artifacts = ROOT / "artifacts"
    parser.add_argument("--model", type=Path, default=artifacts / "fetch_model" / "checkpoint")
    parser.add_argument("--data", type=Path, default=artifacts / "prepare_data",
                        help="holds calibration.parquet and heldout.parquet")  # fmt: skip
    cache = Path(os.environ.get("ONEAXIS_CACHE") or Path.home() / ".cache" / "oneaxis")
    parser.add_argument("--peer", type=Path, default=cache / "llmcompressor", help="its environment, made if missing")
    parser.add_argument("--python", type=Path, help="a Python that has llmcompressor, in place of --peer")
    parser.add_argument("--uv", default=str(Path(sys.executable).parent / "uv"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64, help="of calibration text")
    parser.add_argument("--heldout", type=int, default=16, help="sequences that perplexity is measured on")
    parser.add_argument("--kinds", nargs="+", choices=["dynamic", "static"], default=["dynamic", "static"])
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    parser.add_argument("--peer-batch", type=int, default=1, help="sequences a batch; 1 is llm-compressor's default")
    parser.add_argument("--peer-dtype", default="float32", help="the faster one on a CPU; auto: as its examples load")
    parser.add_argument("--dynamic", nargs="*", default=[], metavar="OVERRIDE", help="settings of ours, dynamic")
    parser.add_argument("--static", nargs="*", default=[], metavar="OVERRIDE", help="settings of ours, static")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--brief", action="store_true", help='llm-compressor\'s default strengths, and no "whole"')
    parser.add_argument("--work", type=Path, help="keep the checkpoints here")
    parser.add_argument("--out", type=Path, help="write the tables (.md) and all runs (.json) here")
    options = parser.parse_args()
    for path in (options.model / "config.json", options.data / "calibration.parquet"):
        if not path.is_file():
            parser.error(f"{path}: missing; allowed: what `oneaxis run` makes, or --model and --data")
    with tempfile.TemporaryDirectory(prefix="oneaxis-peer-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        lines, record = bench(Bench(options, work.resolve()))
    print("\n" + "\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def bench(bench: Bench) -> tuple[list[str], dict[str, Any]]:
    """All runs, then all perplexities: the tables, and everything for a file."""
    options = bench.options
    rounds = 1 if options.quick else options.rounds
    ours = [our_contestant(kind, getattr(options, kind)) for kind in options.kinds]
    peers = [one for one in peer_contestants(options.quick or options.brief) if one.kind in options.kinds]
    bench.token_ids()
    bench.warm_up()
    steps: list[tuple[bool, Callable[[int], list[Run]]]] = []
    for mine in ours:
        steps.append((False, partial(bench.ours, mine)))
        steps += [(one.only_once, partial(bench.peer, one)) for one in peers if one.kind == mine.kind]
    if not options.brief:
        steps.append((False, partial(bench.whole, ours)))
    runs: list[Run] = []
    for number in range(1, rounds + 1):
        for only_once, step in steps if number % 2 else steps[::-1]:
            if number == 1 or not only_once:
                runs += step(number)

    nlls: dict[str, Any] = {"base": bench.nll(bench.model)}
    for run in runs:
        if run.sha256 not in nlls:
            nlls[run.sha256] = bench.nll(Path(run.checkpoint))
    kinds = {one.kind: one.label for one in ours}
    order = []
    for mine in ours:
        order += [("llm-compressor", mine.kind, one.label) for one in peers if one.kind == mine.kind]
        order += [("oneaxis", mine.kind, prefix + mine.label) for prefix in ("", WHOLE, AGAIN)]
    lines = [conditions(bench, rounds, runs), "", *table(runs, nlls, order), "",
             f"Perplexity of the unquantised model: {perplexity(nlls['base']):.3f}.", ""]  # fmt: skip
    for kind, label in kinds.items():
        peers_of = [one.label for one in peers if one.kind == kind]
        lines += comparison(kind, label, peers_of, runs, nlls)
    lines += ["", *readers(bench, kinds, runs, nlls)]
    record = {
        "runs": [asdict(run) for run in runs],
        "perplexity": {sha: perplexity(nll) for sha, nll in nlls.items()},
        "nll_by_sequence": {sha: nll.mean(axis=1).tolist() for sha, nll in nlls.items()},
    }
    return lines, record


def our_contestant(kind: str, settings: Sequence[str]) -> Contestant:
    """oneaxis with a scheme's defaults, or with overrides of them."""
    return Contestant("oneaxis", kind, tuple(settings), f"{kind}: {', '.join(settings) or 'as by default'}")


def conditions(bench: Bench, rounds: int, runs: Sequence[Run]) -> str:
    """One paragraph: what ran on what."""
    options = bench.options
    others = [run.others_cpu for run in runs]
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    return (
        f"{bench.counts[0]} calibration sequences of {bench.sequence_tokens} tokens, {bench.counts[1]} held out; "
        f"{rounds} round(s), alternating; {options.threads} thread(s) of {os.cpu_count()} cores, {cpu_name()}, no GPU; "
        f"ours: Python {platform.python_version()}, {packages}; llm-compressor: {', '.join(PEER_PACKAGES)}, batch "
        f"{options.peer_batch}, {options.peer_dtype}. Other processes used {min(others):.0%} to {max(others):.0%} of "
        "the machine meanwhile."
    )


def cpu_name() -> str:
    """As /proc/cpuinfo has it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def readers(bench: Bench, kinds: Mapping[str, str], runs: Sequence[Run], nlls: Mapping[str, Any]) -> list[str]:
    """Our checkpoints by three readers, and by one of them with noise: perplexities, mean change of a token's NLL."""
    names = ("compressed-tensors", "oneaxis", f"by hand, embeddings changed by {NOISE:g}")
    lines = [f"| Our checkpoint | by hand | {' | '.join(names)} |", "|---|---|---|---|---|"]
    for kind, label in kinds.items():
        run = next(run for run in runs if run.label == label)
        hand, checkpoint = nlls[run.sha256], Path(run.checkpoint)
        others = [bench.nll(checkpoint, "compressed-tensors"), bench.nll_by_oneaxis(checkpoint),
                  bench.nll(checkpoint, noise=NOISE)]  # fmt: skip
        shown = [f"{perplexity(nll):.3f} ({np.abs(nll - hand).mean():.1e})" for nll in others]
        lines.append(f"| {kind} | {perplexity(hand):.3f} | {' | '.join(shown)} |")
    return [*lines, "", "In brackets: the mean change of a token's NLL from the reading by hand, nats."]


if __name__ == "__main__":
    sys.exit(main())
