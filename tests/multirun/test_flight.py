"""Keys tell what a stage would compute; a key's lock is held by one at a time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from dvc.repo import Repo

from oneaxis.config import compose, write_params
from oneaxis.errors import UserError
from oneaxis.multirun.flight import runs_each_time, single_flight, stage_keys, stage_order

from .conftest import environment, sh

# Of the library in which DVC keeps the paths of outputs.
pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning")


def keys(project: Path, *overrides: str) -> dict[str, str]:
    write_params(compose(project / "conf", overrides), project)
    with Repo(str(project)) as repo:
        return stage_keys(repo, stage_order(repo, []), {})


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def test_a_key_changes_with_settings_code_and_what_is_upstream_and_with_nothing_else(project: Path) -> None:
    first = keys(project)
    assert list(first) == ["fetch_model", "calibrate", "quantize"]
    assert keys(project, "load.duration_s=9") == first
    assert changed(first, keys(project, "quantize.smooth.alpha=0.8")) == ["quantize"]
    assert changed(first, keys(project, "measure.repetition=1")) == ["quantize"]
    assert changed(first, keys(project, "calibrate.num_sequences=9")) == ["calibrate", "quantize"]
    assert changed(first, keys(project, "model=random")) == ["fetch_model", "calibrate", "quantize"]
    (project / "data" / "SOURCES.md").write_text("other\n", encoding="utf-8")
    assert changed(first, keys(project)) == ["fetch_model", "calibrate", "quantize"]


def test_keys_do_not_depend_on_the_folder_or_on_artifacts(project: Path, tmp_path: Path) -> None:
    sh(project, "git", "clone", "-q", str(project), str(tmp_path / "clone"))
    first = keys(project)
    (project / "artifacts" / "fetch_model").mkdir(parents=True)
    assert keys(project) == first
    assert keys(tmp_path / "clone") == first


def test_targets_bring_what_is_upstream_in_order_and_an_unknown_one_is_named(project: Path) -> None:
    with Repo(str(project)) as repo:
        assert [stage.name for stage in stage_order(repo, ["calibrate"])] == ["fetch_model", "calibrate"]
        assert [stage.name for stage in stage_order(repo, [])] == ["fetch_model", "calibrate", "quantize"]
        with pytest.raises(UserError, match="sweep: no such stage; allowed: fetch_model, calibrate, quantize"):
            stage_order(repo, ["sweep"])


def test_a_file_that_nobody_makes_is_named(project: Path) -> None:
    (project / "data" / "SOURCES.md").unlink()
    with pytest.raises(UserError, match=r"SOURCES.md: missing, and fetch_model reads it"):
        keys(project)


def test_stages_without_a_run_cache_are_told(project: Path) -> None:
    yaml = (project / "dvc.yaml").read_text(encoding="utf-8")
    always = yaml.replace("  calibrate:\n", "  calibrate:\n    always_changed: true\n")
    (project / "dvc.yaml").write_text(always, encoding="utf-8")
    with Repo(str(project)) as repo:
        assert [runs_each_time(stage) for stage in stage_order(repo, [])] == [False, True, False]


def test_whoever_comes_second_waits_until_the_first_is_done_or_dead(project: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from oneaxis.multirun.flight import single_flight\n"
        "with single_flight(Path(sys.argv[1]), 'k' * 64): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold, str(project)], stdout=subprocess.PIPE, text=True,
                              env=environment(project))  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with single_flight(project, "other" * 8) as waited:
        assert waited < 0.5
    kill = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {holder.pid}"])
    started = time.monotonic()
    with single_flight(project, "k" * 64) as waited:
        assert 0.3 < waited <= time.monotonic() - started
    kill.wait()
    holder.communicate()
