"""From the pipeline's artifacts to MLflow: one complete run per state of the pipeline.

A *state* is what `params.yaml` and the entries of `dvc.lock` say (all stages but `report`, which only reads the
others). `track` makes the run of the present state complete from the artifacts of all stages, computed or restored,
and may be called any number of times. While stages work, `live_logger` writes their step metrics into the *active*
run, which `track` then adopts. MLflow never fails a stage: what it could not take, `track` adds later.

MLflow is imported inside functions, since that costs about two seconds.
"""

import fcntl
import hashlib
import io
import json
import logging
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from oneaxis.artifacts import ARTIFACTS, MANIFEST, read_json, sha256_file, write_json
from oneaxis.config import STAGE_SECTIONS, read_params
from oneaxis.errors import RunError, UserError
from oneaxis.stage import QUIET, STATE, git_state

EXPERIMENT = "oneaxis"
STATE_TAG = "oneaxis.state"
VIEW = "headline"
"""Key of the shared view of MLflow's table of runs that shows the columns of a decision (`runs_page`)."""
COLUMNS = ("metrics.`acc_bytes`", "metrics.`acc_pmi_dc`", "metrics.`attainment`", "metrics.`chosen_nats`",
           "metrics.`goodput_tok_s`", "metrics.`ppl`", "metrics.`ppl_base`", "metrics.`reject_nats`", "tags.`valid`",
           "tags.`displacement`", "tags.`quantize`", "tags.`train.kind`")  # fmt: skip
LONGEST_PARAM = 6000
BATCH = 900
"""Metrics of one call; MLflow takes 1,000 at most."""
NAMED = ("displacement.json", "perplexity.json", "coverage.json", "realised.json", "smoke.json", "guards.json",
         "summary.json", "distribution.csv")  # fmt: skip
"""Small files of the stages that a run keeps, beside manifest and provenance."""


# --- names ---------------------------------------------------------------------------------------------------


def model_name(model: Mapping[str, Any]) -> str:
    """A short name of the model that the `model` section chooses."""
    match model.get("kind"):
        case "wheel":
            return re.sub(r"(\.[QF]\d\w*)?\.gguf$", "", Path(str(model["member"])).name)
        case "hub":
            return str(model["id"])
        case "path":
            return Path(str(model["path"])).name or str(model["path"])
        case "random":
            return f"random {model['num_layers']}-layer model"
    return "unknown model"


def scheme_name(quantize: Mapping[str, Any]) -> str:
    """The quantisation in a few words: `int8_dynamic α=0.5`."""
    if quantize["kind"] == "none":
        return "not quantised"
    kind, smooth = str(quantize["kind"]).removeprefix("w8a8_"), quantize["smooth"]
    return f"{kind} α={smooth['alpha']:g}" if smooth["sites"] else f"{kind} unsmoothed"


def run_name(params: Mapping[str, Any]) -> str:
    """`int8_dynamic α=0.5 · dpo · SmolLM2-135M-Instruct`: first what differs most often, since tables cut names."""
    trained = "not trained" if params["train"]["kind"] == "none" else str(params["train"]["kind"])
    return " · ".join([scheme_name(params["quantize"]), trained, model_name(params["model"])])


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `section.key: text`; lists and empty mappings as JSON."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{name}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found[mlflow_key(name)] = text[:LONGEST_PARAM]
    return found


def mlflow_key(name: str) -> str:
    """`name` with what MLflow refuses in a key (`=`, `@`, ...) replaced by `_`."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


CURVES = "train/"
"""Before the names of training curves, logged live or taken from `train_log.parquet`."""


# --- the state -----------------------------------------------------------------------------------------------


def locked_stages(root: Path) -> dict[str, Any]:
    """The entries of `dvc.lock`, without `report`. Empty when DVC has not run here."""
    path = root / "dvc.lock"
    if not path.is_file():
        return {}
    document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")) or {}
    return {name: entry for name, entry in document.get("stages", {}).items() if name != "report"}


def pipeline_state(root: Path) -> str:
    """Hex SHA-256 that names what the pipeline holds now: equal exactly when settings, inputs and outputs are equal."""
    held = {"params": read_params(root), "stages": locked_stages(root)}
    return hashlib.sha256(json.dumps(held, sort_keys=True, default=str).encode()).hexdigest()


def params_hash(root: Path) -> str:
    """Hex SHA-256 of the settings."""
    return hashlib.sha256(json.dumps(read_params(root), sort_keys=True, default=str).encode()).hexdigest()


# --- the store -----------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel frees it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure_store(root: Path) -> str:
    """The tracking URI; a SQLite store is made and migrated first, by one process at a time.

    Several processes that open a fresh SQLite store at once leave it broken for good.
    """
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    # A server that is away must not hold a stage up for MLflow's default of several minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    if not uri.startswith("sqlite:///"):
        return uri
    database = Path(uri.removeprefix("sqlite:///"))
    with _locked(database.with_name(f"{database.name}.lock")):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

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


def _connect(root: Path) -> tuple[Any, str, str]:
    """A client, the id of our experiment (made when absent), and the tracking URI."""
    uri = ensure_store(root)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    with _locked(root / STATE / "experiment.lock"):
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            if found.lifecycle_stage == "deleted":
                client.restore_experiment(found.experiment_id)
            return client, found.experiment_id, uri
        local = uri.startswith("sqlite:///")
        place = (root.resolve() / "mlartifacts").as_uri() if local else None
        # The kind saves the reader MLflow's question which pages to show.
        tags = {"mlflow.experimentKind": "custom_model_development", f"mlflow.sharedViewState.{VIEW}": _view()}
        try:
            return client, client.create_experiment(EXPERIMENT, artifact_location=place, tags=tags), uri
        except MlflowException:
            # Another machine was first on a shared server.
            found = client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                raise
            return client, found.experiment_id, uri


def _view() -> str:
    """MLflow's own format of a shared view (its pages' state as JSON; keys that are absent take defaults)."""
    widths = dict.fromkeys(COLUMNS, 130)
    return json.dumps({
        "searchFilter": "", "orderByKey": "attributes.start_time", "orderByAsc": False, "startTime": "ALL",
        "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
        "selectedColumns": list(COLUMNS), "columnWidths": widths, "columnOrder": [], "runsPinned": [],
        "runsHidden": [], "runsExpanded": {}, "runsHiddenMode": "FIRST_10_RUNS", "viewMaximized": False,
        "runListHidden": False, "groupBy": None, "groupsExpanded": {}, "runsVisibilityMap": {}, "hideEmptyCharts": True,
    })  # fmt: skip


def runs_page(root: Path, server: str) -> str:
    """The address, below `server` (`http://127.0.0.1:5000`), of the table of runs with the headline columns.

    Raises:
        RunError: when MLflow's store cannot be used.
    """
    try:
        _, experiment, _ = _connect(root)
    except Exception as error:
        raise RunError(f"MLflow ({_where(root)}): {_first_line(error)}") from error
    return f"{server}/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={VIEW}"


# --- the active run ------------------------------------------------------------------------------------------


def _active(root: Path) -> dict[str, str]:
    path = root / STATE / "active_run.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _open_run(client: Any, experiment: str, uri: str, root: Path) -> str:
    """The active run of these settings, made when there is none; one of other settings is ended as KILLED."""
    from mlflow.exceptions import MlflowException

    wanted = {"params": params_hash(root), "store": uri}
    with _locked(root / STATE / "active_run.lock"):
        active = _active(root)
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


class LiveLog:
    """Step metrics of a stage at work, written to the active run by a thread of its own, in batches.

    Calling never blocks and never raises. When MLflow fails, one line says so and the rest is left to `track`.
    """

    def __init__(self, root: Path, prefix: str) -> None:
        self._prefix = prefix
        self._waiting: queue.Queue[list[Any] | None] = queue.Queue()
        self._broken = False
        self._thread: threading.Thread | None = None
        try:
            client, experiment, uri = _connect(root)
            run_id = _open_run(client, experiment, uri, root)
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
        print(f"oneaxis: MLflow takes no live metrics ({_first_line(error)}); the stage goes on, and `oneaxis track` "
              "adds them later", file=sys.stderr, flush=True)  # fmt: skip


def live_logger(root: Path, prefix: str = CURVES) -> LiveLog:
    """Open (or make) the active run of the present settings; the result is called as `log(metrics, step)`.

    `prefix` stands before the names: it is the section of MLflow's charts that they go to.
    """
    return LiveLog(root, prefix)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


# --- completing a run ----------------------------------------------------------------------------------------


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
        with _locked(root / STATE / "track.lock"):
            return _track(root, params, report, report_metrics)
    except (UserError, RunError):
        raise
    except Exception as error:
        raise RunError(f"MLflow ({_where(root)}): {_first_line(error)}; the artifacts are kept, `oneaxis track` "
                       "tries again") from error  # fmt: skip


def track_in_stage(root: Path, *, report: Path, report_metrics: Mapping[str, float]) -> None:
    """`track` for the report stage: MLflow's failure is one line on stderr, never the stage's."""
    try:
        track(root, report=report, report_metrics=report_metrics)
    except (UserError, RunError) as error:
        print(f"oneaxis: {error}", file=sys.stderr, flush=True)


def _where(root: Path) -> str:
    uri = os.environ.get("MLFLOW_TRACKING_URI") or str(root / "mlflow.db")
    return re.sub(r"//[^/@]*@", "//", uri)


def _track(root: Path, params: dict[str, Any], report: Path | None, report_metrics: Mapping[str, float] | None) -> str:
    from mlflow.entities import Metric, Param, RunTag

    client, experiment, uri = _connect(root)
    state = pipeline_state(root)
    run = _run_of_state(client, experiment, uri, root, state)
    run_id, had = str(run.info.run_id), run.data

    metrics = collect_metrics(root, report_metrics)
    now = int(time.time() * 1000)
    changed = [Metric(key, value, now, 0) for key, value in metrics.items() if had.metrics.get(key) != value]
    changed += _missing_curves(client, run_id, root, now)
    settings = [Param(key, value) for key, value in flat(params).items() if key not in had.params]
    told = [RunTag(key, value) for key, value in _tags(root, params, metrics, state, report, had.tags).items()
            if had.tags.get(key) != value]  # fmt: skip
    for start in range(0, len(changed), BATCH):
        client.log_batch(run_id, metrics=changed[start : start + BATCH])
    for start in range(0, len(settings), 90):
        client.log_batch(run_id, params=settings[start : start + 90])
    for start in range(0, len(told), 90):
        client.log_batch(run_id, tags=told[start : start + 90])
    if not run.inputs.dataset_inputs:
        _log_datasets(client, run_id, root)
    _log_artifacts(client, run_id, root, report, had.tags.get("oneaxis.artifacts", ""))
    if run.info.status != "FINISHED":
        client.set_terminated(run_id, status="FINISHED")
    _remember(root, run_id)
    return run_id


def _run_of_state(client: Any, experiment: str, uri: str, root: Path, state: str) -> Any:
    """The run that has this state, else the active one of these settings, else a new one; tagged with the state."""
    found = client.search_runs([experiment], f"tags.`{STATE_TAG}` = '{state}'", max_results=1)
    if found:
        run_id = found[0].info.run_id
    else:
        run_id = _open_run(client, experiment, uri, root)
        client.set_tag(run_id, STATE_TAG, state)
    # What a stage computes from now on belongs to a new state: the active run ends here. One that was opened for
    # a state which turned out to be known (a stage that was run again to the same bytes) has nothing to say.
    active = _active(root)
    if (
        active
        and active.get("run_id") != run_id
        and active.get("store") == uri
        and active.get("params") == params_hash(root)
    ):
        client.set_terminated(active["run_id"], status="KILLED")
    (root / STATE / "active_run.json").unlink(missing_ok=True)
    return client.get_run(run_id)


def collect_metrics(root: Path, report_metrics: Mapping[str, float] | None = None) -> dict[str, float]:
    """All stages' metrics under MLflow's names, the seconds each stage took, and the headline numbers."""
    plain: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for stage in STAGE_SECTIONS:
        path = root / ARTIFACTS / f"{stage}.metrics.json"
        if path.is_file() and not (stage == "report" and report_metrics is not None):
            plain.update(read_json(path))
        path = root / ARTIFACTS / f"{stage}.provenance.json"
        if path.is_file() and stage != "report":
            seconds[f"time/{stage}_s"] = float(read_json(path)["duration_s"])
    plain.update(report_metrics or {})
    if seconds:
        seconds["time/total_s"] = round(sum(seconds.values()), 3)
    everything = {**headline(plain), **plain, **seconds}
    return {mlflow_key(name): float(value) for name, value in everything.items()}


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few numbers that a table of runs opens with: short names without a stage, as columns are narrow.

    `ppl` is of the model that is served; means are over tasks, `goodput_tok_s` is the best and `attainment` the worst
    of the loads.
    """
    found: dict[str, float] = {}

    def take(name: str, *sources: str) -> None:
        for source in sources:
            if source in metrics:
                found[name] = metrics[source]
                return

    def over(name: str, pattern: str, combine: Callable[[list[float]], float]) -> None:
        values = [value for key, value in metrics.items() if re.fullmatch(pattern, key)]
        if values:
            found[name] = combine(values)

    take("valid", "report/valid")
    take("ppl", "quantize/perplexity_after", "calibrate/perplexity")
    take("ppl_base", "quantize/perplexity_before", "calibrate/perplexity")
    take("chosen_nats", "train_dpo/chosen_delta")
    take("reject_nats", "train_dpo/rejected_delta")
    over("goodput_tok_s", r"sweep/.+/goodput_tok_s", max)
    over("attainment", r"sweep/.+/attainment", min)
    over("acc_bytes", r"score/[^/]+/acc_bytes", _mean)
    over("acc_pmi_dc", r"score/[^/]+/pmi_dc", _mean)
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _tags(
    root: Path,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    state: str,
    report: Path | None,
    had: Mapping[str, str],
) -> dict[str, str]:
    """What a run says of itself, to read and to filter by."""
    tags = {
        "mlflow.runName": run_name(params),
        "model": model_name(params["model"]),
        "model.source": str(params["model"]["kind"]),
        "quantize": scheme_name(params["quantize"]),
        "quantize.kind": str(params["quantize"]["kind"]),
        "train.kind": str(params["train"]["kind"]),
        "session": str(params["measure"]["session"]),
        STATE_TAG: state,
        "oneaxis.dvc_lock": hashlib.sha256(_lock_text(root).encode()).hexdigest(),
    }
    if "report/valid" in metrics:
        tags["valid"] = "true" if metrics["report/valid"] else "false"
    displacement = root / ARTIFACTS / "train_dpo" / "displacement.json"
    tags["displacement"] = str(read_json(displacement)["verdict"]) if displacement.is_file() else "not trained"
    if params["model"]["kind"] == "random":
        tags["claim"] = "none: random weights, for tests"
    tags.update(_statuses(root, had, report is not None))
    card = (report or root / ARTIFACTS / "report") / "card.md"
    if card.is_file():
        # MLflow shows this on the run's page, where a relative link leads nowhere.
        words = card.read_text(encoding="utf-8").replace("[report.html](report.html)", "`report.html`, under Artifacts")
        tags["mlflow.note.content"] = words
    # How the state came about is said once, by the run that computed it.
    if "git.commit" not in had:
        git = git_state(root)
        if git:
            tags["git.commit"] = tags["mlflow.source.git.commit"] = str(git["commit"])
            tags["git.dirty"] = str(git["dirty"]).lower()
        tags["mlflow.source.name"], tags["mlflow.source.type"] = "dvc repro", "LOCAL"
        overrides = root / STATE / "last_run.json"
        if overrides.is_file():
            tags["overrides"] = " ".join(read_json(overrides).get("overrides", [])) or "none"
    return tags


def _statuses(root: Path, had: Mapping[str, str], reporting: bool) -> dict[str, str]:
    """`stage.<name>`: computed, when this state's artifact was made here since the last run; else restored."""
    trace = root / STATE / "ran.jsonl"
    lines = trace.read_text(encoding="utf-8").splitlines() if trace.is_file() else []
    seen = int(_tracked(root).get("lines", 0))
    recent = [json.loads(line) for line in lines[seen if seen <= len(lines) else 0 :] if line.strip()]
    statuses = {}
    for stage in STAGE_SECTIONS:
        path = root / ARTIFACTS / f"{stage}.provenance.json"
        computed = stage == "report" and reporting
        if not computed and path.is_file():
            # A stage writes its line in the trace right after its provenance; a restored provenance is older.
            made = datetime.fromisoformat(read_json(path)["finished_at"])
            computed = any(
                line["stage"] == stage and 0 <= (datetime.fromisoformat(line["at"]) - made).total_seconds() < 60
                for line in recent
            )
        if computed:
            statuses[f"stage.{stage}"] = "computed"
        elif path.is_file():
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


def _missing_curves(client: Any, run_id: str, root: Path, now: int) -> list[Any]:
    """The points of `train_log.parquet` that were not logged live (a restored training, or MLflow was away)."""
    path = root / ARTIFACTS / "train_dpo" / "train_log.parquet"
    if not path.is_file():
        return []
    import polars as pl
    from mlflow.entities import Metric

    table = pl.read_parquet(path)
    points = []
    for column, kind in table.schema.items():
        if column == "step" or not kind.is_numeric():
            continue
        key = mlflow_key(CURVES + column)
        known = {point.step for point in client.get_metric_history(run_id, key)}
        for step, value in table.select("step", pl.col(column).cast(pl.Float64)).drop_nulls().iter_rows():
            if step not in known and math.isfinite(value):
                points.append(Metric(key, value, now, int(step)))
    return points


def _log_datasets(client: Any, run_id: str, root: Path) -> None:
    """The prepared tables as MLflow's dataset inputs, named by their hashes."""
    path = root / ARTIFACTS / "prepare_data" / MANIFEST
    if not path.is_file():
        return
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for name, facts in sorted(read_json(path).get("files", {}).items()):
        if name.endswith(".parquet"):
            source = json.dumps({"uri": f"{ARTIFACTS}/prepare_data/{name}"})
            data = Dataset(name.removesuffix(".parquet"), facts["sha256"][:16], "local", source)
            inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", name.removesuffix(".parquet"))]))
    if inputs:
        client.log_inputs(run_id, datasets=inputs)


def _lock_text(root: Path) -> str:
    """`dvc.lock` without the report's entry, which DVC writes only after the report has logged this."""
    buffer = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump({"schema": "2.0", "stages": locked_stages(root)}, buffer)
    return buffer.getvalue()


def _log_artifacts(client: Any, run_id: str, root: Path, report: Path | None, had: str) -> None:
    """Settings, lock, manifests, provenance, small results and the report, unless the run holds exactly these."""
    folder, files = root / ARTIFACTS, {}
    for stage in STAGE_SECTIONS:
        if stage == "report":
            continue
        for path in (folder / stage / MANIFEST, folder / f"{stage}.provenance.json"):
            if path.is_file():
                files[f"{stage}/{path.name}"] = path
        for name in NAMED:
            if (folder / stage / name).is_file():
                files[f"{stage}/{name}"] = folder / stage / name
    for name in ("report.html", "card.md"):
        path = (report or folder / "report") / name
        if path.is_file():
            files[name] = path
    with tempfile.TemporaryDirectory(prefix="oneaxis-") as temporary:
        lock = Path(temporary) / "dvc.lock"
        lock.write_text(_lock_text(root), encoding="utf-8")
        files["dvc.lock"], files["params.yaml"] = lock, root / "params.yaml"
        listed = json.dumps({name: sha256_file(path) for name, path in sorted(files.items())}, sort_keys=True)
        digest = hashlib.sha256(listed.encode()).hexdigest()
        if digest == had:
            return
        for name, path in sorted(files.items()):
            client.log_artifact(run_id, str(path), name.rpartition("/")[0] or None)
    client.set_tag(run_id, "oneaxis.artifacts", digest)
