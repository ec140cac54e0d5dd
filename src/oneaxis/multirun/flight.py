"""What a stage would compute, as a key, and a lock by that key: a stage that several jobs want runs once.

The key of a stage is a Merkle hash: its command, its parameters, its outputs' paths, the content of the files that it
reads and the keys of the stages that make what it reads. It needs no artifact, so a plan can count, before anything
runs, how many times each stage will. Whoever holds the lock of a key runs the stage or lets DVC restore it; those who
waited then find it in DVC's run cache.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oneaxis.artifacts import sha256_file
from oneaxis.errors import UserError
from oneaxis.multirun.locks import take
from oneaxis.stage import STATE

FLIGHT = "flight"


def stage_name(repo: Any, stage: Any) -> str:
    """The stage's name; with its `dvc.yaml` before it where that is not the project's own. DVC's own is by folder."""
    path = Path(stage.path).relative_to(repo.root_dir)
    return stage.name if str(path) == "dvc.yaml" else f"{path}:{stage.name}"


def stage_order(repo: Any, targets: Sequence[str]) -> list[Any]:
    """The pipeline stages that `targets` need (all when empty), each after those that it reads from.

    Args:
        repo: a `dvc.repo.Repo`. targets: stage names, or `folder/dvc.yaml:name`.

    Raises:
        UserError: for a target that is not a stage.
    """
    import networkx

    stages = [stage for stage in repo.index.stages if stage.cmd]
    place = {stage_name(repo, stage): number for number, stage in enumerate(stages)}
    graph = repo.index.graph
    wanted: set[Any] = set()
    for target in targets or list(place):
        if target not in place:
            raise UserError(f"{target}: no such stage; allowed: {', '.join(place)}")
        stage = stages[place[target]]
        wanted |= {stage, *networkx.descendants(graph, stage)}
    # DVC's edges point from a stage to what it reads; the order of dvc.yaml settles what they leave open.
    needed = graph.subgraph(stage for stage in wanted if stage.cmd).reverse()
    return list(networkx.lexicographical_topological_sort(needed, key=lambda stage: place[stage_name(repo, stage)]))


def stage_keys(repo: Any, order: Sequence[Any], hashes: MutableMapping[str, str]) -> dict[str, str]:
    """The key of every stage of `order`, by its name.

    Args:
        hashes: content hashes of files by path, filled as they are computed; share it between points.

    Raises:
        UserError: for a file that a stage reads and nothing makes, naming both.
    """
    keys: dict[str, str] = {}
    makers = [(Path(out.fs_path), stage_name(repo, stage)) for stage in order for out in stage.outs]
    for stage in order:
        name = stage_name(repo, stage)
        reads: dict[str, Any] = {}
        for dep in stage.deps:
            if hasattr(dep, "read_params"):
                reads[dep.def_path] = _params(dep)
                continue
            path = Path(dep.fs_path)
            from_stages = sorted({maker for out, maker in makers if maker != name and _overlap(out, path)})
            reads[dep.def_path] = [keys[maker] for maker in from_stages] or _content(path, name, hashes)
        facts = {"cmd": stage.cmd, "reads": reads, "outs": sorted(out.def_path for out in stage.outs)}
        text = json.dumps(facts, sort_keys=True, default=str)
        keys[name] = hashlib.sha256(text.encode()).hexdigest()
    return keys


def _params(dep: Any) -> Mapping[str, Any]:
    # DVC flattens nothing here: the section as params.yaml holds it.
    return dict(dep.read_params())


def _overlap(one: Path, other: Path) -> bool:
    return one == other or one in other.parents or other in one.parents


def _content(path: Path, stage: str, hashes: MutableMapping[str, str]) -> str:
    if str(path) not in hashes:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            listed = "\n".join(f"{file.relative_to(path)} {_quick(file)}" for file in files)
            hashes[str(path)] = hashlib.sha256(listed.encode()).hexdigest()
        elif path.is_file():
            hashes[str(path)] = _quick(path)
        else:
            raise UserError(f"{path.name}: missing, and {stage} reads it; allowed: a file that is there, is in git or "
                            "is an output of a stage")  # fmt: skip
    return hashes[str(path)]


LARGE_BYTES = 100 * 2**20


def _quick(path: Path) -> str:
    """A file's content hash; of a large one its size and time, which single flight may use and a cache may not."""
    facts = path.stat()
    return sha256_file(path) if facts.st_size <= LARGE_BYTES else f"{facts.st_size} {facts.st_mtime_ns}"


def runs_each_time(stage: Any) -> bool:
    """Whether DVC has no run cache for it: such a stage runs in every job that needs it."""
    persists = any(out.persist for out in stage.outs)
    return bool(stage.is_callback or stage.always_changed or persists or not stage.deps or not stage.outs)


@contextmanager
def single_flight(project: Path, key: str) -> Iterator[float]:
    """Hold the lock of `key`; yields the seconds waited for it. The kernel frees that of a dead holder."""
    folder = project / STATE / FLIGHT
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    lock = take(folder / f"{key[:32]}.lock", wait=True)
    assert lock is not None
    with lock:
        yield time.monotonic() - started
