"""From a stage at work to MLflow: its step metrics, live, into the run that `oneaxis.track` completes afterwards.

Stages depend on this module and not on the rest of the tracking, so that a change there trains nothing again. It holds
what both need: the store (made and migrated once, asked first whether it answers), and the run that is being written.
In a plain run that is the *active* run of the work tree. In a job of a multirun (`ONEAXIS_JOB`), it is the child run
of that job.

MLflow never fails or holds up a stage: what it could not take, `track` adds later from the artifacts. MLflow is
imported inside functions, since that costs about two seconds.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oneaxis.artifacts import write_json
from oneaxis.config import read_params
from oneaxis.errors import RunError
from oneaxis.names import run_name
from oneaxis.stage import QUIET, STATE

EXPERIMENT = "oneaxis"
CURVES = "train/"
"""Before the names of training curves, logged live or taken from `train_log.parquet`."""
BATCH = 900
"""Metrics of one call; MLflow takes 1,000 at most."""
PROBE_S = 2.0
"""How long a server may take to say that it is there."""
LOCK_S = 15.0
PROJECT_VARIABLE = "ONEAXIS_PROJECT"
JOB_VARIABLE = "ONEAXIS_JOB"
JOB_TAG = "oneaxis.job"
"""`<multirun>/<point>/r<repetition>`: which job a child run is of."""
PARENT_TAG = "oneaxis.parent"
"""The multirun that a parent run is of."""


class StoreAway(RunError):
    """MLflow's store does not answer, or not in time."""


def job_key(multirun: str, point: str, repetition: int) -> str:
    """The value of `ONEAXIS_JOB` in the stages of a job, and of the tag `oneaxis.job` of its run."""
    return f"{multirun}/{point}/r{repetition}"


def mlflow_key(name: str) -> str:
    """`name` with what MLflow refuses in a key (`=`, `@`, ...) replaced by `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def first_line(error: BaseException) -> str:
    """An error in one short line, without passwords."""
    text = str(error).strip()
    return redacted(f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200])


def redacted(text: str) -> str:
    """`text` with the passwords in its URIs replaced by `***`."""
    return re.sub(r"(\w[\w+.-]*://[^/\s:@'\"]*):[^/\s@'\"]+@", r"\1:***@", text)


# --- the store -----------------------------------------------------------------------------------------------


def home(root: Path) -> Path:
    """The project that owns the store: `root`, or the main project when `root` is the work tree of a job."""
    return Path(os.environ.get(PROJECT_VARIABLE) or root).resolve()


def store_uri(root: Path) -> str:
    """The tracking URI: `MLFLOW_TRACKING_URI`, or the project's SQLite file."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home(root) / 'mlflow.db'}"


def where(root: Path) -> str:
    """The store as it may be shown: without the user's name and password."""
    return re.sub(r"//[^/@]*@", "//", store_uri(root)).removeprefix("sqlite:///")


@contextmanager
def locked(path: Path, wait_s: float = LOCK_S) -> Iterator[None]:
    """Hold a lock between processes; the kernel frees it when its holder dies.

    Raises:
        StoreAway: when another holds it for longer than `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait_s
    with path.open("a", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreAway(f"{path}: held by another process for {wait_s:g} s") from None
                time.sleep(0.02)
        yield


def check_answers(uri: str, wait_s: float = PROBE_S) -> None:
    """Ask a server whether it is there, since MLflow's own client would try for minutes.

    Raises:
        StoreAway: when it is not.
    """
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    if scheme in ("http", "https"):
        import requests

        try:
            answer = requests.get(f"{uri.rstrip('/')}/health", timeout=wait_s)
        except requests.RequestException as error:
            raise StoreAway(f"no answer ({type(error).__name__})") from error
        if answer.status_code in (502, 503, 504):
            raise StoreAway(f"HTTP {answer.status_code}")
    elif scheme in ("postgresql", "mysql", "mssql") and parts.hostname:
        port = parts.port or {"postgresql": 5432, "mysql": 3306, "mssql": 1433}[scheme]
        try:
            socket.create_connection((parts.hostname, port), timeout=wait_s).close()
        except OSError as error:
            raise StoreAway(f"no answer from {parts.hostname}:{port} ({error.strerror or error})") from error


def ensure_store(root: Path) -> str:
    """The tracking URI of a store that answers; a SQLite store is made and migrated first, by one process at a time.

    Several processes that open a fresh SQLite store at once leave it broken for good.

    Raises:
        StoreAway: when a server does not answer within two seconds.
    """
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    # A server that goes away later must not hold anybody up for MLflow's defaults of several minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "8")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    uri = store_uri(root)
    check_answers(uri)
    if not uri.startswith("sqlite:///"):
        return uri
    database = Path(uri.removeprefix("sqlite:///"))
    # Importing takes seconds too: before the lock, where no other process waits for it.
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    # Making a store takes seconds, and on a busy machine every other process waits for it.
    with locked(database.with_name(f"{database.name}.lock"), wait_s=120.0):
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        try:
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
        except MlflowException as error:
            if "out-of-date" not in str(error):
                raise
            print(f"oneaxis: {database}: migrating to this MLflow's schema", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "mlflow", "db", "upgrade", uri], check=True, capture_output=True)
    return uri


def connect(root: Path) -> tuple[Any, str, str]:
    """A client, the id of our experiment (made when absent), and the tracking URI.

    Raises:
        StoreAway: when the store does not answer. MlflowException: when it answers wrongly.
    """
    uri = ensure_store(root)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    with locked(home(root) / STATE / "experiment.lock"):
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                client.restore_experiment(found.experiment_id)
            return client, found.experiment_id, uri
        # Without a place of its own a local experiment's files would go to `./mlruns` of whoever runs.
        local = uri.startswith("sqlite:///")
        place = (home(root) / "mlartifacts").as_uri() if local else None
        # The kind saves the reader MLflow's question which pages to show.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            return client, client.create_experiment(EXPERIMENT, artifact_location=place, tags=tags), uri
        except MlflowException:
            # Another machine was first on a shared server.
            found = client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                raise
            return client, found.experiment_id, uri


# --- the run that is being written ---------------------------------------------------------------------------


def params_hash(root: Path) -> str:
    """Hex SHA-256 of the settings."""
    return hashlib.sha256(json.dumps(read_params(root), sort_keys=True, default=str).encode()).hexdigest()


def active_run(root: Path) -> dict[str, str]:
    """The run that a plain run's stages write to: `run_id`, `params` (their hash), `store`; empty: none is."""
    try:
        found = json.loads((root / STATE / "active_run.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def open_run(client: Any, experiment: str, uri: str, root: Path) -> str:
    """The active run of these settings, made when there is none; one of other settings is ended as KILLED."""
    from mlflow.exceptions import MlflowException

    wanted = {"params": params_hash(root), "store": uri}
    with locked(root / STATE / "active_run.lock"):
        active = active_run(root)
        if active.get("run_id") and active.get("store") == uri:
            try:
                run = client.get_run(active["run_id"])
                if active.get("params") == wanted["params"] and run.info.lifecycle_stage == "active":
                    return str(active["run_id"])
                if run.info.status == "RUNNING":
                    client.set_terminated(active["run_id"], status="KILLED")
            except MlflowException:
                pass
        run_id = str(client.create_run(experiment, run_name=run_name(read_params(root))).info.run_id)
        write_json(root / STATE / "active_run.json", {**wanted, "run_id": run_id})
    return run_id


def find_run(client: Any, experiment: str, tag: str, value: str) -> Any | None:
    """The run whose tag has this value, the oldest when there are several; None when there is none."""
    found = client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1,
                               order_by=["attributes.start_time ASC"])  # fmt: skip
    return found[0] if found else None


def open_parent_run(client: Any, experiment: str, root: Path, multirun: str, start_ms: int | None = None) -> str:
    """The run of a multirun itself, made when there is none."""
    with locked(home(root) / STATE / "parent_run.lock"):
        found = find_run(client, experiment, PARENT_TAG, multirun)
        if found is None:
            tags = {PARENT_TAG: multirun, "multirun": multirun, "role": "parent"}
            found = client.create_run(experiment, run_name=multirun, tags=tags, start_time=start_ms)
    return str(found.info.run_id)


def open_child_run(client: Any, experiment: str, root: Path, job: str, start_ms: int | None = None) -> str:
    """The run of a job, below its multirun's, made when there is none; `job` is as in `job_key`."""
    found = find_run(client, experiment, JOB_TAG, job)
    if found is None:
        multirun, point, repetition = job.split("/")
        parent = open_parent_run(client, experiment, root, multirun)
        tags = {JOB_TAG: job, "mlflow.parentRunId": parent, "multirun": multirun, "point": point,
                "repetition": repetition.removeprefix("r")}  # fmt: skip
        found = client.create_run(experiment, run_name=point, tags=tags, start_time=start_ms)
    return str(found.info.run_id)


class LiveLog:
    """Step metrics of a stage at work, written to the run by a thread of its own, in batches.

    Calling never blocks and never raises. When MLflow fails, one line says so and the rest is left to `track`.
    """

    def __init__(self, root: Path, prefix: str) -> None:
        self._prefix = prefix
        self._waiting: queue.Queue[list[Any] | None] = queue.Queue()
        self._broken = False
        self._thread: threading.Thread | None = None
        job = os.environ.get(JOB_VARIABLE)
        if os.environ.get(PROJECT_VARIABLE) and not job:
            # A work tree of somebody else's making: there is no run that would later be completed.
            self._broken = True
            return
        try:
            client, experiment, uri = connect(root)
            run_id = open_child_run(client, experiment, root, job) if job else open_run(client, experiment, uri, root)
        except Exception as error:
            self._warn(error)
            return
        self._thread = threading.Thread(target=self._write, args=(client, run_id), daemon=True, name="mlflow")
        self._thread.start()

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers at a step; a number that is not finite is left out."""
        if self._broken:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting.put([
            Metric(mlflow_key(self._prefix + name), float(value), now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ])  # fmt: skip

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait until all is written. Without it the last second may be missing until `track`."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout_s)

    def _write(self, client: Any, run_id: str) -> None:
        last = False
        while not last:
            batch = self._waiting.get()
            last = batch is None
            points = list(batch or [])
            while not last and len(points) < BATCH:
                try:
                    more = self._waiting.get_nowait()
                except queue.Empty:
                    break
                last = more is None
                points.extend(more or [])
            try:
                for start in range(0, len(points), BATCH):
                    client.log_batch(run_id, metrics=points[start : start + BATCH])
            except Exception as error:
                self._warn(error)
                return

    def _warn(self, error: Exception) -> None:
        self._broken = True
        print(f"oneaxis: MLflow takes no live metrics ({first_line(error)}); the stage goes on, and `oneaxis track` "
              "adds them later", file=sys.stderr, flush=True)  # fmt: skip


def live_logger(root: Path, prefix: str = CURVES) -> LiveLog:
    """Open (or make) the run that the present work belongs to; the result is called as `log(metrics, step)`.

    `prefix` stands before the names: it is the section of MLflow's charts that they go to.
    """
    return LiveLog(root, prefix)
