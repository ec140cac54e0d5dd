"""The whole pipeline as a user runs it, with `profile=tiny`: real DVC, real engine, real MLflow, random weights.

One project is taken through a kill, an interrupt, a full run, a no-op, a changed alpha and back, so the tests of this
module build on each other and run in their order.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from oneaxis.config import STAGE_SECTIONS
from tests.e2e.clone import clone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # MLflow reads its own store by a loader that SQLAlchemy means to retire.
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone of what is on disk: tracked and new files, committed."""
    here = clone(root, tmp_path_factory.mktemp("clone") / "oneaxis")
    yield here
    assert left_running(here) == []


def environment(project: Path) -> dict[str, str]:
    # Without the preloaded engines of this session, so that the run has its own, which end with it.
    return {
        **{name: value for name, value in os.environ.items() if name != "ONEAXIS_PRELOADED"},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project / "src"),
    }


def start(project: Path, *arguments: str) -> "subprocess.Popen[str]":
    with (project.parent / "run.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "oneaxis.cli", "run", "profile=tiny", *arguments],
            cwd=project, env=environment(project), stdout=log, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip


def run(project: Path, *arguments: str) -> list[str]:
    """Run to the end, expect success, and return the stages that really ran, in order."""
    trace = project / ".oneaxis" / "ran.jsonl"
    before = len(trace.read_text(encoding="utf-8").splitlines()) if trace.is_file() else 0
    code = start(project, *arguments).wait(timeout=800)
    assert code == 0, (project.parent / "run.log").read_text(encoding="utf-8")[-4000:]
    return [json.loads(line)["stage"] for line in trace.read_text(encoding="utf-8").splitlines()[before:]]


def left_running(project: Path) -> list[str]:
    """Processes that work in the project or were told of it."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        try:
            inside = Path(process.cwd()).is_relative_to(project)
        except (psutil.Error, OSError):
            continue
        words = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and (inside or str(project) in words):
            found.append(words)
    return found


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.1)
    return value


def stage_process(project: Path, stage: str) -> int | None:
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        try:
            if words[1:2] == [f"stages/{stage}.py"] and Path(process.cwd()) == project:
                return int(process.info["pid"])
        except psutil.Error:
            continue
    return None


def engine_runs(project: Path) -> bool:
    return any("vllm" in words for words in left_running(project))


def metrics(project: Path) -> dict[str, float]:
    merged: dict[str, float] = {}
    for stage in STAGE_SECTIONS:
        merged.update(json.loads((project / "artifacts" / f"{stage}.metrics.json").read_text(encoding="utf-8")))
    return merged


def mlflow_runs(project: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{project / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments))


def test_kill_9_of_a_stage_leaves_no_engine_and_nothing_half_written(project: Path) -> None:
    process = start(project)
    stage = wait_until(lambda: stage_process(project, "serve"), 600)
    wait_until(lambda: engine_runs(project), 200)
    os.kill(stage, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    wait_until(lambda: left_running(project) == [], 30)
    assert not (project / "artifacts" / "serve").exists()


def test_an_interrupt_in_the_load_stops_the_engine(project: Path) -> None:
    process = start(project)
    wait_until(lambda: stage_process(project, "sweep"), 300)
    wait_until(lambda: engine_runs(project), 200)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=90) == 130
    wait_until(lambda: left_running(project) == [], 30)
    assert (project / "artifacts" / "serve").exists()
    assert not (project / "artifacts" / "sweep").exists()


def test_the_next_run_goes_on_where_the_interrupted_one_stopped(project: Path) -> None:
    # Those that do nothing here depend on nothing that does, so that DVC may run them at any time.
    idle = ("make_draft", "split", "diverge", "extract")
    assert [stage for stage in run(project) if stage not in idle] == ["sweep", "score", "report"]
    values = metrics(project)
    assert values["report/valid"] == 1.0
    assert values["quantize/perplexity_after"] > 1
    assert values["serve/config_differences"] == 0
    for shape in ("prefill_heavy", "decode_heavy"):
        for rate in ("r4", "r8"):
            assert values[f"sweep/{shape}/{rate}/ttft_p90_ms"] > 0
    for task in ("openbookqa", "commonsenseqa"):
        for scorer in ("acc", "acc_norm", "acc_bytes", "pmi_dc", "letter_permuted"):
            assert 0 <= values[f"score/{task}/{scorer}"] <= 1
    html = (project / "artifacts" / "report" / "report.html").read_text(encoding="utf-8")
    assert "never for a claim" in html


def test_a_second_repro_runs_nothing_within_ten_seconds(project: Path) -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=project, env=environment(project),
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert time.monotonic() - started < 10
    assert "Data and pipelines are up to date" in done.stdout


def test_mlflow_has_one_complete_run_of_this_state(project: Path) -> None:
    (only,) = mlflow_runs(project)
    values = metrics(project)
    assert only.info.status == "FINISHED"
    for name, value in values.items():
        assert only.data.metrics[name] == pytest.approx(value), name
    assert only.data.params["quantize.smooth.alpha"] == "0.5"
    assert only.data.tags["valid"] == "true"


def test_another_alpha_runs_quantize_and_what_follows_and_going_back_restores(project: Path) -> None:
    first = metrics(project)
    assert run(project, "quantize.smooth.alpha=0.8") == ["quantize", "serve", "sweep", "score", "report"]
    assert metrics(project)["calibrate/perplexity"] == first["calibrate/perplexity"]
    assert run(project) == []
    assert metrics(project) == first
    runs = {entry.data.params["quantize.smooth.alpha"]: entry for entry in mlflow_runs(project)}
    assert set(runs) == {"0.5", "0.8"}
    assert len(mlflow_runs(project)) == 2
    for name, value in first.items():
        assert runs["0.5"].data.metrics[name] == pytest.approx(value), name


def test_without_training_and_quantisation_the_fetched_model_is_served(project: Path) -> None:
    ran = run(project, "train=none", "quantize=none")
    assert ran == ["train_dpo", "calibrate", "quantize", "serve", "sweep", "score", "report"]
    realised = json.loads((project / "artifacts" / "serve" / "realised.json").read_text(encoding="utf-8"))
    assert realised["differences"] == []
    assert not (project / "artifacts" / "train_dpo" / "checkpoint").exists()
    assert not (project / "artifacts" / "quantize" / "checkpoint").exists()
    assert metrics(project)["report/valid"] == 1.0


def test_same_inputs_give_the_same_bytes(project: Path) -> None:
    """Training is left out: torch does not promise the same bytes on every machine, and DVC restores it."""
    stages = ["fetch_model", "prepare_data", "filter_pairs", "calibrate", "quantize", "score"]
    listed = {name: manifest_files(project, name) for name in stages}
    done = subprocess.run([sys.executable, "-m", "dvc", "repro", "-f", "-s", *stages], cwd=project,
                          env=environment(project), capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in stages:
        assert manifest_files(project, name) == listed[name], name


def manifest_files(project: Path, stage: str) -> Any:
    manifest = project / "artifacts" / stage / "manifest.json"
    return json.loads(manifest.read_text(encoding="utf-8"))["files"]


def test_verify_finds_the_artifacts_whole(project: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "oneaxis.cli", "verify"], cwd=project, env=environment(project),
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (
        0,
        "every artifact matches its manifest, params.yaml and dvc.lock",
    )
