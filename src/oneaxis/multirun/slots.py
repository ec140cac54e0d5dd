"""Slots: git work trees in `.oneaxis/slots/<n>`, in each of which one job at a time runs the pipeline.

A job takes the first slot that nobody holds (a lock that the kernel frees when its holder dies) and sets it to the
snapshot. Artifacts of the job before stay: DVC keeps what still fits and restores the rest from the one cache that all
slots share. A slot that a kill left broken is repaired or made anew. There are as many slots as jobs ever ran at once,
at most `limit()`.
"""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from yaml import CSafeLoader, YAMLError, load

from oneaxis.artifacts import ARTIFACTS
from oneaxis.errors import RunError, UserError
from oneaxis.multirun.locks import take
from oneaxis.multirun.snapshot import git, repository
from oneaxis.stage import STATE

SLOTS = "slots"
PLANNING = "plan"
"""Name of the slot in which points are looked at before the first job starts."""
GOES_ON = ("scratch", "sample_pairs")
"""What stays of a slot's state: what a killed stage goes on from. It knows which inputs it is of."""
GRACE_S = 30.0
"""What a left-over process gets between being asked to end and being killed."""


@dataclass(frozen=True)
class Slot:
    """A work tree, held."""

    tree: Path
    """The top of the git work tree."""
    root: Path
    """The project's root in it."""
    waited_s: float


def limit() -> int:
    """How many jobs of a project run at once on a machine: the rest wait. `ONEAXIS_SLOTS` sets it.

    Raises:
        UserError: when `ONEAXIS_SLOTS` is no number above 0.
    """
    given = os.environ.get("ONEAXIS_SLOTS", "")
    if given and not (given.isdigit() and int(given) > 0):
        raise UserError(f"ONEAXIS_SLOTS={given}: allowed: a whole number from 1")
    return int(given) if given else max(4, os.cpu_count() or 1)


@contextmanager
def take_slot(project: Path, snapshot: str, *, name: str | None = None) -> Iterator[Slot]:
    """Hold a slot set to `snapshot`, waiting until one is free.

    Args:
        name: take this very slot.

    Raises:
        RunError: when git cannot make it (a full disk).
    """
    folder = project / STATE / SLOTS
    folder.mkdir(parents=True, exist_ok=True)
    names = [name] if name else [str(number) for number in range(limit())]
    started = time.monotonic()
    while True:
        for candidate in names:
            lock = take(folder / f"{candidate}.lock")
            if lock is None:
                continue
            with lock:
                waited = time.monotonic() - started
                tree = folder / candidate
                end_left_overs(tree)
                prepare(project, tree, snapshot)
                root = tree / repository(project)[1]
                share_cache(project, root, cache_dir(project))
                yield Slot(tree, root, waited)
                return
        time.sleep(0.1)


@contextmanager
def free_slots(project: Path) -> Iterator[list[Path]]:
    """Hold every slot that no job holds; yields their work trees."""
    folder = project / STATE / SLOTS
    held = []
    try:
        for path in sorted(folder.glob("*.lock")) if folder.is_dir() else []:
            if lock := take(path):
                held.append((path.with_suffix(""), lock))
        yield [path for path, _ in held]
    finally:
        for _, lock in held:
            lock.close()


# --- a slot's processes ----------------------------------------------------------------------------------------


def end_left_overs(tree: Path) -> None:
    """End the processes that a killed job left at work in this slot (a stage's environment names it)."""
    end_processes([process for process in psutil.process_iter() if _works_in(process, tree)])


def _works_in(process: psutil.Process, tree: Path) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return Path(process.environ().get("DVC_ROOT", "/")).is_relative_to(tree)
    except (psutil.Error, OSError):
        return False


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Ask these to end (they stop what they started), then kill what is left of them."""
    for process in processes:
        try:
            process.terminate()
        except psutil.Error:
            continue
    _, left = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=GRACE_S)


# --- a slot's files --------------------------------------------------------------------------------------------


def prepare(project: Path, tree: Path, snapshot: str) -> None:
    """Make the work tree hold `snapshot`; ignored files (artifacts) stay. The caller holds the slot."""
    if not _is_sound(project, tree):
        _make(project, tree, snapshot)
        return
    prefix = repository(project)[1]
    root = tree / prefix
    lock = root / "dvc.lock"
    kept = lock.read_bytes() if _is_yaml(lock) else b""
    try:
        for stale in Path(git(tree, "rev-parse", "--absolute-git-dir")).glob("*.lock"):
            stale.unlink()
        git(tree, "checkout", "-q", "--force", "--detach", snapshot)
        git(tree, "reset", "-q", "--hard", snapshot)
        git(tree, "clean", "-ffdq", "-e", f"/{prefix}{STATE}", "-e", f"/{prefix}{ARTIFACTS}", "-e", f"/{prefix}.dvc")
    except RunError:
        _make(project, tree, snapshot)
        return
    # What DVC knows of the artifacts that are there; the snapshot's would have it restore them once more.
    if kept:
        lock.write_bytes(kept)
    for path in (root / STATE).glob("*"):
        if path.name not in GOES_ON:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    for path in [*(root / ".dvc" / "tmp").glob("rwlock*"), root / ".dvc" / "tmp" / "lock"]:
        path.unlink(missing_ok=True)
    for path in (root / ARTIFACTS).glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_sound(project: Path, tree: Path) -> bool:
    """Whether git takes `tree` for a work tree of the project's repository."""
    if not (tree / ".git").is_file():
        return False
    try:
        common = ("rev-parse", "--path-format=absolute", "--git-common-dir")
        return git(tree, *common) == git(project, *common) and Path(git(tree, "rev-parse", "--show-toplevel")) == tree
    except RunError:
        return False


def _is_yaml(path: Path) -> bool:
    """A kill in DVC's writing leaves half a `dvc.lock`. Whether it can be read, the fast parser can say."""
    try:
        return isinstance(load(path.read_text(encoding="utf-8"), Loader=CSafeLoader), dict)
    except (OSError, YAMLError, UnicodeDecodeError):
        return False


def _make(project: Path, tree: Path, snapshot: str) -> None:
    if tree.exists():
        shutil.rmtree(tree)
    with _registering(project):
        git(project, "worktree", "prune")
        git(project, "worktree", "add", "-f", "-f", "--detach", str(tree), snapshot)


@contextmanager
def _registering(project: Path) -> Iterator[None]:
    """One process at a time changes git's list of work trees."""
    lock = take(project / STATE / "worktrees.lock", wait=True)
    assert lock is not None
    with lock:
        yield


def remove(project: Path, tree: Path) -> None:
    """Remove a slot with its registration in git. The caller holds it."""
    end_left_overs(tree)
    if tree.exists():
        shutil.rmtree(tree)
    with _registering(project):
        git(project, "worktree", "prune")
    tree.with_name(f"{tree.name}.lock").unlink(missing_ok=True)


# --- a slot's DVC ----------------------------------------------------------------------------------------------


def share_cache(project: Path, root: Path, cache: Path) -> None:
    """Write the slot's `.dvc/config.local`: the project's own settings, and its cache by absolute path.

    Links of a cache would let a stage that writes in place change the cache itself: reflink or copy only.
    """
    from dvc.config import Config, merge
    from dvc.config_schema import RelPath

    path = root / ".dvc" / "config.local"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    theirs = Config(str(project / ".dvc"), validate=False)
    # Written out for both files of the project: relative paths in them are relative to its own `.dvc/`.
    with Config(str(root / ".dvc"), validate=False).edit("local", validate=False) as ours:
        for level in ("repo", "local"):
            merge(ours, theirs.load_one(level))
        # DVC writes ASCII only: a path relative to the file spares the names above the project.
        ours["cache"].update(dir=RelPath(str(cache)), type="reflink,copy")
        if str(root).isascii():
            # Else DVC's own folder for this work tree, named by its path.
            ours["core"]["site_cache_dir"] = str(root / ".dvc" / "tmp" / "site")


def cache_dir(project: Path) -> Path:
    """The project's DVC cache, wherever the user's settings put it.

    Raises:
        UserError: when the folder is no DVC project.
    """
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    try:
        with Repo(str(project)) as repo:
            return Path(repo.cache.local_cache_dir)
    except NotDvcRepoError as error:
        raise UserError(f"{project}: no DVC project; allowed: a folder with .dvc/, as `dvc init` makes it") from error


def bring_files(project: Path, root: Path, stages: Sequence[Any]) -> None:
    """Link or copy into the slot what stages read that neither git nor a stage puts there: ignored data of the user's.

    Raises:
        UserError: for a path that leaves the project; in a slot it would be another file.
    """
    from dvc.exceptions import DvcException

    made = [Path(out.fs_path) for stage in stages for out in stage.outs]
    tracked = set(git(root, "ls-files", "-z").split("\0"))
    for stage in stages:
        for dep in stage.deps:
            if hasattr(dep, "read_params") or dep.protocol != "local" or Path(dep.def_path).is_absolute():
                continue
            path = Path(os.path.normpath(dep.fs_path))
            if not path.is_relative_to(root):
                raise UserError(f"{dep.def_path}: leaves the project, and {stage.name} reads it; allowed: a path "
                                "inside the project, or an absolute one")  # fmt: skip
            if any(path == out or out in path.parents or path in out.parents for out in made):
                continue
            name = path.relative_to(root)
            for old in _files(root, name) - tracked:
                (root / old).unlink()
            for new in _files(project, name) - tracked:
                _link(project / new, root / new)
            if not path.exists():
                # An output of `dvc add` that is not in the workspace but perhaps in the cache.
                with suppress(DvcException):
                    stage.repo.checkout(targets=[str(path)])


def _files(root: Path, name: Path) -> set[str]:
    """The files at or below `root / name`, relative to `root`."""
    path = root / name
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(root)) for file in found}


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        # Another file system.
        shutil.copy2(source, target)
