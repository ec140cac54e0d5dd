"""The MLflow run of a work tree: one complete run per state of the pipeline.

A *state* is what `params.yaml` and the entries of `dvc.lock` say (all stages but `report`, which only reads the
others). `track` makes the run of the present state complete from the artifacts of all stages, computed or restored,
and may be called any number of times. While stages work, `oneaxis.live` writes their step metrics into the *active*
run, which `track` then adopts.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneaxis.artifacts import ARTIFACTS, read_json, write_json
from oneaxis.config import STAGE_SECTIONS, read_params
from oneaxis.errors import RunError, UserError
from oneaxis.live import (
    PROJECT_VARIABLE,
    active_run,
    connect,
    find_run,
    first_line,
    locked,
    open_run,
    params_hash,
    where,
)
from oneaxis.names import run_name
from oneaxis.stage import STATE, git_state
from oneaxis.track.content import LONGEST_TAG, collect, locked_stages, made_here, without_secrets
from oneaxis.track.write import register, write

STATE_TAG = "oneaxis.state"


def track(root: Path, *, report: Path | None = None, report_metrics: Mapping[str, float] | None = None) -> str:
    """Make the MLflow run of the pipeline's present state complete; a second call changes nothing.

    Args:
        root: the project. report: the report stage's folder while that stage is still at work (else its artifact).
        report_metrics: that stage's metrics, likewise.

    Returns:
        The run's id.

    Raises:
        UserError: when there is no `params.yaml`. RunError: when MLflow's store cannot be used.
    """
    params = read_params(root)
    try:
        with locked(root / STATE / "track.lock"):
            return _track(root, params, report, report_metrics)
    except UserError:
        raise
    except Exception as error:
        raise RunError(f"MLflow ({where(root)}): {first_line(error)}; the artifacts are kept, `oneaxis track` "
                       "tries again") from error  # fmt: skip


def track_in_stage(root: Path, *, report: Path, report_metrics: Mapping[str, float]) -> None:
    """`track` for the report stage: MLflow's failure is one line on stderr, never the stage's.

    In a job of a multirun it does nothing: the job itself is tracked, from its record, when it has ended.
    """
    if os.environ.get(PROJECT_VARIABLE):
        return
    try:
        track(root, report=report, report_metrics=report_metrics)
    except (UserError, RunError) as error:
        print(f"oneaxis: {error}", file=sys.stderr, flush=True)


def pipeline_state(root: Path) -> str:
    """Hex SHA-256 that names what the pipeline holds now: equal exactly when settings, inputs and outputs are equal."""
    held = {"params": read_params(root), "stages": locked_stages(root)}
    return hashlib.sha256(json.dumps(held, sort_keys=True, default=str).encode()).hexdigest()


def _track(root: Path, params: dict[str, Any], report: Path | None, report_metrics: Mapping[str, float] | None) -> str:
    client, experiment, uri = connect(root)
    state = pipeline_state(root)
    run = _run_of_state(client, experiment, uri, root, state)
    statuses = _statuses(root, run.data.tags, report is not None)
    computed = [name.removeprefix("stage.") for name, status in statuses.items() if status == "computed"]
    content = collect(root, computed=computed, report=report, report_metrics=report_metrics)
    content.tags.update({"mlflow.runName": run_name(params), STATE_TAG: state, **statuses})
    content.tags.update(_origin(root, run.data.tags))
    write(client, run, content)
    register(client, run, root, content.tags)
    _remember(root, str(run.info.run_id))
    return str(run.info.run_id)


def _run_of_state(client: Any, experiment: str, uri: str, root: Path, state: str) -> Any:
    """The run that has this state, else the active one of these settings, else a new one; tagged with the state."""
    found = find_run(client, experiment, STATE_TAG, state)
    if found:
        run_id = found.info.run_id
    else:
        run_id = open_run(client, experiment, uri, root)
        client.set_tag(run_id, STATE_TAG, state)
    # What a stage computes from now on belongs to a new state: the active run ends here. One that was opened for
    # a state which turned out to be known (a stage that was run again to the same bytes) has nothing to say.
    active = active_run(root)
    if (
        active
        and active.get("run_id") != run_id
        and active.get("store") == uri
        and active.get("params") == params_hash(root)
    ):
        client.set_terminated(active["run_id"], status="KILLED")
    (root / STATE / "active_run.json").unlink(missing_ok=True)
    return client.get_run(run_id)


def _origin(root: Path, had: Mapping[str, str]) -> dict[str, str]:
    """How the state came about: said once, by the run that computed it."""
    if "git.commit" in had:
        return {}
    tags = {"mlflow.source.name": "dvc repro", "mlflow.source.type": "LOCAL"}
    git = git_state(root)
    if git:
        tags["git.commit"] = tags["mlflow.source.git.commit"] = str(git["commit"])
        tags["git.dirty"] = str(git["dirty"]).lower()
    overrides = root / STATE / "last_run.json"
    if overrides.is_file():
        tags["overrides"] = without_secrets(" ".join(read_json(overrides).get("overrides", [])))[:LONGEST_TAG] or "none"
    return tags


def _statuses(root: Path, had: Mapping[str, str], reporting: bool) -> dict[str, str]:
    """`stage.<name>`: computed, when this state's artifact was made here since the last run; else restored."""
    trace = root / STATE / "ran.jsonl"
    lines = trace.read_text(encoding="utf-8").splitlines() if trace.is_file() else []
    seen = int(_tracked(root).get("lines", 0))
    recent = [json.loads(line) for line in lines[seen if seen <= len(lines) else 0 :] if line.strip()]
    computed = [*made_here(root, recent), *(["report"] if reporting else [])]
    statuses = {}
    for stage in STAGE_SECTIONS:
        if stage in computed:
            statuses[f"stage.{stage}"] = "computed"
        elif (root / ARTIFACTS / f"{stage}.provenance.json").is_file():
            statuses[f"stage.{stage}"] = had.get(f"stage.{stage}", "restored")
    return statuses


def _tracked(root: Path) -> dict[str, Any]:
    path = root / STATE / "tracked.json"
    return dict(read_json(path)) if path.is_file() else {}


def _remember(root: Path, run_id: str) -> None:
    """How far the trace of executed stages was told to MLflow."""
    trace = root / STATE / "ran.jsonl"
    lines = len(trace.read_text(encoding="utf-8").splitlines()) if trace.is_file() else 0
    write_json(root / STATE / "tracked.json", {"run_id": run_id, "lines": lines})
