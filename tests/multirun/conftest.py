"""A small real project for the multirun engine: git, DVC, the real settings, and stages of one line each.

    fetch_model (model)  ->  calibrate (calibrate)  ->  quantize (quantize, measure)

Every stage appends its name to the file that `$COUNTER` names, so a test counts what really ran.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from oneaxis.config import compose, write_params
from oneaxis.multirun.record import Axis, Job, Plan, Point

DVC_YAML = """
stages:
  fetch_model:
    cmd: python stages/stage.py fetch_model
    deps: [stages/stage.py, data/SOURCES.md]
    params: [model]
    outs: [artifacts/fetch_model]
    metrics: [artifacts/fetch_model.metrics.json]
  calibrate:
    cmd: python stages/stage.py calibrate
    deps: [stages/stage.py, artifacts/fetch_model]
    params: [calibrate]
    outs: [artifacts/calibrate]
    metrics: [artifacts/calibrate.metrics.json: {cache: false}]
  quantize:
    cmd: python stages/stage.py quantize
    deps: [stages/stage.py, artifacts/calibrate]
    params: [quantize, measure]
    outs: [artifacts/quantize]
    metrics: [artifacts/quantize.metrics.json: {cache: false}]
"""

STAGE = """
import json, os, sys, time
from pathlib import Path
from ruamel.yaml import YAML

name = sys.argv[1]
params = YAML(typ="safe").load(Path("params.yaml").read_text())
with open(os.environ["COUNTER"], "a") as counter:
    counter.write(name + "\\n")
hold = Path(os.environ["COUNTER"]).with_name(f"hold-{name}")
while hold.exists():
    time.sleep(0.05)
fail = Path(os.environ["COUNTER"]).with_name(f"fail-{name}")
if fail.exists() and fail.read_text() == str(params["quantize"]["smooth"]["alpha"]):
    Path(".oneaxis").mkdir(exist_ok=True)
    said = {"stage": name, "code": 1, "message": "the engine died"}
    Path(".oneaxis/failure.json").write_text(json.dumps(said))
    sys.exit(1)
time.sleep(float(os.environ.get("STAGE_SECONDS", "0")))
out = Path("artifacts") / name
out.mkdir(parents=True)
alpha = params["quantize"]["smooth"]["alpha"]
(out / "result.txt").write_text(f"{name} {alpha if name == 'quantize' else ''}\\n")
value = alpha if name == "quantize" else 1.0
Path(f"artifacts/{name}.metrics.json").write_text(json.dumps({f"{name}/value": value}))
"""


def sh(root: Path, *command: str) -> str:
    """Run a command in `root`; its output."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, env=environment(root))
    return done.stdout.strip()


def environment(root: Path) -> dict[str, str]:
    """Of a user's shell: this interpreter, no git identity, and where stages count."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COUNTER": str(root.parent / "counter"),
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        # A store that is away at once: what MLflow shows is tested where it is written.
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
    }


def git(root: Path, *arguments: str) -> str:
    """Git as a user who has an identity."""
    return sh(root, "git", "-c", "user.name=u", "-c", "user.email=u@u.invalid", *arguments)


def ran(root: Path) -> list[str]:
    """The stages that really ran, in order."""
    counter = root.parent / "counter"
    return counter.read_text(encoding="utf-8").split() if counter.is_file() else []


def make_plan(snapshot: str, alphas: Sequence[float], *, name: str = "m1", repetitions: int = 1) -> Plan:
    """A plan over `quantize.smooth.alpha`, as the planner makes it."""
    key = "quantize.smooth.alpha"

    def point(alpha: float) -> Point:
        axes = [] if alpha == alphas[0] else [Axis(key, "key", alphas[0], alpha, {key: [alphas[0], alpha]})]
        return Point(f"alpha={alpha}", "single" if axes else "baseline", [f"{key}={alpha}"], axes)

    points = [point(alpha) for alpha in alphas]
    return Plan(
        id=name, created_at="2026-01-01T00:00:00+00:00", overrides=[f"{key}={','.join(map(str, alphas))}"],
        launcher=[], experiment={"targets": [], "claims": []}, gate={}, axis=key,
        session="default" if repetitions == 1 else name, snapshot=snapshot, points=points,
        jobs=[Job(each.name, number) for number in range(repetitions) for each in points],
    )  # fmt: skip


@pytest.fixture(scope="session")
def template(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, made once and copied for every test."""
    here = tmp_path_factory.mktemp("template") / "project"
    shutil.copytree(root / "conf", here / "conf")
    (here / "data").mkdir()
    (here / "data" / "SOURCES.md").write_text("sources\n", encoding="utf-8")
    (here / "stages").mkdir()
    (here / "stages" / "stage.py").write_text(STAGE, encoding="utf-8")
    (here / "dvc.yaml").write_text(DVC_YAML, encoding="utf-8")
    (here / ".dvcignore").write_text(".oneaxis\n", encoding="utf-8")
    ignored = ["/.oneaxis/", "/artifacts/", "/multirun/", "/mlflow.db*", "/mlartifacts/", "/private/"]
    (here / ".gitignore").write_text("\n".join(ignored) + "\n", encoding="utf-8")
    write_params(compose(here / "conf"), here)
    sh(here, "git", "init", "-q")
    sh(here, "dvc", "init", "-q", "-f")
    sh(here, "dvc", "config", "core.analytics", "false")
    git(here, "add", "-A")
    git(here, "commit", "-qm", "first")
    return here


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    """A clone of the project of its own."""
    here = tmp_path / "project"
    shutil.copytree(template, here)
    return here
