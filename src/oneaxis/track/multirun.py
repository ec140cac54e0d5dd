"""A multirun in MLflow: one parent run, one child run a job, from the record folders alone.

`open_parent` is called before the first job, `track_job` by each job when it has ended, `finish_multirun` when the
verdicts and the report are there. All may be called again and then change nothing; none raises or waits long when the
store is away: what it misses is in the record folders, and `track_multiruns` (`oneaxis track`, and the beginning and
end of every multirun) logs it.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from oneaxis.artifacts import ARTIFACTS, read_json, write_json
from oneaxis.config import STAGE_SECTIONS
from oneaxis.errors import UserError
from oneaxis.live import (
    JOB_TAG,
    PARENT_TAG,
    StoreAway,
    connect,
    find_run,
    first_line,
    job_key,
    locked,
    mlflow_key,
    open_child_run,
    open_parent_run,
    store_uri,
    where,
)
from oneaxis.multirun.record import (
    MULTIRUN,
    PLAN,
    STATUS,
    Job,
    Plan,
    Status,
    job_folder,
    read_plan,
    read_status,
)
from oneaxis.stage import STATE
from oneaxis.track.content import LONGEST_TAG, Content, collect, without_secrets
from oneaxis.track.pages import axis_param, axis_values, judged_metrics, write_view
from oneaxis.track.write import write

VERDICTS = "verdicts.json"
RECORD_TAG = "oneaxis.record"
"""Of a child: the hash of the record that it was completed from."""
JOB_S = 15.0
"""Longest that one call may wait for a server."""
FILE_S = 120.0
LOCKED_S = 0.2
"""Between two calls to a file that others hold: SQLite may also refuse at once."""
AWAY_S = 60.0
"""For so long after the store was found away, jobs do not ask it again."""
GRAVITY = ("invalid", "reject", "unresolved", "tie", "accept")
"""A candidate's decision over several metrics is the first of these that one of them has."""
Result = TypeVar("Result")
STATES = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


# --- what the multirun calls ---------------------------------------------------------------------------------


def open_parent(project: Path, plan: Plan) -> str | None:
    """The multirun's own run, made when there is none; earlier multiruns' jobs that MLflow missed are logged first.

    Returns:
        Its id; None when the store is away, which one line on stderr says.
    """

    def work() -> str:
        _track_multiruns(project, until=time.monotonic() + _patience_s(project) / 2, skip=plan.id)
        client, experiment, _ = connect(project)
        run_id = open_parent_run(client, experiment, project, plan.id, _ms(plan.created_at))
        write(client, client.get_run(run_id), _parent_content(project / MULTIRUN / plan.id, plan), status="RUNNING")
        write_view(client, experiment, plan, ())
        return run_id

    return _bounded(project, work, "this multirun's results are kept in its folder")


def track_job(project: Path, folder: Path, plan: Plan, job: Job) -> str | None:
    """Complete the run of a job that has ended, from its record.

    Args:
        folder: the multirun's (`multirun/<id>/`).

    Returns:
        The run's id; None when the store is away or the job has no `status.json`.
    """
    if _found_away(project):
        return None

    def work() -> str | None:
        client, experiment, _ = connect(project)
        return _complete_job(client, experiment, project, folder, plan, job, {})

    return _bounded(project, work, f"{job_key(plan.id, job.point, job.repetition)} is kept in its folder")


def finish_multirun(project: Path, folder: Path) -> str | None:
    """Complete parent and children with verdicts and report, when these are there; also jobs that MLflow missed.

    Returns:
        The parent's id; None when the store is away.
    """

    def work() -> str:
        client, experiment, _ = connect(project)
        return _complete_multirun(client, experiment, project, folder)

    return _bounded(project, work, "this multirun's results are kept in its folder", patience=4.0)


def track_multiruns(project: Path) -> int:
    """Complete every multirun of the project whose record MLflow does not hold as it is now.

    Returns:
        How many multiruns were completed.

    Raises:
        StoreAway or MLflow's own error: when the store cannot be used.
    """
    (project / STATE / "mlflow_away.json").unlink(missing_ok=True)
    return _track_multiruns(project)


# --- waiting, but not for long -------------------------------------------------------------------------------


def _bounded(project: Path, work: Callable[[], Result], kept: str, patience: float = 1.0) -> Result | None:
    """`work`'s result, or None after one line when it fails or takes too long; it then goes on without us."""
    result: list[Result] = []
    errors: list[Exception] = []
    seconds = patience * _patience_s(project)
    until = time.monotonic() + seconds

    def call() -> None:
        while not result:
            try:
                result.append(work())
            except Exception as error:
                # SQLite waits 20 s for other writers, which many jobs on a busy machine may take; what was logged
                # before is found and completed.
                if "database is locked" not in str(error) or time.monotonic() >= until:
                    errors.append(error)
                    return
                time.sleep(LOCKED_S)

    thread = threading.Thread(target=call, daemon=True, name="mlflow")
    thread.start()
    thread.join(seconds)
    if result:
        (project / STATE / "mlflow_away.json").unlink(missing_ok=True)
        return result[0]
    error = errors[0] if errors else StoreAway(f"no answer within {seconds:g} s")
    if not isinstance(error, UserError | AssertionError):
        (project / STATE).mkdir(exist_ok=True)
        write_json(project / STATE / "mlflow_away.json", {"until": time.time() + AWAY_S})
    print(f"oneaxis: MLflow ({where(project)}): {first_line(error)}; {kept}, and `oneaxis track` or the next multirun "
          "logs it", file=sys.stderr, flush=True)  # fmt: skip
    return None


def _patience_s(project: Path) -> float:
    """A file does not go away: on a busy machine it only takes its time, the making of a new store most of all."""
    return FILE_S if store_uri(project).startswith("sqlite:") else JOB_S


def _found_away(project: Path) -> bool:
    path = project / STATE / "mlflow_away.json"
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["until"]) > time.time()
    except (OSError, ValueError, KeyError):
        return False


# --- completing ----------------------------------------------------------------------------------------------


def _track_multiruns(project: Path, until: float | None = None, skip: str = "") -> int:
    """Newest first; none after `until` (monotonic clock)."""
    folders = [path.parent for path in sorted((project / MULTIRUN).glob(f"*/{PLAN}"), reverse=True)]
    completed = 0
    for folder in folders:
        if folder.name == skip or (until is not None and time.monotonic() > until):
            continue
        client, experiment, _ = connect(project)
        parent = find_run(client, experiment, PARENT_TAG, folder.name)
        if parent is None or parent.data.tags.get(RECORD_TAG) != _multirun_hash(folder):
            _complete_multirun(client, experiment, project, folder, until)
            completed += 1
    return completed


def _complete_multirun(client: Any, experiment: str, project: Path, folder: Path, until: float | None = None) -> str:
    plan, verdicts = read_plan(folder), _verdicts(folder)
    held = _children(client, experiment, plan.id)
    runs = {key: str(run.info.run_id) for key, run in held.items()}
    # Baselines first: the others name their runs.
    late = False
    for job in sorted(plan.jobs, key=lambda job: job.point != plan.baseline.name):
        if late := until is not None and time.monotonic() > until:
            break
        run_id = _complete_job(client, experiment, project, folder, plan, job, runs, held)
        if run_id:
            runs[job_key(plan.id, job.point, job.repetition)] = run_id
    parent = open_parent_run(client, experiment, project, plan.id, _ms(plan.created_at))
    ended = [status for job in plan.jobs if (status := read_status(job_folder(folder, job)))]
    over = len(ended) == len(plan.jobs) and not late
    content = _parent_content(folder, plan)
    if over:
        content.tags[RECORD_TAG] = _multirun_hash(folder)
    failed = any(status.state != "done" for status in ended)
    state = "RUNNING" if not over else "FAILED" if failed else "FINISHED"
    last = max((_ms(status.finished_at) for status in ended), default=None)
    write(client, client.get_run(parent), content, status=state, end_ms=last)
    write_view(client, experiment, plan, verdicts)
    return parent


def _children(client: Any, experiment: str, multirun: str) -> dict[str, Any]:
    """The multirun's child runs by their job."""
    found: dict[str, Any] = {}
    token = None
    while True:
        page = client.search_runs([experiment], f"tags.multirun = '{multirun}'", max_results=1000, page_token=token)
        found.update({run.data.tags[JOB_TAG]: run for run in page if JOB_TAG in run.data.tags})
        token = page.token
        if not token:
            return found


def _complete_job(
    client: Any,
    experiment: str,
    project: Path,
    folder: Path,
    plan: Plan,
    job: Job,
    runs: Mapping[str, str],
    held: Mapping[str, Any] | None = None,
) -> str | None:
    """The job's run, complete; what it says of verdicts is what `verdicts.json` says now."""
    record = job_folder(folder, job)
    status = read_status(record)
    if status is None:
        return None
    key = job_key(plan.id, job.point, job.repetition)
    said = _record_hash(record, folder)
    if held and key in held and held[key].data.tags.get(RECORD_TAG) == said:
        return str(held[key].info.run_id)
    end = _ms(status.finished_at)
    with locked(project / STATE / "locks" / f"mlflow-{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"):
        run_id = open_child_run(client, experiment, project, key, end - int(status.seconds * 1000))
        run = client.get_run(run_id)
        if run.data.tags.get(RECORD_TAG) != said:
            # A job that was killed has left nothing but its status.
            whole = (record / "params.yaml").is_file()
            content = collect(record, computed=list(status.ran)) if whole else Content()
            content.tags.update(_job_tags(plan, job, status, record))
            _add_verdicts(content, folder, plan, job, lambda key: runs.get(key) or _run_id(client, experiment, key))
            values = axis_values(plan)
            content.params = {axis_param(plan): values[job.point], **content.params}
            # MLflow's own page of comparison opens on the first parameters that differ and the first metric.
            first = {name: content.metrics[name] for name in map(mlflow_key, judged_metrics(plan, _verdicts(folder)))
                     if name in content.metrics}  # fmt: skip
            content.metrics = {**first, **content.metrics}
            content.metrics["axis_order"] = float(list(values).index(job.point))
            content.metrics["time/job_s"] = status.seconds
            content.tags[RECORD_TAG] = said
            write(client, run, content, status=STATES[status.state], end_ms=end)
    return run_id


def _run_id(client: Any, experiment: str, key: str) -> str | None:
    found = find_run(client, experiment, JOB_TAG, key)
    return str(found.info.run_id) if found else None


def _job_tags(plan: Plan, job: Job, status: Status, record: Path) -> dict[str, str]:
    point = plan.point(job.point)
    repeated = max(other.repetition for other in plan.jobs) > 0
    tags = {
        "mlflow.runName": f"{point.name} · r{job.repetition}" if repeated else point.name,
        "mlflow.source.name": "oneaxis run -m",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": status.commit or plan.snapshot,
        "git.commit": status.commit or plan.snapshot,
        "git.snapshot": plan.snapshot,
        **_question(plan),
        "axis_value": axis_values(plan)[point.name],
        "role": point.role,
        "state": status.state,
        "node": status.node,
        "overrides": " ".join(point.overrides) or "none",
    }
    if status.message:
        tags["message"] = status.message
    for stage in STAGE_SECTIONS:
        if stage in status.ran:
            tags[f"stage.{stage}"] = "computed"
        elif (record / ARTIFACTS / f"{stage}.provenance.json").is_file():
            tags[f"stage.{stage}"] = "restored"
    return {key: without_secrets(value)[:LONGEST_TAG] for key, value in tags.items()}


def _question(plan: Plan) -> dict[str, str]:
    return {
        "axis": plan.axis or "several",
        "experiment": str(plan.experiment.get("name", "")),
        "question": str(plan.experiment.get("question", "")) or "none",
        "session": plan.session,
    }


# --- verdicts ------------------------------------------------------------------------------------------------


def _verdicts(folder: Path) -> list[dict[str, Any]]:
    path = folder / VERDICTS
    return list(read_json(path)) if path.is_file() else []


def decision_of(verdicts: list[dict[str, Any]]) -> str:
    """A candidate's decision over its claims; where nothing was claimed, how many metrics are better, tie or worse."""
    claims = [verdict for verdict in verdicts if verdict.get("claim")]
    if claims or any(verdict["decision"] == "invalid" for verdict in verdicts):
        return next(word for word in GRAVITY if any(verdict["decision"] == word for verdict in claims or verdicts))
    words = [_word(verdict) for verdict in verdicts]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words))) or "none"


def _word(verdict: Mapping[str, Any]) -> str:
    """Nothing is accepted or rejected that nobody claimed."""
    described = {"accept": "better", "reject": "worse"}
    return str(verdict["decision"]) if verdict.get("claim") else described.get(verdict["decision"], verdict["decision"])


def _add_verdicts(content: Content, folder: Path, plan: Plan, job: Job, run_of: Callable[[str], str | None]) -> None:
    """`decision`, `valid`, `baseline_run_id` and the effects, once the multirun was judged."""
    verdicts = _verdicts(folder)
    if not verdicts:
        return
    baseline = plan.baseline.name
    # Of the same repetition, since these were measured side by side.
    own = run_of(job_key(plan.id, baseline, job.repetition)) or run_of(job_key(plan.id, baseline, 0))
    content.tags["baseline_run_id"] = own or "none"
    if job.point == baseline:
        content.tags["decision"] = "baseline"
        content.tags.setdefault("valid", "true")
        return
    mine = [verdict for verdict in verdicts if verdict["candidate"] == job.point]
    content.tags["decision"] = decision_of(mine)
    if mine:
        content.tags["valid"] = "true" if all(verdict["valid"] for verdict in mine) else "false"
    words = []
    for verdict in mine:
        name = mlflow_key(f"effect/{verdict['metric']}")
        for key, suffix in (("effect", ""), ("ci_low", "_ci_low"), ("ci_high", "_ci_high")):
            if verdict.get(key) is not None:
                content.metrics[f"{name}{suffix}"] = float(verdict[key])
        content.tags[f"decision.{verdict['metric']}"] = _word(verdict)
        words.append(_row(verdict))
    if words:
        note = "\n".join([*HEADER, *words])
        content.tags["mlflow.note.content"] = f"{note}\n\n{content.tags.get('mlflow.note.content', '')}"[:LONGEST_TAG]


HEADER = (
    "| point | metric | decision | baseline | candidate | effect | interval | p |",
    "|---|---|---|--:|--:|--:|---|--:|",
)


def _row(verdict: Mapping[str, Any]) -> str:
    def number(key: str) -> str:
        return "–" if verdict.get(key) is None else f"{verdict[key]:.4g}"

    interval = "–" if verdict.get("ci_low") is None else f"{number('ci_low')} to {number('ci_high')}"
    cells = (verdict["candidate"], verdict["metric"], f"**{_word(verdict)}**", number("baseline_value"),
             number("candidate_value"), number("effect"), interval, number("p_value"))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _parent_content(folder: Path, plan: Plan) -> Content:
    """The multirun's own run: its question, its counts, the table of verdicts, the report."""
    verdicts = _verdicts(folder)
    ended = [status for job in plan.jobs if (status := read_status(job_folder(folder, job)))]
    candidates = [point for point in plan.points if point.role != "baseline"]
    decisions = [decision_of([v for v in verdicts if v["candidate"] == point.name]) for point in candidates]
    content = Content()
    content.metrics = {
        "multirun/points": float(len(plan.points)),
        "multirun/jobs": float(len(plan.jobs)),
        "multirun/jobs_done": float(sum(status.state == "done" for status in ended)),
        "multirun/jobs_failed": float(sum(status.state != "done" for status in ended)),
        "multirun/stages_computed": float(sum(len(status.ran) for status in ended)),
        "multirun/job_seconds": round(sum(status.seconds for status in ended), 3),
    }
    if verdicts:
        content.metrics.update({f"multirun/{word}": float(decisions.count(word)) for word in GRAVITY})
    name = str(plan.experiment.get("name", "")) or "ad_hoc"
    note = [f"**{plan.experiment.get('question') or name}**", "", f"Axis: `{plan.axis or 'several'}`; baseline: "
            f"`{plan.baseline.name}`; points: {', '.join(f'`{point.name}`' for point in plan.points)}"]  # fmt: skip
    if verdicts:
        note += ["", *HEADER, *(_row(verdict) for verdict in verdicts)]
    card = folder / "card.md"
    if card.is_file():
        note += ["", card.read_text(encoding="utf-8").replace("(report.html)", "(#)")]
    content.tags = {
        "mlflow.runName": f"{name} {plan.id}" if name not in plan.id else plan.id,
        "mlflow.source.name": "oneaxis run -m",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": plan.snapshot,
        "git.commit": plan.snapshot,
        "mlflow.note.content": "\n".join(note),
        "overrides": " ".join(plan.overrides) or "none",
        **_question(plan),
    }
    if verdicts:
        counts = [f"{decisions.count(word)} {word}" for word in reversed(GRAVITY) if word in decisions]
        content.tags["decision"] = ", ".join(counts) or "nothing claimed"
        content.tags["judged"] = ", ".join(judged_metrics(plan, verdicts))
    content.tags = {key: without_secrets(value)[:LONGEST_TAG] for key, value in content.tags.items()}
    content.params = {"axis": plan.axis or "several", "points": ", ".join(point.name for point in plan.points)[:6000]}
    for name in (PLAN, VERDICTS, "report.html", "card.md"):
        if (folder / name).is_file():
            content.files[name] = without_secrets((folder / name).read_text(encoding="utf-8")).encode()
    return content


# --- small facts ---------------------------------------------------------------------------------------------


def _record_hash(record: Path, folder: Path) -> str:
    """Changes when the job was run again or the multirun judged again."""
    parts = [record / STATUS, folder / VERDICTS]
    return hashlib.sha256(b"\0".join(path.read_bytes() if path.is_file() else b"" for path in parts)).hexdigest()


def _multirun_hash(folder: Path) -> str:
    paths = [*sorted(folder.glob(f"points/*/r*/{STATUS}")), folder / VERDICTS, folder / "report.html"]
    return hashlib.sha256(b"\0".join(path.read_bytes() if path.is_file() else b"" for path in paths)).hexdigest()


def _ms(iso: str) -> int:
    return int(datetime.fromisoformat(iso).timestamp() * 1000)
