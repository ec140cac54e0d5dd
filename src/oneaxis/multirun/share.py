"""Stages of a job on a node of its own, by way of the shared DVC remote: one stage's run cache entries and outputs.

`dvc fetch --run-cache` brings the entries of all stages there ever were, and `dvc push --run-cache` leaves the outputs
that DVC does not cache (metrics) out, without which a stage is not restored. Here it is the one stage, and whole.
A remote that does not answer costs computing, never the job.
"""

import os
from pathlib import Path
from typing import Any

from oneaxis.errors import RunError

NODE = "ONEAXIS_NODE"
"""In the environment of a job on a node of its own: the name of the DVC remote, or `alone` without one."""


def shares(repo: Any) -> bool:
    """Whether this job's stages go through a remote."""
    return os.environ.get(NODE, "alone") != "alone" and bool(repo.config["core"].get("remote"))


def fetch_stage(repo: Any, name: str) -> None:
    """Bring the run cache entries for what this stage would compute from the remote; DVC then pulls their outputs."""
    from dvc.stage.cache import _can_hash, _get_stage_hash

    try:
        stage = _stage(repo, name)
        stage.save_deps()
        if not _can_hash(stage):
            return
        cache, key = repo.stage_cache, _get_stage_hash(stage)
        odb = repo.cloud.get_remote_odb(None, "fetch --run-cache", hash_name="md5-dos2unix")
        there = odb.fs.join(odb.path, "runs", key[:2], key)
        if not odb.fs.exists(there):
            return
        here = Path(cache._get_cache_dir(key))
        for entry in odb.fs.find(there):
            target = here / odb.fs.name(entry)
            if not target.is_file():
                here.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
                odb.fs.get_file(entry, str(temporary))
                temporary.replace(target)
    except Exception as error:
        print(f"oneaxis: {name}: nothing fetched from the remote: {_brief(error)}", flush=True)


def share_stage(repo: Any, name: str) -> None:
    """Push the outputs of a stage that ran, metrics included, then its run cache entry, which says they are there."""
    from dvc.stage.cache import _can_hash, _get_cache_hash, _get_stage_hash
    from dvc.stage.serialize import to_single_stage_lockfile

    try:
        stage = _stage(repo, name)
        if not _can_hash(stage):
            return
        cache, key = repo.stage_cache, _get_stage_hash(stage)
        entry = to_single_stage_lockfile(stage)
        path = Path(cache._get_cache_path(key, _get_cache_hash(entry)))
        for objects in cache._create_stage(entry, wdir=stage.wdir).get_used_objs().values():
            if failed := repo.cloud.push(objects).failed:
                raise RunError(f"{len(failed)} objects could not be pushed")
        odb = repo.cloud.get_remote_odb(None, "push --run-cache", hash_name="md5-dos2unix")
        target = odb.fs.join(odb.path, "runs", key[:2], key, path.name)
        odb.fs.makedirs(odb.fs.parent(target), exist_ok=True)
        odb.fs.put_file(str(path), target)
    except Exception as error:
        print(f"oneaxis: {name}: not pushed to the remote, other nodes compute it: {_brief(error)}", flush=True)


def _stage(repo: Any, name: str) -> Any:
    """The stage as its files say now; not the object that `repo.reproduce` holds, whose hashes must stay."""
    from dvc.repo import Repo

    return Repo(repo.root_dir).stage.load_one("dvc.yaml", name)


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
