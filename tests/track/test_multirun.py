"""Multiruns in MLflow, from hand-made records on a real SQLite store. MLflow's own client is the oracle."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from oneaxis.live import StoreAway, live_logger, locked
from oneaxis.multirun.record import Axis, Job, Point, job_folder, write_plan
from oneaxis.track import finish_multirun, multirun_page, open_parent, track_job, track_multiruns
from oneaxis.track import multirun as track_multirun
from oneaxis.track.multirun import decision_of
from oneaxis.track.pages import axis_param, axis_values, unpacked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore::FutureWarning:mlflow")


def client(record: Any) -> MlflowClient:
    return MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{record.project}/mlflow.db")


def runs(record: Any, **found: str) -> dict[str, Any]:
    """Every run of the experiment by its name."""
    experiment = client(record).get_experiment_by_name("oneaxis")
    return {run.info.run_name: run for run in client(record).search_runs([experiment.experiment_id], **found)}


def history(record: Any, run: Any, key: str) -> list[tuple[int, float]]:
    points = client(record).get_metric_history(run.info.run_id, key)
    return sorted((point.step, point.value) for point in points)


def test_a_finished_multirun_is_complete(record: Any) -> None:
    parent = open_parent(record.project, record.plan)
    stages = ("fetch_model", "prepare_data", "filter_pairs", "train_dpo", "calibrate", "quantize", "score")
    record.run(0, ran=stages)
    record.run(1)
    record.run(2, state="failed")
    for job in record.plan.jobs:
        assert track_job(record.project, record.folder, record.plan, job)
    record.judge("accept", "reject")
    assert finish_multirun(record.project, record.folder) == parent
    held = runs(record)
    assert set(held) == {record.plan.id, "alpha=0.5", "alpha=0.3", "alpha=0.8"}

    child = held["alpha=0.3"]
    tags, params, metrics = child.data.tags, child.data.params, child.data.metrics
    assert tags["mlflow.parentRunId"] == parent
    assert {key: tags[key] for key in ("multirun", "point", "role", "repetition", "axis", "axis_value", "question",
                                       "valid", "decision", "git.commit", "dvc.quantize")} == {
        "multirun": record.plan.id, "point": "alpha=0.3", "role": "single", "repetition": "0",
        "axis": "quantize.smooth.alpha", "axis_value": "0.3", "question": "Which alpha?", "valid": "true",
        "decision": "accept", "git.commit": "d" * 40, "dvc.quantize": "11111111.dir"}  # fmt: skip
    assert tags["baseline_run_id"] == held["alpha=0.5"].info.run_id
    assert (tags["stage.quantize"], tags["stage.train_dpo"]) == ("computed", "restored")
    assert tags["checkpoint"] == "artifacts/quantize/checkpoint"
    assert tags["checkpoint.sha256"] == "c" * 64
    assert params["axis: quantize.smooth.alpha"] == params["quantize.smooth.alpha"] == "0.3"
    assert metrics["quantize/perplexity_after"] == 36.0
    assert metrics["calibrate/number"] == metrics["time/calibrate_s"] - 0.5 == 1.5
    assert metrics["effect/quantize/perplexity_after"] == -0.25
    assert metrics["effect/quantize/perplexity_after_ci_low"] == -0.5
    assert "effect/quantize/perplexity_after_ci_high" not in metrics
    assert history(record, child, "train/loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    # Of the restored stages no load is shown: they ran at another time.
    assert len(history(record, child, "system/cpu_utilization_percentage")) == 2
    assert len(history(record, held["alpha=0.5"], "system/cpu_utilization_percentage")) == 14
    assert child.info.end_time - child.info.start_time == 60_000
    files = {item.path for item in client(record).list_artifacts(child.info.run_id)}
    assert {"params.yaml", "dvc.lock", "train_dpo", "score"} <= files

    used = {entry.dataset.name: entry for entry in child.inputs.dataset_inputs}
    assert set(used) == {"heldout", "items", "pairs"}
    assert used["items"].dataset.digest == "i" * 16
    assert json.loads(used["items"].dataset.profile) == {"num_rows": 400}
    assert json.loads(used["items"].dataset.source)["from"] == [{"wheel": "w==1", "licence": "MIT"}]
    assert used["items"].tags[0].value == "evaluation"

    assert held["alpha=0.5"].data.tags["decision"] == "baseline"
    assert (held["alpha=0.8"].info.status, held["alpha=0.8"].data.tags["message"]) == ("FAILED", "it broke")

    whole = held[record.plan.id]
    assert whole.info.status == "FAILED"
    assert {key: whole.data.metrics[f"multirun/{key}"] for key in ("points", "jobs_failed", "accept", "reject")} == {
        "points": 3.0, "jobs_failed": 1.0, "accept": 1.0, "reject": 1.0}  # fmt: skip
    assert "| alpha=0.3 | quantize/perplexity_after | **accept** | 35 | 34.75 | -0.25 |" in (
        whole.data.tags["mlflow.note.content"])  # fmt: skip
    assert {item.path for item in client(record).list_artifacts(whole.info.run_id)} == {
        "plan.json", "verdicts.json", "report.html", "card.md"}  # fmt: skip


def test_again_changes_nothing_and_a_new_judgement_does(record: Any) -> None:
    for number in range(3):
        record.run(number)
    record.judge("accept", "reject")
    assert track_multiruns(record.project) == 1
    before = {name: run.to_dictionary() for name, run in runs(record).items()}
    open_parent(record.project, record.plan)
    for job in record.plan.jobs:
        track_job(record.project, record.folder, record.plan, job)
    finish_multirun(record.project, record.folder)
    assert track_multiruns(record.project) == 0
    after = runs(record)
    assert {name: run.to_dictionary() for name, run in after.items() if name != record.plan.id} == {
        name: run for name, run in before.items() if name != record.plan.id}  # fmt: skip
    assert after[record.plan.id].info.status == "FINISHED"
    record.judge("tie", "invalid")
    assert track_multiruns(record.project) == 1
    tags = runs(record)["alpha=0.8"].data.tags
    assert (tags["decision"], tags["valid"]) == ("invalid", "false")
    assert len(runs(record)) == 4


def test_a_job_that_was_killed_and_run_again_is_one_run(record: Any) -> None:
    job = record.run(1, state="failed")
    for path in job_folder(record.folder, job).iterdir():
        if path.name == "params.yaml":
            path.unlink()
    first = track_job(record.project, record.folder, record.plan, job)
    assert runs(record)["alpha=0.3"].info.status == "FAILED"
    record.run(1)
    assert track_job(record.project, record.folder, record.plan, job) == first
    again = runs(record)["alpha=0.3"]
    assert again.info.status == "FINISHED"
    assert again.data.metrics["quantize/perplexity_after"] == 36.0


def test_live_metrics_of_a_job_go_to_its_run(record: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a slot: another folder, whose store, experiment and files are the project's."""
    slot = tmp_path / ".oneaxis" / "slots" / "0"
    slot.mkdir(parents=True)
    job = record.run(1)
    with monkeypatch.context() as environment:
        environment.setenv("ONEAXIS_PROJECT", str(record.project))
        environment.setenv("ONEAXIS_JOB", f"{record.plan.id}/alpha=0.3/r0")
        log = live_logger(slot)
        log({"loss": 3.0}, 1)
        log({"loss": 2.0}, 2)
        log.close()
    run_id = track_job(record.project, record.folder, record.plan, job)
    child = runs(record)["alpha=0.3"]
    assert child.info.run_id == run_id
    assert history(record, child, "train/loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert child.info.artifact_uri.startswith((record.project / "mlartifacts").as_uri())
    assert not list(slot.iterdir())


def test_repetitions_are_told_apart_and_compared_with_their_own_baseline(tmp_path: Path, record: Any) -> None:
    jobs = [Job(point, number) for number in (0, 1) for point in ("alpha=0.5", "alpha=0.3", "alpha=0.8")]
    record.plan = dataclasses.replace(record.plan, jobs=jobs)
    write_plan(record.folder, record.plan)
    for number in range(6):
        record.run(number)
    record.judge("accept", "reject")
    finish_multirun(record.project, record.folder)
    held = runs(record)
    for number in (0, 1):
        assert held[f"alpha=0.3 · r{number}"].data.tags["baseline_run_id"] == (
            held[f"alpha=0.5 · r{number}"].info.run_id)  # fmt: skip


def test_secrets_reach_no_page(record: Any) -> None:
    overrides = ["+serve.engine_args.api_key=hunter2", "+serve.engine_args.hf_token=hunter2",
                 "+serve.engine_args.download_dir='s3://me:hunter2@host/x'"]  # fmt: skip
    points = [dataclasses.replace(point, overrides=[*point.overrides, *overrides]) for point in record.plan.points]
    record.plan = dataclasses.replace(record.plan, points=points, overrides=overrides)
    write_plan(record.folder, record.plan)
    for number in range(3):
        record.run(number)
    finish_multirun(record.project, record.folder)
    child = runs(record)["alpha=0.3"]
    assert child.data.params["serve.engine_args.api_key"] == "***"
    assert child.data.params["serve.engine_args.download_dir"] == "s3://me:***@host/x"
    assert child.data.params["score.batch_tokens"] == "2048"
    assert "hunter2" not in json.dumps([run.to_dictionary() for run in runs(record).values()])
    files = [path for path in (record.project / "mlartifacts").rglob("*") if path.is_file()]
    assert {"params.yaml", "plan.json"} <= {path.name for path in files}
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    json.loads(next(path for path in files if path.name == "plan.json").read_text(encoding="utf-8"))


def test_the_page_shows_the_axis_and_the_judged_metrics(record: Any) -> None:
    """What the address opens holds: its filter finds the jobs along the axis, its columns and charts exist."""
    for number in range(3):
        record.run(number)
    record.judge("accept", "reject")
    finish_multirun(record.project, record.folder)
    address = multirun_page(record.project, "http://127.0.0.1:5000", record.plan)
    experiment = client(record).get_experiment_by_name("oneaxis")
    assert address == (f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?workflowType="
                       f"machine_learning&viewStateShareKey={record.plan.id}&compareRunsMode=CHART")  # fmt: skip
    view = unpacked(experiment.tags[f"mlflow.sharedViewState.{record.plan.id}"])
    order = f"{view['orderByKey']} {'ASC' if view['orderByAsc'] else 'DESC'}"
    shown = runs(record, filter_string=view["searchFilter"], order_by=[order])
    assert list(shown) == ["alpha=0.3", "alpha=0.5", "alpha=0.8"]
    held = shown["alpha=0.3"].data
    columns = ["params.`axis: quantize.smooth.alpha`", "tags.`decision`", "metrics.`quantize/perplexity_after`",
               "metrics.`effect/quantize/perplexity_after`"]  # fmt: skip
    assert view["selectedColumns"][:4] == view["columnOrder"][:4] == columns
    for column in view["selectedColumns"]:
        kind, name = column.split(".", 1)
        assert name.strip("`") in getattr(held, kind)
    (parallel,) = [chart for chart in view["compareRunCharts"] if chart["type"] == "PARALLEL"]
    assert (parallel["selectedParams"], parallel["selectedMetrics"]) == (
        ["axis: quantize.smooth.alpha"], ["quantize/perplexity_after"])  # fmt: skip
    assert min(held.params) == "axis: quantize.smooth.alpha"


def test_numbers_stand_in_their_order(record: Any) -> None:
    """16, 32, 8 as text; a combination and a change of something else have their names."""

    def point(value: Any) -> Any:
        return Point(f"n={value}", "single", [], [Axis("serve.max_num_seqs", "key", 16, value)])

    points = [Point("n=16", "baseline", [], []), point(32), point(8)]
    plan = dataclasses.replace(record.plan, axis="serve.max_num_seqs", points=points)
    assert list(axis_values(plan).items()) == [("n=8", "8"), ("n=16", "16"), ("n=32", "32")]
    several = dataclasses.replace(plan, axis=None)
    assert (axis_param(several), list(axis_values(several).values())) == ("axis", ["n=16", "n=32", "n=8"])


def test_one_word_over_several_metrics() -> None:
    def verdict(decision: str, claim: bool) -> dict[str, Any]:
        return {"decision": decision, "claim": claim}

    assert decision_of([verdict("accept", True), verdict("reject", False)]) == "accept"
    assert decision_of([verdict("accept", True), verdict("unresolved", True)]) == "unresolved"
    assert decision_of([verdict("tie", False), verdict("invalid", False)]) == "invalid"
    assert decision_of([verdict("tie", False), verdict("accept", False), verdict("tie", False)]) == "1 better, 2 tie"
    assert decision_of([]) == "none"


# --- stores that go away ---------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[tuple[int, list[float]]]:
    """A server that takes connections and never answers: its port, and when it was asked."""
    asked: list[float] = []
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                try:
                    held.append(server.accept()[0])
                except TimeoutError:
                    continue
                asked.append(time.monotonic())

        thread = threading.Thread(target=take)
        thread.start()
        yield server.getsockname()[1], asked
        over.set()
        thread.join()
        for connection in held:
            connection.close()


def test_a_silent_server_costs_seconds_once(
    record: Any, silent: tuple[int, list[float]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port, asked = silent
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{port}")
    jobs = [record.run(number) for number in range(3)]
    began = time.monotonic()
    assert open_parent(record.project, record.plan) is None
    for job in jobs:
        assert track_job(record.project, record.folder, record.plan, job) is None
    assert time.monotonic() - began < 15
    assert len(asked) == 1
    said = capfd.readouterr().err
    assert said.count("oneaxis:") == 1
    assert "`oneaxis track`" in said
    assert "secret" not in said
    record.judge("accept", "reject")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert track_multiruns(record.project) == 1
    assert len(runs(record)) == 4


def test_what_mlflow_missed_is_logged_before_the_next_multirun(record: Any) -> None:
    for number in range(3):
        record.run(number)
    following = dataclasses.replace(record.plan, id="20260103-000000-next")
    open_parent(record.project, following)
    held = runs(record)
    assert {"alpha=0.3", record.plan.id} <= set(held)
    assert held[record.plan.id].info.status == "FINISHED"
    assert held["alpha 20260103-000000-next"].info.status == "RUNNING"


def test_a_lock_that_is_never_freed_is_not_waited_for(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(StoreAway), locked(tmp_path / "lock", wait_s=0.1):
        pass


def server(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
               "--artifacts-destination", str(folder / "files"), "--host", "127.0.0.1", "--port", str(port),
               "--workers", "1"]  # fmt: skip
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment.pop("MLFLOW_TRACKING_URI")
    running = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return running
        except OSError:
            time.sleep(0.2)
    kill(running)
    raise AssertionError("the server did not start")


def kill(running: "subprocess.Popen[bytes]") -> None:
    os.killpg(running.pid, 9)
    running.wait()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::urllib3.exceptions.HTTPWarning")
def test_a_server_killed_in_the_middle_loses_nothing(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real MLflow server; killed after the first job, started again after the last."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    running = server(record.project, port)
    try:
        parent = open_parent(record.project, record.plan)
        assert parent
        first = track_job(record.project, record.folder, record.plan, record.run(0))
        assert first
        kill(running)
        jobs = [record.run(number) for number in (1, 2)]
        record.judge("accept", "reject")
        began = time.monotonic()
        for job in jobs:
            assert track_job(record.project, record.folder, record.plan, job) is None
        assert finish_multirun(record.project, record.folder) is None
        assert time.monotonic() - began < 20
        running = server(record.project, port)
        assert track_multiruns(record.project) == 1
        held = runs(record)
    finally:
        kill(running)
    assert held[record.plan.id].info.run_id == parent
    assert held["alpha=0.5"].info.run_id == first
    assert held["alpha=0.8"].data.tags["decision"] == "reject"
    assert (record.project / "files").is_dir()


@pytest.mark.slow
def test_eight_processes_on_a_fresh_store(record: Any) -> None:
    """Live points of a training and a whole job at once, by processes that all find no store."""
    (record.project / "mlflow.db").unlink()
    for number in range(3):
        record.run(number)
    code = (
        "import os, sys; from pathlib import Path; from oneaxis.live import live_logger\n"
        "from oneaxis.multirun.record import read_plan; from oneaxis.track import track_job\n"
        "project, folder, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])\n"
        "os.environ['ONEAXIS_PROJECT'], os.environ['ONEAXIS_JOB'] = str(project), f'{folder.name}/live{number}/r0'\n"
        "log = live_logger(project); log({'x': float(number)}, number); log.close()\n"
        "plan = read_plan(folder)\n"
        "sys.exit(0 if track_job(project, folder, plan, plan.jobs[number % 3]) else 5)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(record.project), str(record.folder), str(number)],
                                stderr=subprocess.PIPE, text=True) for number in range(8)]  # fmt: skip
    said = [writer.communicate(timeout=300)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 8, said
    assert not [line for text in said for line in text.splitlines() if "oneaxis:" in line]
    held = runs(record)
    assert set(held) == {record.plan.id, "alpha=0.5", "alpha=0.3", "alpha=0.8", *(f"live{n}" for n in range(8))}
    assert history(record, held["live7"], "train/x") == [(7, 7.0)]
    assert history(record, held["alpha=0.3"], "train/loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_store_locked_by_other_writers_is_asked_again(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def work() -> str:
        asked.append(1)
        if len(asked) < 3:
            raise RuntimeError("(sqlite3.OperationalError) database is locked")
        return "logged"

    monkeypatch.setattr(track_multirun, "FILE_S", 30.0)
    assert track_multirun._bounded(record.project, work, "kept") == "logged"
    assert len(asked) == 3
    monkeypatch.setattr(track_multirun, "FILE_S", 0.0)
    asked.clear()
    assert track_multirun._bounded(record.project, work, "kept") is None
