"""One run of the pipeline in this work tree: write `params.yaml`, let DVC do what changed, track it, say what came out.

DVC never composes Hydra's configuration in `dvc repro`, so this module owns that step. One run at a time has the
work tree (a lock that the kernel frees when its holder dies).
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from oneaxis.artifacts import ARTIFACTS, read_json, write_json
from oneaxis.config import STAGE_SECTIONS, Config, derived_paths, write_params
from oneaxis.errors import UserError
from oneaxis.stage import STATE

FULL_BYTES = 2**20
"""A disk with less than this is full."""


def run_pipeline(root: Path, config: Config, overrides: Sequence[str]) -> int:
    """Run what `config` changed. Returns the exit code: 0, or 1 (failed or INVALID), or 2 (refused).

    Raises:
        UserError: when another run, or DVC itself, is at work in this folder; `params.yaml` is then untouched.
    """
    check_inputs(root, config)
    check_draws(root, config)
    with work_tree(root):
        write_params(config, root)
        write_json(root / STATE / "last_run.json", {"overrides": list(overrides)})
        (root / STATE / "failure.json").unlink(missing_ok=True)
        started = time.time()
        (root / STATE / "running.json").unlink(missing_ok=True)
        code = _repro(root, config.experiment.targets)
        if code:
            return _failed(root, code)
        from oneaxis.multirun.plan import reached_stages

        needed = reached_stages(root, config)
        _say(root, needed, _ran_since(root, started))
        from oneaxis.track import track

        print(f"MLflow run {track(root)}: `oneaxis ui` shows it\ndone in {time.time() - started:.0f} s")
    return verdict(root, needed)


def verdict(root: Path, needed: Sequence[str]) -> int:
    """0 when the numbers of these stages may be used, 1 when they are INVALID; the reasons that no report has are said.

    Args:
        needed: the stages of this run. What others left in `artifacts/` says nothing of it.
    """
    if "report" in needed:
        return 0 if _metrics(root).get("report/valid", 1.0) else 1
    from oneaxis.judge.validity import judge_run
    from oneaxis.report.results import read_results

    reasons = judge_run(read_results(root / ARTIFACTS), needed).reasons
    for reason in reasons:
        print(f"oneaxis: the run is INVALID: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def check_inputs(root: Path, config: Config, *, here: bool = True) -> None:
    """Refuse what the schema cannot know to be wrong, before anything is written.

    Args:
        here: whether the stages run on this machine, whose cores, memory, ports and environment then count.

    Raises:
        UserError: a file that is not there, a trace that cannot be replayed, a default task that does not exist, an
            argument that vLLM or TRL does not have or that contradicts another setting, an engine that this machine
            cannot start; naming the key, the value and what is allowed.
    """
    if config.serve.kind == "vllm" and (config.serve.engine_args or config.serve.batch_invariant):
        from oneaxis.serve.command import check_contradictions, check_engine_args, engine_device, known_arguments

        check_engine_args(config.serve.engine_args, known_arguments())
        check_contradictions(config.serve, engine_device())
    if config.sample.kind == "on_policy" and config.sample.engine.engine_args:
        from oneaxis.sample.responses import check_sampling_args

        check_sampling_args(config.sample.engine)
    if config.train.kind == "dpo" and config.train.dpo_args:
        from oneaxis.preference.dpo_config import check_dpo_args

        check_dpo_args(config.train.dpo_args, anchored=bool(config.train.rpo_alpha))
    if config.split.kind != "none":
        from oneaxis.split.nixl import check_nixl

        check_nixl(config.split.kind)
    if config.data.items.source.kind == "wheels":
        from oneaxis.data.items import TASKS

        for task in config.data.items.tasks:
            if task not in TASKS:
                raise UserError(f"data.items.tasks={task}: no such task; allowed: {', '.join(sorted(TASKS))}")
    for name, path in derived_paths(config.model_dump()).items():
        if name.endswith("_source") and not (root / path).exists():
            table = name.removesuffix("_source")
            key = {"model": "model.path", "sample": "sample.path", "load": "load.trace"}.get(
                table, f"data.{table}.source.path"
            )
            raise UserError(f"{key}={path}: no such file or folder; allowed: an existing one")
    if config.load.trace:
        from oneaxis.load.plan import check_fits
        from oneaxis.load.trace import read_trace

        check_fits(config.load, config.serve.max_model_len, read_trace(config.load.trace, root))
    from oneaxis.multirun.plan import reached_stages

    _check_engines(root, config, reached_stages(root, config), here=here)


def check_draws(root: Path, config: Config) -> None:
    """Refuse a load of which nothing would be sent, where one is sent.

    Raises:
        UserError: naming the rate and the duration.
    """
    from oneaxis.multirun.plan import reached_stages

    if "sweep" in reached_stages(root, config):
        from oneaxis.load.plan import check_arrivals

        measure = config.measure
        check_arrivals(config.load, seed=config.seed, session=measure.session, repetition=measure.repetition)


def _check_engines(root: Path, config: Config, needed: Sequence[str], *, here: bool) -> None:
    """What the stages themselves refuse before they start an engine, as far as it is known without the model."""
    from oneaxis.draft.engine import check_num_layers, speculating
    from oneaxis.serve.preflight import check_key, check_model, check_room

    serve, known = config.serve, _known_model(root, config)
    if "make_draft" in needed and config.draft.kind == "layers" and "num_hidden_layers" in known:
        check_num_layers(config.draft, known["num_hidden_layers"])
    asks = {
        "serve": True,
        "split": config.split.kind != "none",
        "diverge": config.diverge.kind != "none",
        "sweep": True,
        "score": config.score.engine == "vllm",
        "extract": config.extract.kind != "none",
    }
    stages = [stage for stage in needed if asks.get(stage)]
    if stages and serve.kind == "attach" and here:
        check_key(serve)
    if stages and serve.kind == "vllm":
        if {"serve", "diverge", "sweep"} & set(stages):
            # Where the draft will be says nothing of whether the engine may be told of one.
            speculating(serve, config.draft, root)
        check_model(known, serve)
        if here:
            check_room([serve])
    if "split" in stages and serve.kind == "vllm" and here:
        from oneaxis.split.deployment import halves

        check_room(halves(serve, cores=len(os.sched_getaffinity(0))))
    if "sample_pairs" in needed and config.sample.kind == "on_policy" and here:
        from oneaxis.sample.responses import own_keys

        with own_keys():
            check_room([config.sample.engine])


def _known_model(root: Path, config: Config) -> dict[str, Any]:
    """What `config.json` of the served model will say, of a made or a local one; of others it is not known yet."""
    known: dict[str, Any] = {}
    if config.model.kind == "random":
        model = config.model
        known = {
            "max_position_embeddings": model.max_position,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "hidden_size": model.hidden_size,
        }
    elif config.model.kind == "path":
        # What cannot be read is `fetch_model`'s to refuse, which says what a checkpoint needs.
        with suppress(OSError, ValueError):
            known = json.loads((root / Path(config.model.path).expanduser() / "config.json").read_text("utf-8"))
    if isinstance(known, dict) and config.quantize.kv == "fp8":
        known = {**known, "quantization_config": {"kv_cache_scheme": config.quantize.kv}}
    return known if isinstance(known, dict) else {}


@contextmanager
def work_tree(root: Path) -> Iterator[None]:
    """Hold this work tree for one run.

    Raises:
        UserError: naming the process that holds it.
    """
    state = root / STATE
    state.mkdir(exist_ok=True)
    with (state / "run.lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise UserError(
                f"{root}: another run is at work here ({lock.read().strip()}); wait for it or stop it"
            ) from error
        if other := _dvc_at_work(root):
            raise UserError(f"{root}: `dvc repro` is at work here (process {other}); wait for it or stop it")
        lock.truncate(0)
        lock.write(f"process {os.getpid()}, since {datetime.now(UTC):%H:%M:%S} UTC")
        lock.flush()
        yield
        lock.truncate(0)


def _dvc_at_work(root: Path) -> int | None:
    """The process id of a `dvc repro` in this folder, if there is one."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "repro" in words and any(Path(word).name == "dvc" for word in words[:3]):
            try:
                if Path(process.cwd()) == root:
                    return int(process.info["pid"])
            except psutil.Error:
                continue
    return None


def _repro(root: Path, targets: Sequence[str]) -> int:
    """`dvc repro TARGETS` as a child that ends with us; interrupts are passed on and waited for."""
    # Stages are called as `python stages/x.py`: this interpreter has to be the first on the path.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    guard = (
        "import ctypes, sys, signal; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
        "from dvc.cli import main; sys.exit(main(['repro', *sys.argv[3:]]))"
    )
    child = subprocess.Popen([sys.executable, "-c", guard, "dvc", "repro", *targets], cwd=root, env=environment)
    pending = {signal.SIGINT: 0, signal.SIGTERM: 0}

    def pass_on(number: int, _frame: Any) -> None:
        pending[signal.Signals(number)] += 1
        # A terminal sends Ctrl-C to the whole group already; the stage treats a second one like the first.
        for process in _tree(child.pid):
            try:
                process.send_signal(signal.SIGTERM if "stages" in " ".join(process.cmdline()) else signal.SIGINT)
            except psutil.Error:
                continue

    previous = {number: signal.signal(number, pass_on) for number in pending}
    try:
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 130 if any(pending.values()) else code


def _tree(pid: int) -> list[psutil.Process]:
    """DVC and the stage below it (not the stage's own children: the stage stops those itself)."""
    try:
        top = psutil.Process(pid)
        below = top.children(recursive=True)
    except psutil.Error:
        return []
    stages = [process for process in below if any(word.startswith("stages/") for word in _words(process))]
    return [top, *stages]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _failed(root: Path, code: int) -> int:
    """Say in one line what failed; the stage has left its own words, since DVC passes on no exit code."""
    if code == 130:
        print("oneaxis: interrupted; `oneaxis run` with the same settings goes on where this stopped", file=sys.stderr)
        return 130
    failure = root / STATE / "failure.json"
    if failure.is_file():
        said = json.loads(failure.read_text(encoding="utf-8"))
        print(f"oneaxis: {said['stage']} failed: {said['message']}", file=sys.stderr)
        return int(said["code"])
    print(f"oneaxis: {_why_without_words(root, code)}", file=sys.stderr)
    return 1


def _why_without_words(root: Path, code: int) -> str:
    """What can be said when neither the stage nor DVC could say it."""
    again = "nothing is half-written, and `oneaxis run` with the same settings goes on"
    if code < 0:
        return f"dvc was killed by signal {-code}; {again}"
    running = root / STATE / "running.json"
    if running.is_file():
        mark = json.loads(running.read_text(encoding="utf-8"))
        return f"{mark['stage']} was killed (process {mark['pid']}), perhaps for want of memory; {again}"
    return no_room([root / ".dvc" / "cache", root / ARTIFACTS]) or "dvc repro failed; its own words stand above"


def no_room(folders: Sequence[Path]) -> str:
    """Which of these folders is full or cannot be written to, in one line; empty when none is."""
    for folder in folders:
        if folder.is_dir() and psutil.disk_usage(str(folder)).free < FULL_BYTES:
            return f"the disk of {folder} is full; free space, then run again"
        if folder.is_dir() and (not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY):
            return f"{folder}: cannot be written to; allowed: a folder that can"
    return ""


def _ran_since(root: Path, started: float) -> list[str]:
    """The stages that really ran (DVC counts restored ones as run)."""
    trace = root / STATE / "ran.jsonl"
    if not trace.is_file():
        return []
    since = datetime.fromtimestamp(started, UTC)
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [line["stage"] for line in lines if datetime.fromisoformat(line["at"]) >= since]


def _metrics(root: Path) -> dict[str, float]:
    """All stages' metrics, flat."""
    merged: dict[str, float] = {}
    for stage in STAGE_SECTIONS:
        path = root / ARTIFACTS / f"{stage}.metrics.json"
        if path.is_file():
            merged.update(read_json(path))
    return merged


def _say(root: Path, needed: Sequence[str], ran: Sequence[str]) -> None:
    restored = [stage for stage in needed if stage not in ran]
    print(f"\nran: {', '.join(ran) or 'nothing'}; unchanged or restored: {', '.join(restored) or 'nothing'}")
    if "report" not in needed:
        print("no report: experiment.targets ends before it", flush=True)
        return
    card = root / ARTIFACTS / "report" / "card.md"
    if card.is_file():
        print("\n" + card.read_text(encoding="utf-8").strip() + "\n")
    print(f"report: {root / ARTIFACTS / 'report' / 'report.html'}", flush=True)
