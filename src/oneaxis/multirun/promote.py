"""A point of a multirun into the workspace: its settings, its `dvc.lock` and its outputs (`oneaxis promote ID POINT`).

Afterwards `dvc repro` of the multirun's targets has nothing to do, as long as the code is the multirun's.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import chdir, suppress
from pathlib import Path

from ruamel.yaml import YAML

from oneaxis.artifacts import write_json
from oneaxis.config.compose import PARAMS
from oneaxis.errors import RunError, UserError
from oneaxis.multirun.record import Job, job_folder, multirun_folder, read_plan, read_status
from oneaxis.multirun.snapshot import git, make_snapshot
from oneaxis.pipeline import work_tree
from oneaxis.stage import STATE

LOCK = "dvc.lock"


def promote(root: Path, multirun: str, point: str) -> str:
    """Bring a point (its repetition 0) into the workspace; returns what to say.

    Raises:
        UserError: for an unknown multirun or point, a point that is not done, or a run at work in the workspace.
        RunError: when the cache no longer holds its outputs; the workspace is then as before.
    """
    folder = multirun_folder(root, multirun)
    plan = read_plan(folder)
    names = [each.name for each in plan.points]
    if point not in names:
        raise UserError(f"{multirun}/{point}: no such point; allowed: {', '.join(names)}")
    record = job_folder(folder, Job(point, 0))
    status = read_status(record)
    if status is None or status.state != "done":
        raise UserError(f"{multirun}/{point}: {status.state if status else 'not run'}; allowed: a point that is done; "
                        f"`oneaxis run -m --resume {multirun}` runs what is left")  # fmt: skip
    for name in (PARAMS, LOCK):
        if not (record / name).is_file():
            raise UserError(f"{record / name}: missing; remove {record.name} there, and `oneaxis run -m --resume "
                            f"{multirun}` runs the job again")  # fmt: skip
    with work_tree(root):
        before = {name: (root / name).read_bytes() for name in (PARAMS, LOCK) if (root / name).is_file()}
        stages = _merge_lock(record / LOCK, root / LOCK)
        shutil.copy2(record / PARAMS, root / PARAMS)
        try:
            not_cached = _check_out(root, stages)
        except RunError:
            for name in (PARAMS, LOCK):
                (root / name).unlink(missing_ok=True)
                if name in before:
                    (root / name).write_bytes(before[name])
            raise
        for name in not_cached:
            (root / name).unlink(missing_ok=True)
            shutil.copy2(record / name, root / name)
        (root / STATE).mkdir(exist_ok=True)
        write_json(root / STATE / "last_run.json", {"overrides": list(plan.point(point).overrides)})
    said = f"{multirun}/{point}: in the workspace ({', '.join(stages)})"
    if plan.experiment["targets"]:
        said += f"; the multirun ended at {', '.join(plan.experiment['targets'])}: `dvc repro` runs what follows"
    if changed := _changed_since(root, plan.snapshot):
        said += f"; {len(changed)} files differ from the multirun's ({', '.join(changed[:3])}): `dvc repro` runs what "
        said += "they reach"
    return said


def _merge_lock(source: Path, target: Path) -> Sequence[str]:
    """Put the point's entries into the workspace's `dvc.lock`; returns their stages."""
    yaml = YAML()
    yaml.width = 10_000
    own = yaml.load(source.read_text(encoding="utf-8"))
    held = yaml.load(target.read_text(encoding="utf-8")) if target.is_file() else None
    merged = held or own
    merged.setdefault("stages", {}).update(own["stages"])
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        yaml.dump(merged, file)
    os.replace(temporary, target)
    return list(own["stages"])


def _check_out(root: Path, stages: Sequence[str]) -> Sequence[str]:
    """Outputs of these stages from the cache; returns those that DVC does not cache.

    Raises:
        RunError: when DVC cannot, in its words.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        # DVC names stages relative to the working directory.
        with chdir(root), Repo(str(root)) as repo:
            outs = [out for name in stages for out in repo.stage.get_target(name).outs]
            missing = [out.def_path for out in outs if out.use_cache and out.changed_cache()]
            if missing and repo.config["core"].get("remote"):
                # Computed on another node, which left its outputs in the shared remote.
                with suppress(DvcException):
                    repo.fetch(targets=list(stages))
                missing = [out.def_path for out in outs if out.use_cache and out.changed_cache()]
            if missing:
                raise RunError(f"{', '.join(missing)}: no longer in the DVC cache; `oneaxis run` with the point's "
                               "settings makes them anew")  # fmt: skip
            repo.checkout(targets=list(stages), force=True)
            return [out.def_path for out in outs if not out.use_cache]
    except (DvcException, OSError) as error:
        raise RunError(f"dvc checkout: {' '.join(str(error).split())[:300]}") from error


def _changed_since(root: Path, snapshot: str) -> Sequence[str]:
    """Files that differ between the multirun's snapshot and what is on disk."""
    return git(root, "diff", "--name-only", snapshot, make_snapshot(root)).splitlines()
