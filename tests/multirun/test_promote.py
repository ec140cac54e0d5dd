"""A promoted point is the workspace: DVC then has nothing to do."""

import shutil
from pathlib import Path

import pytest

from oneaxis.errors import RunError, UserError
from oneaxis.multirun.job import run_job
from oneaxis.multirun.promote import promote
from oneaxis.pipeline import work_tree

from .conftest import ran, sh
from .test_job import planned, shell

pytestmark = [
    pytest.mark.usefixtures("shell"),
    # Of the library in which DVC keeps the paths of outputs.
    pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning"),
]
__all__ = ["shell"]


def test_after_it_dvc_has_nothing_to_do_and_back_again(project: Path) -> None:
    sh(project, "dvc", "repro", "-q")
    plan = planned(project, 0.5, 0.8)
    for index in range(2):
        assert run_job(project, plan.id, index).state == "done"
    computed = ran(project)
    said = promote(project, plan.id, "alpha=0.8")
    assert said == "m1/alpha=0.8: in the workspace (fetch_model, calibrate, quantize)"
    assert "alpha: 0.8" in (project / "params.yaml").read_text(encoding="utf-8")
    assert (project / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.8\n"
    assert "0.8" in (project / "artifacts" / "quantize.metrics.json").read_text(encoding="utf-8")
    assert sh(project, "dvc", "repro").endswith("Data and pipelines are up to date.")
    promote(project, plan.id, "alpha=0.5")
    assert sh(project, "dvc", "repro").endswith("Data and pipelines are up to date.")
    assert ran(project) == computed


def test_changed_code_is_told(project: Path) -> None:
    plan = planned(project, 0.5)
    run_job(project, plan.id, 0)
    (project / "stages" / "stage.py").write_text("changed", encoding="utf-8")
    assert "1 files differ from the multirun's (stages/stage.py)" in promote(project, plan.id, "alpha=0.5")


def test_what_is_not_there_or_not_done_or_beside_a_run_is_refused(project: Path) -> None:
    plan = planned(project, 0.5, 0.8)
    with pytest.raises(UserError, match=r"m1/alpha=9: no such point; allowed: alpha=0.5, alpha=0.8"):
        promote(project, plan.id, "alpha=9")
    with pytest.raises(UserError, match=r"m1/alpha=0\.8: not run; allowed: a point that is done"):
        promote(project, plan.id, "alpha=0.8")
    run_job(project, plan.id, 0)
    with work_tree(project), pytest.raises(UserError, match="another run is at work here"):
        promote(project, plan.id, "alpha=0.5")


def test_a_point_whose_outputs_left_the_cache_leaves_the_workspace_as_it_was(project: Path) -> None:
    plan = planned(project, 0.8)
    run_job(project, plan.id, 0)
    before = (project / "params.yaml").read_text(encoding="utf-8")
    shutil.rmtree(project / ".dvc" / "cache" / "files")
    with pytest.raises(RunError, match="no longer in the DVC cache"):
        promote(project, plan.id, "alpha=0.8")
    assert (project / "params.yaml").read_text(encoding="utf-8") == before
    assert not (project / "dvc.lock").exists()
