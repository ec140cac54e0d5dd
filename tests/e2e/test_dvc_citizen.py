"""DVC's own commands on the real DAG: metrics, parameters, plots, experiments, and remotes (a folder, an S3 server).

The artifacts are made up and recorded by `dvc commit`, so that no engine and no training is needed; the S3 server is
moto, on this machine. The tests build on each other and run in their order.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from ruamel.yaml import YAML

from oneaxis.artifacts import read_json, write_json
from oneaxis.config import compose, derived_paths, write_params
from oneaxis.dvc_plots import accuracy_by_scorer, escape_curves, nll_by_sequence, over_rate, training_curve
from oneaxis.preference.filter import distribution
from tests.report.conftest import fill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECRET = "not-in-git"


def call(project: Path, *command: str, code: int = 0) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *command] if command[0] != "git" else list(command),
        cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real dvc.yaml with made-up artifacts, in two commits that differ in alpha and in the perplexity."""
    here = tmp_path_factory.mktemp("citizen") / "project"
    for folder in ("conf", "src", "stages", "data", ".dvc"):
        kept = shutil.ignore_patterns("__pycache__", "cache", "tmp", "*.local", "*.egg-info")
        shutil.copytree(root / folder, here / folder, ignore=kept)
    for name in ("dvc.yaml", ".gitignore", ".dvcignore"):
        shutil.copy2(root / name, here / name)
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t.invalid")
    call(here, "git", "init", "-q")
    for alpha, perplexity in ((0.5, 15.7), (0.8, 15.6)):
        config = compose(root / "conf", [f"quantize.smooth.alpha={alpha}"])
        write_params(config, here)
        make_up(here, config.model_dump(mode="json"), perplexity)
        call(here, "commit", "-q", "-f")
        call(here, *git, "add", "-A")
        call(here, *git, "commit", "-qm", f"alpha {alpha}")
    return here


def make_up(here: Path, params: dict[str, Any], perplexity: float) -> None:
    artifacts = here / "artifacts"
    fill(artifacts, params)
    path = artifacts / "quantize.metrics.json"
    write_json(path, {**read_json(path), "quantize/perplexity_after": perplexity})
    write_json(artifacts / "report.metrics.json", {"report/valid": 1.0})
    write_json(artifacts / "report.provenance.json", {})
    (artifacts / "report" / "report.html").write_text("<html></html>", encoding="utf-8")
    document = YAML(typ="safe").load((here / "dvc.yaml").read_text(encoding="utf-8"))
    paths = derived_paths(params)
    for stage in document["stages"].values():
        for name in stage["deps"]:
            wanted = here / (paths[name[8:-1]] if name.startswith("${paths.") else name)
            if not wanted.exists():
                wanted.parent.mkdir(parents=True, exist_ok=True)
                if wanted.suffix:
                    wanted.write_text("made up", encoding="utf-8")
                else:
                    wanted.mkdir()
                    (wanted / "config.json").write_text("{}", encoding="utf-8")

    def table(stage: str, name: str) -> pl.DataFrame:
        return pl.read_parquet(artifacts / stage / name)

    distribution(table("filter_pairs", "pairs.parquet"), "ln_ches").write_csv(
        artifacts / "filter_pairs" / "distribution.csv"
    )
    log = table("train_dpo", "train_log.parquet")
    training_curve(log).write_csv(artifacts / "train_dpo" / "curve.csv")
    escape_curves(log).write_csv(artifacts / "train_dpo" / "escapes.csv")
    nll = nll_by_sequence(table("calibrate", "heldout_nll.parquet"), table("quantize", "heldout_nll.parquet"))
    nll.write_csv(artifacts / "quantize" / "nll.csv")
    pl.DataFrame({"kind": ["digits", "base64"], "exact_after": [0.9, 0.7]}).write_csv(
        artifacts / "quantize" / "copies.csv"
    )
    latencies = {f"{name}_{percent}_ms": 9.0 for name in ("ttft", "tpot") for percent in ("p50", "p90", "p99")}
    cells = pl.DataFrame(
        [
            {"shape": "s", "level_size": rate, **latencies, "goodput_tok_s": 5.0, "attainment": 1.0}
            for rate in (1.0, 2.0)
        ]
    )
    over_rate(cells).write_csv(artifacts / "sweep" / "over_rate.csv")
    accuracy_by_scorer(read_json(artifacts / "score.metrics.json")).write_csv(artifacts / "score" / "accuracy.csv")


def metrics_of(project: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for path in (project / "artifacts").glob("*.metrics.json"):
        found.update(read_json(path))
    return found


def test_metrics_and_parameters_are_compared_between_commits(project: Path) -> None:
    """Though git does not hold the metrics: they come from the cache by the hash in `dvc.lock`."""
    changed = json.loads(call(project, "metrics", "diff", "HEAD~1", "HEAD", "--json"))
    name = "quantize/perplexity_after"
    assert changed == {
        "artifacts/quantize.metrics.json": {name: {"old": 15.7, "new": 15.6, "diff": pytest.approx(-0.1)}}
    }
    long = call(project, "metrics", "diff", "HEAD~1", "HEAD", "--md")
    assert "| artifacts/quantize.metrics.json | quantize/perplexity_after | 15.7" in long
    params = json.loads(call(project, "params", "diff", "HEAD~1", "HEAD", "--json"))
    ((key, change),) = params["params.yaml"].items()
    assert (key, change["old"], change["new"]) == ("quantize.smooth.alpha", 0.5, 0.8)


def test_what_vs_codes_view_asks_for_holds_every_metric(project: Path) -> None:
    shown = json.loads(call(project, "exp", "show", "--json"))
    assert [entry["rev"] == "workspace" for entry in shown] == [True, False]
    for entry in shown:
        files = entry["data"]["metrics"]
        values = {name: value for file in files.values() for name, value in file["data"].items()}
        assert values == metrics_of(project)
        assert entry["data"]["params"]["params.yaml"]["data"]["quantize"]["smooth"]["alpha"] == 0.8


def test_every_plot_of_dvc_yaml_is_drawn_from_both_commits(project: Path) -> None:
    document = YAML(typ="safe").load((project / "dvc.yaml").read_text(encoding="utf-8"))
    names = [name for entry in document["plots"] for name in entry]
    shown = json.loads(call(project, "plots", "diff", "HEAD~1", "HEAD", "--json"))
    assert "errors" not in shown
    assert sorted(shown["data"]) == sorted(names)
    for name, (plot,) in shown["data"].items():
        assert plot["type"] == "vega", name
        # Filled in: no anchor of the template is left, and the points are there.
        text = json.dumps(plot["content"])
        assert "<DVC_METRIC" not in text, name
        assert text.count('"rev"') > 2, name


def test_a_plot_whose_file_the_settings_do_not_make_is_left_out(project: Path, tmp_path: Path) -> None:
    """`train=none` writes no training curve."""
    here = tmp_path / "project"
    shutil.copytree(project, here)
    shutil.rmtree(here / "artifacts" / "train_dpo")
    shutil.rmtree(here / ".dvc" / "cache")
    (here / "dvc.lock").unlink()
    shown = json.loads(call(here, "plots", "show", "--json"))
    assert len([name for name, plots in shown["data"].items() if plots]) == 5


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server on this machine with one bucket; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path_factory.mktemp("moto"),
    )  # fmt: skip
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while True:
        try:
            direct.open(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=5).close()
            break
        except OSError:
            assert time.monotonic() < deadline, "the S3 server did not come up"
            time.sleep(0.1)
    yield address
    server.kill()
    server.wait()


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_pushed_and_pulled_elsewhere_nothing_runs_again(
    project: Path, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    here = tmp_path / "project"
    shutil.copytree(project, here)
    if kind == "folder":
        call(here, "remote", "add", "-q", "-d", "store", str(tmp_path / "store"))
    else:
        call(here, "remote", "add", "-q", "-d", "store", "s3://bucket/oneaxis")
        call(here, "remote", "modify", "-q", "store", "endpointurl", request.getfixturevalue("s3"))
        for key in ("access_key_id", "secret_access_key"):
            call(here, "remote", "modify", "-q", "--local", "store", key, SECRET)
        assert SECRET in (here / ".dvc" / "config.local").read_text(encoding="utf-8")
        assert SECRET not in (here / ".dvc" / "config").read_text(encoding="utf-8")
        assert call(here, "git", "status", "--porcelain") == " M .dvc/config\n"
    before = {path.relative_to(here): path.read_bytes() for path in (here / "artifacts").rglob("*") if path.is_file()}
    call(here, "push", "-q", "--run-cache")
    shutil.rmtree(here / "artifacts")
    shutil.rmtree(here / ".dvc" / "cache")
    call(here, "pull", "-q", "--run-cache")
    after = {path.relative_to(here): path.read_bytes() for path in (here / "artifacts").rglob("*") if path.is_file()}
    assert after == before
    assert "Data and pipelines are up to date" in call(here, "repro")
