"""A job on a node that does not share the project's folder (Ray): the project goes out with it, the record comes home.

Out, as bytes: the snapshot's objects without history, plan.json, the user's files that git ignores, the DVC remote. On
the node that becomes a project of its own under `$ONEAXIS_NODE_ROOT` (or `~/.cache/oneaxis/nodes/`), with its own DVC
cache; there the job runs as anywhere else. Before a stage, what another node computed for the very same inputs is
fetched from the remote (only that); after a stage that ran, its outputs and its run cache entry are pushed. Home, as
bytes: the job's record, its words and its commit; judge, report and promote then work as if it had run here.

A node is one of its own when `ONEAXIS_NODE_ROOT` is set there, or the multirun's plan.json is not at its path there.
"""

import fcntl
import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from oneaxis import __version__
from oneaxis.errors import RunError, UserError
from oneaxis.lease import environment_with
from oneaxis.multirun.job import log_file, run_job
from oneaxis.multirun.record import MULTIRUN, PLAN, Plan, Status, job_folder, read_plan, write_status
from oneaxis.multirun.share import NODE
from oneaxis.multirun.snapshot import git, pin, repository
from oneaxis.stage import STATE

LARGEST_BYTES = 64 * 2**20
"""The user's files that travel with the jobs, together."""


@dataclass(frozen=True)
class Payload:
    """What a node needs to run jobs of one multirun. The remote's settings may hold secrets: never printed."""

    project: Path
    """Where the project lies on the machine that launched."""
    prefix: str
    """The project's root in its git repository: empty, or with a slash at its end."""
    multirun: str
    plan: bytes
    snapshot: str
    pack: bytes = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)
    left_out: str
    """Why the user's files are not among them; empty when they are."""
    remote: str
    """Name of the default DVC remote; empty without one."""
    remotes: Mapping[str, Any] = field(repr=False)
    tracking: str
    """A tracking server that nodes reach; empty for a store on the launching machine's disk."""
    version: str = __version__


@dataclass(frozen=True)
class Returned:
    """A job that ran elsewhere."""

    status: Status
    multirun: str
    index: int
    record: bytes = field(repr=False)
    pack: bytes = field(repr=False)
    log: bytes = field(repr=False)


# --- on the machine that launches ----------------------------------------------------------------------------


def job_task(project: Path, plan: Plan, todo: Sequence[int], launcher: str) -> Callable[[int], Any]:
    """The function that a launcher calls per job: `todo[index]` is the job's place in the plan."""
    if launcher != "ray":
        return partial(run_here, project, plan.id, tuple(todo))
    payload = make_payload(project, plan)
    if not payload.remote:
        print("oneaxis: no DVC remote is configured (core.remote): a node that does not share this folder computes "
              "every stage itself", file=sys.stderr, flush=True)  # fmt: skip
    return partial(run_anywhere, payload, tuple(todo))


def run_here(project: Path, multirun: str, todo: Sequence[int], index: int) -> Status:
    """Job `todo[index]`, in this project."""
    return run_job(project, multirun, todo[index])


def make_payload(project: Path, plan: Plan) -> Payload:
    """Gather what a node needs."""
    from dvc.repo import Repo

    with Repo(str(project)) as repo:
        remotes = {name: dict(settings) for name, settings in repo.config["remote"].items()}
        remote = repo.config["core"].get("remote", "")
    _, prefix = repository(project)
    files, left_out = _user_files(project, plan)
    store = os.environ.get("MLFLOW_TRACKING_URI", "")
    return Payload(
        project=project,
        prefix=prefix,
        multirun=plan.id,
        plan=(project / MULTIRUN / plan.id / PLAN).read_bytes(),
        snapshot=plan.snapshot,
        pack=_pack(project, ["--no-walk", plan.snapshot]),
        files=files,
        left_out=left_out,
        remote=remote,
        remotes=remotes,
        tracking=store if "://" in store and not store.startswith(("sqlite:", "file:")) else "",
    )


def _user_files(project: Path, plan: Plan) -> tuple[dict[str, bytes], str]:
    """Files in the project that stages read and the snapshot lacks, with their content."""
    from oneaxis.config.compose import compose
    from oneaxis.config.schema import derived_paths

    tracked = set(git(project, "ls-tree", "-r", "-z", "--name-only", plan.snapshot, ".").split("\0"))
    files: dict[str, Path] = {}
    for point in plan.points:
        settings = compose(project / "conf", list(point.overrides)).model_dump(mode="json")
        for name, path in derived_paths(settings).items():
            source = project / path
            if name.endswith("_source") and not Path(path).is_absolute():
                found = [source] if source.is_file() else sorted(source.rglob("*"))
                names = {str(file.relative_to(project)): file for file in found if file.is_file()}
                files |= {each: file for each, file in names.items() if each not in tracked}
    size = sum(file.stat().st_size for file in files.values())
    if size > LARGEST_BYTES:
        return {}, (f"{', '.join(sorted(files)[:3])}: {size / 2**20:.0f} MiB that git ignores; allowed: "
                    f"{LARGEST_BYTES // 2**20} MiB, or an absolute path that is there on every node")  # fmt: skip
    return {name: file.read_bytes() for name, file in files.items()}, ""


def _pack(root: Path, revisions: Sequence[str]) -> bytes:
    """A git pack of these revisions' objects."""
    listed = git(root, "rev-list", "--objects", *revisions)
    done = subprocess.run(["git", "-C", str(root), "pack-objects", "-q", "--stdout"], input=listed.encode() + b"\n",
                          capture_output=True, check=False)  # fmt: skip
    if done.returncode:
        raise RunError(f"git pack-objects: {done.stderr.decode(errors='replace').strip()[:300]}")
    return done.stdout


def _unpack(root: Path, pack: bytes) -> None:
    done = subprocess.run(
        ["git", "-C", str(root), "unpack-objects", "-q"], input=pack, capture_output=True, check=False
    )
    if done.returncode:
        raise RunError(f"git unpack-objects: {done.stderr.decode(errors='replace').strip()[:300]}")


def extract_within(archive: tarfile.TarFile, target: Path) -> None:
    """Into a folder and nowhere else: by the `data` filter, which Python 3.11.3 and older do not have.

    Raises:
        RunError: for a member that leads out of the folder, or is neither file nor folder.
    """
    if hasattr(tarfile, "data_filter"):
        archive.extractall(target, filter="data")
        return
    for member in archive.getmembers():
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise RunError(f"the record of a node holds {member.name}; allowed: files and folders within it")
    archive.extractall(target)


def bring_home(project: Path, returned: Returned) -> Status:
    """Put a job's record, words and commit where a job that ran here would have left them."""
    folder = project / MULTIRUN / returned.multirun
    plan = read_plan(folder)
    job = plan.jobs[returned.index]
    log = log_file(folder, job)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(returned.log)
    if returned.pack:
        _unpack(project, returned.pack)
        pin(project, plan.id, f"{job.point}-r{job.repetition}", returned.status.commit)
    target = job_folder(folder, job)
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(returned.record)) as archive:
        extract_within(archive, temporary)
    write_status(temporary, returned.status)
    shutil.rmtree(target, ignore_errors=True)
    temporary.replace(target)
    return returned.status


# --- on the node ---------------------------------------------------------------------------------------------


def run_anywhere(payload: Payload, todo: Sequence[int], index: int) -> Status | Returned:
    """Job `todo[index]`: in the project where this node has it, else in a project of the node's own."""
    if payload.version != __version__:
        raise UserError(f"{socket.gethostname()}: has oneaxis {__version__}; allowed: {payload.version}, as on the "
                        "machine that launched")  # fmt: skip
    plan = payload.project / MULTIRUN / payload.multirun / PLAN
    if "ONEAXIS_NODE_ROOT" not in os.environ and plan.is_file() and plan.read_bytes() == payload.plan:
        return run_job(payload.project, payload.multirun, todo[index])
    project = prepare_node(payload)
    changed = {NODE: payload.remote or "alone"}
    if payload.tracking:
        changed["MLFLOW_TRACKING_URI"] = payload.tracking
    with environment_with(changed):
        status = run_job(project, payload.multirun, todo[index])
    return _returned(project, payload, todo[index], status)


def node_root(payload: Payload) -> Path:
    """The folder of this project's clone on a node."""
    above = Path(os.environ.get("ONEAXIS_NODE_ROOT") or Path.home() / ".cache" / "oneaxis" / "nodes")
    return above / f"{payload.project.name}-{hashlib.sha256(str(payload.project).encode()).hexdigest()[:8]}"


def prepare_node(payload: Payload) -> Path:
    """Make this node's project hold what the multirun needs; returns its root."""
    if payload.left_out:
        raise UserError(payload.left_out)
    top = node_root(payload)
    project = top / payload.prefix
    top.mkdir(parents=True, exist_ok=True)
    with (top.parent / f"{top.name}.lock").open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (top / ".git" / "HEAD").is_file():
            git(top, "init", "-q")
        shallow = top / ".git" / "shallow"
        known = shallow.read_text(encoding="utf-8").split() if shallow.is_file() else []
        if payload.snapshot not in known:
            _unpack(top, payload.pack)
            # The commit's parents stayed at home.
            shallow.write_text("".join(f"{commit}\n" for commit in [*known, payload.snapshot]), encoding="utf-8")
        pin(top, payload.multirun, "snapshot", payload.snapshot)
        if _head(top) != payload.snapshot:
            git(top, "checkout", "-q", "--force", "--detach", payload.snapshot)
        _configure_dvc(project, payload)
        (project / STATE).mkdir(exist_ok=True)
        for name, content in payload.files.items():
            _write_if_other(project / name, content)
        _write_if_other(project / MULTIRUN / payload.multirun / PLAN, payload.plan)
    return project


def _head(top: Path) -> str:
    with suppress(RunError):
        return git(top, "rev-parse", "--verify", "-q", "HEAD")
    return ""


def _write_if_other(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _configure_dvc(project: Path, payload: Payload) -> None:
    """The node's own cache and the shared remote, in a file that only its user reads."""
    from dvc.config import Config

    path = project / ".dvc" / "config.local"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    with Config(str(project / ".dvc"), validate=False).edit("local", validate=False) as ours:
        ours["cache"]["dir"] = str(project / ".dvc" / "cache")
        if payload.remote:
            ours["core"]["remote"] = payload.remote
        ours["remote"].update({name: dict(settings) for name, settings in payload.remotes.items()})


def _returned(project: Path, payload: Payload, index: int, status: Status) -> Returned:
    folder = project / MULTIRUN / payload.multirun
    job = read_plan(folder).jobs[index]
    record = io.BytesIO()
    with tarfile.open(fileobj=record, mode="w:gz", compresslevel=1) as archive:
        archive.add(job_folder(folder, job), arcname=".")
    log = log_file(folder, job)
    return Returned(
        status=replace(status, node=f"{status.node}:{node_root(payload)}"),
        multirun=payload.multirun,
        index=index,
        record=record.getvalue(),
        pack=_pack(project, [status.commit, f"^{payload.snapshot}"]) if status.commit else b"",
        log=log.read_bytes() if log.is_file() else b"",
    )
