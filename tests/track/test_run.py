"""MLflow runs from artifacts, on a real SQLite store.

Faked: the artifacts (a few files by hand, by the stages' schemas) and `dvc.lock`. MLflow's own client is the oracle.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from mlflow import MlflowClient

from oneaxis.artifacts import write_json
from oneaxis.config import STAGE_SECTIONS, compose, write_params
from oneaxis.errors import RunError, UserError
from oneaxis.live import live_logger, mlflow_key
from oneaxis.names import run_name
from oneaxis.track import runs_page, track, track_in_stage
from oneaxis.track.content import flat, without_secrets
from oneaxis.track.pages import unpacked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore::FutureWarning:mlflow")


@pytest.fixture
def project(tmp_path: Path, root: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which every stage but report has run, and nothing was tracked."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    (tmp_path / ".oneaxis").mkdir()
    write_params(compose(root / "conf"), tmp_path)
    for number, stage in enumerate(STAGE_SECTIONS):
        if stage != "report":
            run_stage(tmp_path, stage, number)
    write_json(tmp_path / "artifacts" / "train_dpo" / "displacement.json", {"verdict": "healthy"})
    pl.DataFrame({"step": [1, 2, 3], "logps/chosen": [-5.0, -4.0, -3.0], "note": ["a", "b", "c"]}).write_parquet(
        tmp_path / "artifacts" / "train_dpo" / "train_log.parquet"
    )
    write_lock(tmp_path)
    return tmp_path


def run_stage(project: Path, stage: str, minute: int, **metrics: float) -> None:
    """What a stage leaves behind: payload, metrics, provenance, and its line in the trace."""
    folder = project / "artifacts"
    (folder / stage).mkdir(parents=True, exist_ok=True)
    files = {"pairs.parquet": {"bytes": 1, "sha256": "ab" * 32}} if stage == "prepare_data" else {}
    write_json(folder / stage / "manifest.json", {"stage": stage, "params": {}, "notes": {}, "files": files})
    write_json(folder / f"{stage}.metrics.json", {f"{stage}/number": 1.5, **metrics})
    at = f"2026-01-02T03:{minute:02}:30"
    write_json(
        folder / f"{stage}.provenance.json", {"stage": stage, "duration_s": 2.0, "finished_at": f"{at}.000+00:00"}
    )
    with (project / ".oneaxis" / "ran.jsonl").open("a", encoding="utf-8") as trace:
        trace.write(json.dumps({"stage": stage, "at": f"{at}.040+00:00", "pid": 1}) + "\n")


def write_lock(project: Path, **stages: Any) -> None:
    entries = {stage: {"cmd": f"python stages/{stage}.py", **stages.get(stage, {})} for stage in STAGE_SECTIONS}
    (project / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": entries}), encoding="utf-8")


def client(project: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{project / 'mlflow.db'}")


def runs(project: Path) -> list[Any]:
    experiment = client(project).get_experiment_by_name("oneaxis")
    return [] if experiment is None else list(client(project).search_runs([experiment.experiment_id]))


def everything(project: Path, run_id: str) -> dict[str, Any]:
    """All that MLflow keeps of a run, and its files."""
    run = client(project).get_run(run_id)
    files = sorted((project / "mlartifacts").rglob("*"))
    history = {key: [(point.step, point.value, point.timestamp) for point in
                     client(project).get_metric_history(run_id, key)] for key in run.data.metrics}  # fmt: skip
    return {"run": run.to_dictionary(), "history": history,
            "files": {str(path): path.stat().st_mtime_ns for path in files if path.is_file()}}  # fmt: skip


def test_a_run_is_complete(project: Path) -> None:
    run_id = track(project)
    run = client(project).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "int8_dynamic α=0.5 · dpo · SmolLM2-135M-Instruct"
    for stage in STAGE_SECTIONS:
        if stage != "report":
            assert run.data.metrics[f"{stage}/number"] == 1.5
            assert run.data.metrics[f"time/{stage}_s"] == 2.0
            assert run.data.tags[f"stage.{stage}"] == "computed"
    assert run.data.metrics["time/total_s"] == 2.0 * (len(STAGE_SECTIONS) - 1)
    assert run.data.params["quantize.smooth.alpha"] == "0.5"
    assert run.data.params["load.rates_rps"] == "[1.0, 3.0]"
    assert run.data.tags["displacement"] == "healthy"
    assert run.data.tags["quantize.kind"] == "w8a8_int8_dynamic"
    assert run.data.tags["model.source"] == "wheel"
    assert "claim" not in run.data.tags
    assert [(p.step, p.value) for p in client(project).get_metric_history(run_id, "train/logps/chosen")] == [
        (1, -5.0), (2, -4.0), (3, -3.0)]  # fmt: skip
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["pairs"]
    names = {item.path for item in client(project).list_artifacts(run_id)}
    assert {"params.yaml", "dvc.lock", "train_dpo", "sweep"} <= names
    assert {item.path for item in client(project).list_artifacts(run_id, "train_dpo")} == {
        "train_dpo/manifest.json", "train_dpo/train_dpo.provenance.json", "train_dpo/displacement.json"}  # fmt: skip
    assert run.info.artifact_uri.startswith((project / "mlartifacts").as_uri())


def test_the_data_set_of_sampled_pairs_is_theirs(root: Path, tmp_path: Path) -> None:
    from oneaxis.track.content import datasets

    def manifest(stage: str, sha: str, notes: dict[str, Any]) -> None:
        (tmp_path / "artifacts" / stage).mkdir(parents=True)
        files = {"pairs.parquet": {"bytes": 1, "sha256": sha * 32}}
        write_json(tmp_path / "artifacts" / stage / "manifest.json", {"files": files, "notes": notes})

    manifest("prepare_data", "ab", {"tables": {"pairs": {"sources": ["wheels"]}}})
    manifest("sample_pairs", "cd", {"sources": ["made by a seed"], "train_pairs": 9, "heldout_pairs": 3})
    (tmp_path / "artifacts" / "filter_pairs").mkdir()
    for overrides, stage, digest in ((["pairs=on_policy"], "sample_pairs", "cd"), ([], "prepare_data", "ab")):
        write_params(compose(root / "conf", overrides), tmp_path)
        (found,) = datasets(tmp_path)
        assert found["digest"] == digest * 8
        assert json.loads(found["source"])["uri"] == f"artifacts/{stage}/pairs.parquet"
        assert json.loads(found["profile"]) == ({"num_rows": 12} if overrides else {})


def test_tracking_again_changes_nothing(project: Path) -> None:
    first = track(project)
    before = everything(project, first)
    assert track(project) == first
    assert everything(project, first) == before
    assert len(runs(project)) == 1


def test_report_stage_leaves_a_complete_run(project: Path, tmp_path: Path) -> None:
    """Inside the stage the report lies in a temporary folder, without metrics file and lock entry."""
    out = tmp_path / "temporary"
    out.mkdir()
    (out / "report.html").write_text("<p>page</p>", encoding="utf-8")
    (out / "card.md").write_text("a card", encoding="utf-8")
    track_in_stage(project, report=out, report_metrics={"report/valid": 1.0})
    (run,) = runs(project)
    assert run.data.tags["valid"] == "true"
    assert run.data.tags["mlflow.note.content"] == "a card"
    assert run.data.tags["stage.report"] == "computed"
    assert "report.html" in {item.path for item in client(project).list_artifacts(run.info.run_id)}
    before = everything(project, run.info.run_id)
    run_stage(project, "report", 59)
    out.rename(project / "artifacts" / "report" / "out")
    for name in ("report.html", "card.md"):
        (project / "artifacts" / "report" / "out" / name).rename(project / "artifacts" / "report" / name)
    write_json(project / "artifacts" / "report.metrics.json", {"report/valid": 1.0})
    write_lock(project, report={"outs": ["new"]})
    assert track(project) == run.info.run_id
    assert everything(project, run.info.run_id) == before


def test_new_settings_give_a_new_run_and_old_ones_the_old(project: Path, root: Path) -> None:
    first = track(project)
    write_params(compose(root / "conf", ["quantize.smooth.alpha=0.8"]), project)
    run_stage(project, "quantize", 20)
    old = json.loads((project / "artifacts" / "quantize.provenance.json").read_text(encoding="utf-8"))
    write_lock(project, quantize={"deps": ["other"]})
    second = track(project)
    assert second != first
    tags = client(project).get_run(second).data.tags
    assert (tags["stage.quantize"], tags["stage.calibrate"]) == ("computed", "restored")
    assert client(project).get_run(second).data.metrics["calibrate/number"] == 1.5
    write_params(compose(root / "conf"), project)
    write_json(
        project / "artifacts" / "quantize.provenance.json", {**old, "finished_at": "2026-01-02T03:05:30.000+00:00"}
    )
    write_lock(project)
    assert track(project) == first
    assert client(project).get_run(first).data.tags["stage.quantize"] == "computed"
    assert len(runs(project)) == 2


def test_restored_everywhere_is_complete(project: Path) -> None:
    """Nothing ran in this work tree: everything came from the cache."""
    (project / ".oneaxis" / "ran.jsonl").unlink()
    run = client(project).get_run(track(project))
    assert {value for key, value in run.data.tags.items() if key.startswith("stage.")} == {"restored"}
    assert run.data.metrics["sweep/number"] == 1.5


def test_live_metrics_go_to_the_run_that_track_completes(project: Path) -> None:
    log = live_logger(project)
    log({"logps/chosen": -5.0, "other": float("nan")}, 1)
    log({"logps/chosen": -4.0}, 2)
    log.close()
    (active,) = runs(project)
    assert active.info.status == "RUNNING"
    again = live_logger(project, "sweep/")
    again({"live": 3.0}, 7)
    again.close()
    assert track(project) == active.info.run_id
    points = client(project).get_metric_history(active.info.run_id, "train/logps/chosen")
    assert sorted((point.step, point.value) for point in points) == [(1, -5.0), (2, -4.0), (3, -3.0)]
    assert client(project).get_run(active.info.run_id).data.metrics["sweep/live"] == 3.0
    assert len(runs(project)) == 1


def test_a_run_is_never_written_on_after_it_is_complete(project: Path) -> None:
    """The same settings, trained anew (changed code): the finished run keeps its curve."""
    first = track(project)
    log = live_logger(project)
    log({"logps/chosen": -99.0}, 1)
    log.close()
    assert len(runs(project)) == 2
    assert -99.0 not in [p.value for p in client(project).get_metric_history(first, "train/logps/chosen")]


def test_other_settings_end_the_active_run(project: Path, root: Path) -> None:
    live_logger(project).close()
    write_params(compose(root / "conf", ["seed=7"]), project)
    live_logger(project).close()
    assert sorted(run.info.status for run in runs(project)) == ["KILLED", "RUNNING"]


def test_many_live_points_all_arrive(project: Path) -> None:
    log = live_logger(project, "")
    for step in range(1500):
        log({"sweep/running": float(step % 5)}, step)
    log.close()
    (run,) = runs(project)
    assert len(client(project).get_metric_history(run.info.run_id, "sweep/running")) == 1500


def test_broken_store_fails_no_stage(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "mlflow.db").write_bytes(b"not a database, at all" * 100)
    log = live_logger(project)
    for step in range(3):
        log({"train/loss": 1.0}, step)
    log.close()
    track_in_stage(project, report=project, report_metrics={"report/valid": 1.0})
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("oneaxis:")]
    assert len(told) == 2
    assert "takes no live metrics" in told[0]
    assert "`oneaxis track` tries again" in told[1]
    with pytest.raises(RunError, match="MLflow"):
        track(project)


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.HTTPWarning")
def test_server_that_is_away_fails_no_stage(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        live_logger(project)({"train/loss": 1.0}, 1)
        track_in_stage(project, report=project, report_metrics={})
    said = capfd.readouterr().err
    assert said.count("oneaxis:") == 2
    assert "secret" not in said.split("oneaxis: MLflow (")[1].split(")")[0]


def test_table_of_runs_opens_on_columns_that_exist(project: Path) -> None:
    """The view names what the runs hold: a column that no run has would be empty."""
    run_stage(project, "quantize", 5, **{"quantize/perplexity_before": 15.0, "quantize/perplexity_after": 16.0})
    run_stage(project, "train_dpo", 5, **{"train_dpo/chosen_delta": 1.0, "train_dpo/rejected_delta": -2.0})
    run_stage(project, "sweep", 5, **{"sweep/a/r1/goodput_tok_s": 3.0, "sweep/a/r2/goodput_tok_s": 7.0,
                                      "sweep/a/r1/attainment": 1.0, "sweep/a/r2/attainment": 0.5})  # fmt: skip
    run_stage(project, "score", 5, **{"score/x/acc_bytes": 0.2, "score/y/acc_bytes": 0.4, "score/x/pmi_dc": 0.5})
    run = client(project).get_run(track(project, report=project, report_metrics={"report/valid": 1.0}))
    address = runs_page(project, "http://127.0.0.1:5000")
    assert address.startswith(f"http://127.0.0.1:5000/#/experiments/{run.info.experiment_id}/runs?")
    key = address.rpartition("viewStateShareKey=")[2]
    tags = client(project).get_experiment(run.info.experiment_id).tags
    columns = unpacked(tags[f"mlflow.sharedViewState.{key}"])["selectedColumns"]
    held = {f"metrics.`{name}`" for name in run.data.metrics} | {f"tags.`{name}`" for name in run.data.tags}
    assert set(columns) <= held
    assert {name: run.data.metrics[name] for name in ("ppl", "ppl_base", "goodput_tok_s", "attainment")} == {
        "ppl": 16.0, "ppl_base": 15.0, "goodput_tok_s": 7.0, "attainment": 0.5}  # fmt: skip
    assert run.data.metrics["acc_bytes"] == pytest.approx(0.3)


def test_registry_points_to_the_checkpoint_when_asked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = project / "artifacts" / "quantize" / "manifest.json"
    write_json(manifest, {"stage": "quantize", "params": {}, "notes": {},
                          "files": {"checkpoint/model.safetensors": {"bytes": 1, "sha256": "e" * 64}}})  # fmt: skip
    run_id = track(project)
    assert client(project).get_run(run_id).data.tags["checkpoint.sha256"] == "e" * 64
    assert not client(project).search_registered_models()
    monkeypatch.setenv("ONEAXIS_REGISTER_MODEL", "mine")
    for _ in range(2):
        assert track(project) == run_id
    (version,) = client(project).search_model_versions("name = 'mine'")
    assert version.source == (project / "artifacts" / "quantize" / "checkpoint").as_uri()
    assert (version.run_id, version.tags["checkpoint.sha256"]) == (run_id, "e" * 64)


def test_long_settings_are_cut_and_say_so() -> None:
    cut = flat({"a": {"b": "x" * 7000}})["a.b"]
    assert len(cut) == 6000
    assert cut.endswith("(cut: params.yaml, under Artifacts, has it whole)")


@pytest.mark.parametrize(("text", "shown"), [
    ('{"api_key": "k1", "n": 1}', '{"api_key": "***", "n": 1}'),
    ("  hf_token: k1\n  max_tokens: 5\n", "  hf_token: '***'\n  max_tokens: 5\n"),
    ("a.password=k1 b=2", "a.password=*** b=2"),
    ('["x.secret=k1", "y"]', '["x.secret=***", "y"]'),
    ("postgresql+psycopg2://me:k1@db:5432/x", "postgresql+psycopg2://me:***@db:5432/x"),
    ('"tokens": "k1", "token_ids": [1], "bos_token: <s>', '"tokens": "k1", "token_ids": [1], "bos_token: <s>'),
    ("hf_token: null", "hf_token: null"),
])  # fmt: skip
def test_secrets_are_told_from_settings(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_settings_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"params\.yaml: missing"):
        track(tmp_path)


def test_names() -> None:
    assert mlflow_key("sweep/p99=a@b") == "sweep/p99_a_b"
    assert flat({"a": {"b": [1, 2], "c": {}}, "d": "x" * 5000, "e": None}) == {
        "a.b": "[1, 2]", "a.c": "{}", "d": "x" * 5000, "e": "null"}  # fmt: skip
    none = {"model": {"kind": "hub", "id": "a/b"}, "quantize": {"kind": "none"}, "train": {"kind": "none"}}
    assert run_name(none) == "not quantised · not trained · a/b"


@pytest.mark.parametrize("make", [live_logger, track])
def test_importing_is_cheap(make: Callable[..., Any]) -> None:
    """MLflow takes seconds to import: only what uses it may."""
    code = f"import sys; from {make.__module__} import {make.__name__}; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
