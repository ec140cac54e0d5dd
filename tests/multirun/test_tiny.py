"""A multirun of the real pipeline, with `profile=tiny`: what is shared runs once, and a promoted point is a no-op."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oneaxis.multirun.record import job_folder, read_plan, read_status
from tests.e2e.clone import clone

from .conftest import environment

pytestmark = [
    pytest.mark.slow,
    # MLflow reads its own store by a loader that SQLAlchemy means to retire.
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


def test_alphas_share_all_but_quantisation_and_are_judged_tracked_and_promoted(root: Path, tmp_path: Path) -> None:
    here = clone(root, tmp_path / "oneaxis")
    variables = {**environment(here), "PYTHONPATH": str(here / "src")}
    del variables["MLFLOW_TRACKING_URI"]

    def oneaxis(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "oneaxis.cli", *arguments], cwd=here, env=variables, text=True,
                              capture_output=True, timeout=500, check=False)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Only what quantisation needs, and no training: the engine is other tests' matter.
    arguments = ["profile=tiny", "train=none", "quantize.smooth.alpha=0.5,0.8", "experiment.targets=[quantize]"]
    said = oneaxis("run", "-m", *arguments)
    print(said)
    (folder,) = (here / "multirun").iterdir()
    plan = read_plan(folder)
    statuses = {job.point: read_status(job_folder(folder, job)) for job in plan.jobs}
    first, second = (statuses[point.name] for point in plan.points)
    assert first is not None
    assert second is not None
    assert set(first.ran) == {"fetch_model", "prepare_data", "calibrate", "quantize"}
    assert list(second.ran) == ["quantize"]
    overhead = second.seconds - second.waited_s - sum(second.stage_seconds.values())
    assert overhead < 10, "on a quiet machine under 3 s"
    verdicts = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    assert {verdict["changed_axis"] for verdict in verdicts} == {"quantize.smooth.alpha"}
    assert (folder / "report.html").is_file()

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{here / 'mlflow.db'}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    alphas = sorted(run.data.params.get("quantize.smooth.alpha", "") for run in runs)
    assert [alpha for alpha in alphas if alpha] == ["0.5", "0.8"]
    assert sum("mlflow.parentRunId" in run.data.tags for run in runs) == 2

    said = oneaxis("promote", plan.id, plan.points[1].name)
    assert "`dvc repro` runs what follows" in said
    done = subprocess.run([sys.executable, "-m", "dvc", "repro", "quantize"], cwd=here, env=variables, text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert "Data and pipelines are up to date" in done.stdout
