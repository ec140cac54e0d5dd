"""What multiruns leave behind, removed: slots and locks that nobody holds, whole records, unused objects of the cache.

oneaxis clean            slots, locks, half records and registrations of work trees that nobody holds
oneaxis clean ID ...     these multiruns: their records and refs
oneaxis clean --cache    what neither the workspace nor a remaining multirun uses, out of the DVC cache
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from oneaxis.errors import UserError
from oneaxis.multirun.flight import FLIGHT
from oneaxis.multirun.locks import take
from oneaxis.multirun.record import MULTIRUN, PLAN, multirun_folder, read_status
from oneaxis.multirun.run import RUNNING, hold
from oneaxis.multirun.slots import PLANNING, SLOTS, free_slots, remove
from oneaxis.multirun.snapshot import git, refs, repository
from oneaxis.pipeline import work_tree
from oneaxis.stage import STATE


def clean(root: Path, multiruns: Sequence[str], *, cache: bool) -> str:
    """Remove what is asked for; returns what to say.

    Raises:
        UserError: for an unknown multirun or one that is running; for the cache, while any run is at work.
    """
    folders = [multirun_folder(root, multirun) for multirun in multiruns]
    said = []
    for folder in folders:
        with hold(root, folder.name):
            size = size_bytes(folder)
            for ref in refs(root, folder.name):
                git(root, "update-ref", "-d", ref)
            shutil.rmtree(folder)
        said.append(f"{folder.name}: record and refs removed, {_mib(size)}; its runs in MLflow stay")
    if not multiruns:
        said.append(clean_slots(root))
    if cache:
        said.append(clean_cache(root))
    return "\n".join(said)


def clean_slots(root: Path) -> str:
    """Remove the slots that no job holds, stale locks, and the half records of jobs that were killed."""
    freed, kept = 0, 0
    with free_slots(root) as trees:
        for tree in trees:
            freed += size_bytes(tree)
            remove(root, tree)
        count = len(trees)
    folder = root / STATE / SLOTS
    kept = len(list(folder.glob("*.lock"))) if folder.is_dir() else 0
    for place in (FLIGHT, RUNNING):
        for lock in sorted((root / STATE / place).glob("*.lock")):
            _remove_unheld(lock)
    for plan in sorted((root / MULTIRUN).glob(f"*/{PLAN}")):
        try:
            with hold(root, plan.parent.name):
                for half in plan.parent.glob("points/*/.tmp-*"):
                    freed += size_bytes(half)
                    shutil.rmtree(half)
        except UserError:
            continue
    repository(root)
    git(root, "worktree", "prune")
    held = f"; {kept} held by jobs at work stay" if kept else ""
    return f"{count} slots removed, {_mib(freed)} freed{held}"


def _remove_unheld(path: Path) -> None:
    if lock := take(path):
        with lock:
            path.unlink(missing_ok=True)


def clean_cache(root: Path) -> str:
    """Keep in the DVC cache only what the workspace and the remaining multiruns' jobs use.

    `dvc gc` alone knows branches, tags and experiments, not our refs, and drops metrics that only the run cache holds.

    Raises:
        UserError: while a run is at work in the workspace or a multirun is running.
    """
    from dvc.repo import Repo
    from dvc_data.hashfile.gc import gc
    from dvc_data.hashfile.hash_info import HashInfo

    folder = root / STATE / SLOTS
    folder.mkdir(parents=True, exist_ok=True)
    # A multirun that begins meanwhile waits for it.
    (folder / f"{PLANNING}.lock").touch()
    with ExitStack() as held:
        held.enter_context(work_tree(root))
        records = []
        for plan in sorted((root / MULTIRUN).glob(f"*/{PLAN}")):
            held.enter_context(hold(root, plan.parent.name))
            records += sorted(plan.parent.glob("points/*/r*"))
        free = held.enter_context(free_slots(root))
        if len(list(folder.glob("*.lock"))) > len(free):
            raise UserError("clean --cache: a job is at work in a slot; wait for it or stop it")
        repo = held.enter_context(Repo(str(root)))
        held.enter_context(repo.lock)
        commits = [status.commit for record in records if (status := read_status(record)) and status.commit]
        before = size_bytes(Path(repo.cache.local_cache_dir))
        used: set[Any] = set()
        # What a multirun's targets left out, and objects that are gone already, are no news here.
        logging.getLogger("dvc").setLevel(logging.CRITICAL)
        for found in repo.used_objs(revs=commits, skip_failed=True).values():
            used |= found
        locks = [root / "dvc.lock", *(record / "dvc.lock" for record in records)]
        used |= {HashInfo("md5", md5) for md5 in _recorded(locks, Path(repo.cache.local.path))}
        gc(repo.cache.local, used)
        freed = before - size_bytes(Path(repo.cache.local_cache_dir))
    return f"cache: {_mib(freed)} freed; kept what the workspace and {len(commits)} jobs of multiruns use"


def _recorded(locks: Sequence[Path], objects: Path) -> set[str]:
    """The hashes of all outputs in these `dvc.lock` files, the metrics that DVC does not cache included, and of the
    files in those that are folders, as far as the cache has their listings.

    Args:
        objects: the folder of the cache's objects (`files/md5`).
    """
    found = set()
    for path in locks:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")) if path.is_file() else None
        for stage in (document or {}).get("stages", {}).values():
            found |= {str(out["md5"]) for out in stage.get("outs", []) if "md5" in out}
    for name in [name for name in found if name.endswith(".dir")]:
        listing = objects / name[:2] / name[2:]
        if listing.is_file():
            found |= {str(entry["md5"]) for entry in json.loads(listing.read_text(encoding="utf-8"))}
    return found


def size_bytes(path: Path) -> int:
    """What a file or folder takes on disk; files with several names (hard links) count once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            facts = os.lstat(Path(folder) / name)
            seen[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
