"""From `Content` to an MLflow run that holds exactly it: what is there already is not written again."""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from oneaxis.live import BATCH
from oneaxis.track.content import Content

ARTIFACTS_TAG = "oneaxis.artifacts"
REGISTER_VARIABLE = "ONEAXIS_REGISTER_MODEL"
PARAMS_PER_CALL = 90


def write(client: Any, run: Any, content: Content, *, status: str = "FINISHED", end_ms: int | None = None) -> None:
    """Complete a run and leave it `FINISHED`, `FAILED`, `KILLED` or, when more is to come, `RUNNING`."""
    from mlflow.entities import Metric, Param, RunTag

    run_id, had = str(run.info.run_id), run.data
    now = int(time.time() * 1000)
    metrics = [Metric(key, value, now, 0) for key, value in content.metrics.items() if had.metrics.get(key) != value]
    for key, points in content.curves.items():
        known = {point.step for point in client.get_metric_history(run_id, key)} if key in had.metrics else set()
        metrics += [Metric(key, value, now, step) for step, value in points if step not in known]
    for key, points in content.system.items():
        known = {point.timestamp for point in client.get_metric_history(run_id, key)} if key in had.metrics else set()
        metrics += [Metric(key, value, at, step) for step, (at, value) in enumerate(points) if at not in known]
    for start in range(0, len(metrics), BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + BATCH])
    settings = [Param(key, value) for key, value in content.params.items() if key not in had.params]
    for start in range(0, len(settings), PARAMS_PER_CALL):
        client.log_batch(run_id, params=settings[start : start + PARAMS_PER_CALL])
    tags = [RunTag(key, value) for key, value in content.tags.items() if had.tags.get(key) != value]
    if content.datasets and not run.inputs.dataset_inputs:
        _write_datasets(client, run_id, content.datasets)
    digest = _write_files(client, run_id, content.files, had.tags.get(ARTIFACTS_TAG, ""))
    if digest and digest != had.tags.get(ARTIFACTS_TAG):
        tags.append(RunTag(ARTIFACTS_TAG, digest))
    for start in range(0, len(tags), PARAMS_PER_CALL):
        client.log_batch(run_id, tags=tags[start : start + PARAMS_PER_CALL])
    if run.info.status != status and status == "RUNNING":
        client.update_run(run_id, status=status)
    elif run.info.status != status:
        client.set_terminated(run_id, status=status, end_time=end_ms)


def _write_datasets(client: Any, run_id: str, datasets: list[dict[str, str]]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = [
        DatasetInput(Dataset(facts["name"], facts["digest"], facts["source_type"], facts["source"],
                             profile=facts["profile"]), [InputTag("mlflow.data.context", facts["context"])])
        for facts in datasets
    ]  # fmt: skip
    client.log_inputs(run_id, datasets=inputs)


def _write_files(client: Any, run_id: str, files: dict[str, bytes], had: str) -> str:
    """Log the files in one call, unless the run holds exactly these. Returns the digest of all."""
    if not files:
        return ""
    listed = json.dumps({name: hashlib.sha256(content).hexdigest() for name, content in files.items()}, sort_keys=True)
    digest = hashlib.sha256(listed.encode()).hexdigest()
    if digest != had:
        with tempfile.TemporaryDirectory(prefix="oneaxis-") as temporary:
            for name, content in files.items():
                path = Path(temporary) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            client.log_artifacts(run_id, temporary)
    return digest


def register(client: Any, run: Any, root: Path, tags: dict[str, str]) -> None:
    """A version in MLflow's model registry that points to the served checkpoint, when `ONEAXIS_REGISTER_MODEL` is set.

    A pointer only: the checkpoint stays in the project (and in DVC's cache), so the next run replaces what the path
    holds; the version's tag `checkpoint.sha256` says which bytes are meant. MLflow's server takes no `file:` source,
    so this is for a store that is opened directly (SQLite, PostgreSQL).
    """
    name = os.environ.get(REGISTER_VARIABLE)
    if not name or "checkpoint" not in tags:
        return
    from mlflow.exceptions import MlflowException

    run_id, digest = str(run.info.run_id), tags["checkpoint.sha256"]
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{name}'", max_results=1000)
    if not any(version.run_id == run_id and version.tags.get("checkpoint.sha256") == digest for version in versions):
        source = (root.resolve() / tags["checkpoint"]).as_uri()
        client.create_model_version(name, source, run_id, tags={key: tags[key] for key in (
            "checkpoint", "checkpoint.sha256", f"dvc.{Path(tags['checkpoint']).parts[1]}") if key in tags})  # fmt: skip
