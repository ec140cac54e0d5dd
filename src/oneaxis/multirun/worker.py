"""One job of a multirun in a process of its own: `python -m oneaxis.multirun.worker PROJECT MULTIRUN INDEX STARTED`.

It takes a slot, writes `params.yaml`, has DVC bring one stage after the other, and leaves the job's record and commit.
A process of its own, since DVC and the stages read the environment, and since killing it must free all that it holds.
Whoever started it reads `status.json`. SIGTERM ends it: the stage at work is asked to end, and waited for.
"""

import errno
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import psutil
from ruamel.yaml import YAML

from oneaxis.artifacts import ARTIFACTS, read_json
from oneaxis.config.compose import PARAMS, compose, write_params
from oneaxis.errors import RunError, UserError
from oneaxis.multirun.flight import single_flight, stage_keys, stage_name, stage_order
from oneaxis.multirun.record import (
    LARGEST_KEPT_BYTES,
    Job,
    Plan,
    Status,
    job_folder,
    multirun_folder,
    read_plan,
    write_status,
)
from oneaxis.multirun.share import fetch_stage, share_stage, shares
from oneaxis.multirun.slots import Slot, bring_files, cache_dir, end_processes, take_slot
from oneaxis.multirun.snapshot import pin, point_commit
from oneaxis.pipeline import no_room
from oneaxis.stage import QUIET, STATE, watch

SHELLS = ("sh", "bash", "dash", "zsh", "fish")


@dataclass
class Progress:
    """What a job has done so far."""

    done: list[Any] = field(default_factory=list)
    """Stages whose outputs are this job's."""
    ran: dict[str, float] = field(default_factory=dict)
    """Stage -> seconds, of those that really ran."""
    waited_s: float = 0.0


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the job and exit: 0 when it has left a record of any kind, 130 when it was interrupted."""
    project, multirun, index, started = Path(arguments[0]), arguments[1], int(arguments[2]), float(arguments[3])
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    logging.getLogger("dvc").setLevel(logging.INFO)
    code = 0
    try:
        _end_with_starter()
        folder = multirun_folder(project, multirun)
        plan = read_plan(folder)
        _job(project, folder, plan, plan.jobs[index], started)
    except KeyboardInterrupt:
        code = 130
    finally:
        _stop_stages()
    sys.stdout.flush()
    os._exit(code)


def _job(project: Path, folder: Path, plan: Plan, job: Job, started: float) -> None:
    target = job_folder(folder, job)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".tmp-{target.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    progress = Progress()
    slot: Slot | None = None
    message, code, commit = "", 0, ""
    try:
        temporary.mkdir()
        with take_slot(project, plan.snapshot) as slot:
            progress.waited_s += slot.waited_s
            try:
                write_settings(slot.root, plan, job)
                _run_stages(project, slot.root, plan.experiment["targets"], progress)
            finally:
                files = _keep(slot.root, temporary, progress.done)
            commit = point_commit(project, plan.snapshot, files, f"{plan.id}: {job.point}, repetition {job.repetition}")
            pin(project, plan.id, f"{job.point}-r{job.repetition}", commit)
    except Exception as error:
        code, message = _explain(error, slot, project)
    ran = {name: round(seconds, 3) for name, seconds in progress.ran.items()}
    status = Status(
        state="failed" if code else "done", exit_code=code, message=message, ran=list(ran), stage_seconds=ran,
        seconds=0.0, waited_s=round(progress.waited_s, 3), commit=commit, node=socket.gethostname(),
        slot=slot.tree.name if slot else "", finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip
    finish(temporary, target, replace(status, seconds=round(time.time() - started, 3)))


def finish(temporary: Path, target: Path, status: Status) -> None:
    """Write the status and put the whole record in its place."""
    write_status(temporary, status)
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)


def write_settings(root: Path, plan: Plan, job: Job) -> None:
    """Compose the point's settings in the slot, with the session and repetition of its timings."""
    measure = [f"measure.session={plan.session}", f"measure.repetition={job.repetition}"]
    write_params(compose(root / "conf", [*plan.point(job.point).overrides, *measure]), root)


# --- the stages ----------------------------------------------------------------------------------------------


def stage_environment(project: Path, root: Path) -> dict[str, str]:
    """What the stages of a job find in their environment, beside what the user has set."""
    path = [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "ONEAXIS_PROJECT": str(project),
        "ONEAXIS_PARENT_PID": str(os.getpid()),
        # Stages are called as `python stages/x.py`: this interpreter has to be the first on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(path),
        "MLFLOW_TRACKING_URI": _store(project),
    }


def _store(project: Path) -> str:
    """The tracking URI; a path relative to the project would be another one in a slot."""
    given = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project / 'mlflow.db'}"
    if given.startswith("sqlite:///"):
        return f"sqlite:///{project / given.removeprefix('sqlite:///')}"
    return given if ":" in given else str(project / given)


def _run_stages(project: Path, root: Path, targets: Sequence[str], progress: Progress) -> None:
    from dvc.repo import Repo, lock_repo

    for name in ("DVC_ROOT", "DVC_STAGE"):
        os.environ.pop(name, None)
    os.environ.update(stage_environment(project, root))
    # DVC names stages relative to the working directory.
    os.chdir(root)
    heard = _Heard()
    logging.getLogger("dvc.stage.run").addHandler(heard)
    # What `Repo.reproduce` does for each stage, without its reading dvc.yaml and dvc.lock anew for every one: that
    # took most of a job's time.
    with Repo(str(root)) as repo, lock_repo(repo):
        order = stage_order(repo, targets)
        bring_files(project, root, order)
        keys = stage_keys(repo, order, {})
        remote = shares(repo)
        for stage in order:
            name = stage_name(repo, stage)
            with single_flight(project, keys[name]) as waited:
                progress.waited_s += waited
                (root / STATE / "failure.json").unlink(missing_ok=True)
                if remote:
                    fetch_stage(repo, name)
                if stage.reproduce(pull=remote):
                    stage.dump(update_pipeline=False)
                if remote and name in heard.started:
                    share_stage(repo, name)
            progress.done.append(stage)
            if name in heard.started:
                seconds, lease = _measured(root, name, time.time() - heard.started[name])
                progress.ran[name] = seconds - lease
                progress.waited_s += lease


class _Heard(logging.Handler):
    """When DVC said that it runs a stage: `Repo.reproduce` counts restored stages as run."""

    def __init__(self) -> None:
        super().__init__()
        self.started: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Running stage") and record.args:
            self.started[str(record.args[0])] = time.time()  # type: ignore[index]


def _measured(root: Path, stage: str, seconds: float) -> tuple[float, float]:
    """Seconds in the stage's own process, as its trace says (else `seconds`), and of them waiting for the device."""
    trace = root / STATE / "ran.jsonl"
    lines = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()] if trace.is_file() else []
    own = [line for line in lines if line["stage"] == stage]
    waited = 0.0
    if own:
        lease = read_json(root / ARTIFACTS / f"{stage}.provenance.json").get("lease") or {}
        leases = lease if isinstance(lease, list) else [lease]
        waited = sum(float(one.get("waited_s", 0.0)) for one in leases)
    return float(own[-1].get("seconds", seconds)) if own else seconds, waited


# --- the record ----------------------------------------------------------------------------------------------


def _keep(root: Path, folder: Path, stages: Sequence[Any]) -> dict[str, Path]:
    """Copy settings, lock and all but large outputs into the record.

    Returns:
        What the job's commit holds: settings, lock, and the metrics that DVC does not cache; by path in the project.
    """
    files: dict[str, Path] = {}
    if (root / PARAMS).is_file():
        files[PARAMS] = Path(shutil.copy2(root / PARAMS, folder / PARAMS))
    if (root / "dvc.lock").is_file():
        files["dvc.lock"] = folder / "dvc.lock"
        _write_lock(root / "dvc.lock", folder / "dvc.lock", {stage.name for stage in stages})
    for stage in stages:
        for out in stage.outs:
            path = Path(out.fs_path)
            if not path.is_relative_to(root):
                continue
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                if file.is_file() and file.stat().st_size <= LARGEST_KEPT_BYTES:
                    kept = folder / file.relative_to(root)
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, kept)
                    if out.is_metric and not out.use_cache:
                        files[str(file.relative_to(root))] = kept
    return files


def _write_lock(source: Path, target: Path, stages: set[str]) -> None:
    """Copy a `dvc.lock` without the stages that are not this job's: an earlier job of the slot left them."""
    if set(re.findall(r"^  (\S+):$", source.read_text(encoding="utf-8"), re.M)) <= stages:
        # Nothing to leave out, and reading YAML is slow.
        shutil.copy2(source, target)
        return
    yaml = YAML()
    yaml.width = 10_000
    document = yaml.load(source.read_text(encoding="utf-8"))
    for name in [name for name in document.get("stages", {}) if name not in stages]:
        del document["stages"][name]
    with target.open("w", encoding="utf-8") as file:
        yaml.dump(document, file)


# --- how it ends ---------------------------------------------------------------------------------------------


def _explain(error: Exception, slot: Slot | None, project: Path) -> tuple[int, str]:
    """Exit code and one line: the stage's own words, else what the disk says, else the error's."""
    if slot and (slot.root / STATE / "failure.json").is_file():
        said = read_json(slot.root / STATE / "failure.json")
        return int(said["code"]), f"{said['stage']} failed: {said['message']}"
    if isinstance(error, UserError | RunError):
        return error.exit_code, str(error)
    chain = _chain(error)
    places = [cache_dir(project), project / STATE, *([slot.root / ARTIFACTS] if slot else [])]
    for cause in chain:
        number, place = getattr(cause, "errno", None), getattr(cause, "filename", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            # DVC's copies do not say which file: then it is the folder with the least room.
            there = [folder for folder in places if folder.is_dir()] or [project]
            fullest = min(there, key=lambda folder: psutil.disk_usage(str(folder)).free)
            return 1, f"the disk is full ({place or fullest}); free space, then resume"
        if number in (errno.EROFS, errno.EACCES, errno.EPERM):
            return 1, f"{place or project}: cannot be written to; allowed: a folder that can"
    if room := no_room(places):
        return 1, room
    if slot and (slot.root / STATE / "running.json").is_file():
        mark = read_json(slot.root / STATE / "running.json")
        return 1, f"{mark['stage']} was killed (process {mark['pid']}), perhaps for want of memory"
    said = [" ".join(str(cause).split()) for cause in chain]
    return 1, (next((words for words in reversed(said) if words), "") or type(error).__name__)[:500]


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    return chain


def _end_with_starter() -> None:
    """Interrupt this process once, when asked to end or when what started it is gone."""

    def interrupt(_number: int, _frame: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    starter = os.environ.get("ONEAXIS_STARTER_PID", "")
    parent = psutil.Process().parent()
    if parent is None or str(parent.pid) != starter:
        raise KeyboardInterrupt
    watch(parent)


def _stop_stages() -> None:
    """End what DVC has started here and has not ended: the stage, not what the stage started and will stop itself."""
    stages: list[psutil.Process] = []
    for child in psutil.Process().children():
        try:
            stages.extend((child.children() if child.name() in SHELLS else []) or [child])
        except psutil.Error:
            continue
    below = [process for stage in stages for process in _children(stage)]
    end_processes(stages)
    end_processes(below)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


if __name__ == "__main__":
    main(sys.argv[1:])
