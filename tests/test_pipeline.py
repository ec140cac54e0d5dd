"""A run from outside: exit codes, one-line failures, nothing half-written, nothing left running.

The projects here are real DVC projects with one stage of the real stage runner; only the work inside the stage is
made up, since its end (an error, a hang, a full disk) is what each test is about.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from oneaxis.config import compose, write_params
from oneaxis.doctor import diagnose
from oneaxis.errors import UserError
from oneaxis.pipeline import check_draws, check_inputs, run_pipeline

DVC_YAML = """
stages:
  prepare_data:
    cmd: python stages/prepare_data.py
    deps: [stages/prepare_data.py]
    params: [data, seed]
    outs:
      - artifacts/prepare_data
      - artifacts/prepare_data.provenance.json
    metrics:
      - artifacts/prepare_data.metrics.json: {cache: false}
"""

SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
from oneaxis import RunError, UserError
from oneaxis.stage import run

def work(stage):
    (stage.out / "half").write_text("half")
    open("started", "w").write(str(os.getpid()))
    BODY
    return {"prepare_data/rows": 3.0}

if __name__ == "__main__":
    run("prepare_data", work)
"""


@pytest.fixture
def project(root: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A function that makes a DVC project whose only stage does what the given code says."""
    shutil.copytree(root / "conf", tmp_path / "conf")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "SOURCES.md").touch()
    (tmp_path / "stages").mkdir()
    (tmp_path / "dvc.yaml").write_text(DVC_YAML, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q", "--no-scm"], cwd=tmp_path, check=True)

    def make(body: str) -> Path:
        (tmp_path / "stages" / "prepare_data.py").write_text(SCRIPT.replace("BODY", body), encoding="utf-8")
        return tmp_path

    return make


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def oneaxis(project: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "oneaxis.cli", *arguments]
    return subprocess.run(
        command, cwd=project, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def start(project: Path, *command: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=project, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: (project / "started").is_file() and (project / "started").read_text() != "")
    return process


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def payloads(project: Path) -> list[str]:
    folder = project / "artifacts"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.startswith("oneaxis")][-1]


def test_a_stage_that_succeeds_writes_three_things_and_a_second_repro_runs_nothing(
    root: Path, project: Callable[[str], Path]
) -> None:
    here = project("pass")
    write_params(compose(root / "conf"), here)
    repro = [sys.executable, "-m", "dvc", "repro"]
    subprocess.run(repro, cwd=here, env=environment(), check=True, capture_output=True)
    assert payloads(here) == ["prepare_data", "prepare_data.metrics.json", "prepare_data.provenance.json"]
    provenance = json.loads((here / "artifacts" / "prepare_data.provenance.json").read_text(encoding="utf-8"))
    assert provenance["versions"]["torch"]
    assert provenance["hardware"]["cpus"] >= 1
    assert set(provenance["params"]) == {"data", "seed"}
    assert (here / ".oneaxis" / "ran.jsonl").read_text(encoding="utf-8").count("prepare_data") == 1
    again = subprocess.run(repro, cwd=here, env=environment(), check=True, capture_output=True, text=True)
    assert "Data and pipelines are up to date" in again.stdout
    assert (here / ".oneaxis" / "ran.jsonl").read_text(encoding="utf-8").count("prepare_data") == 1


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("raise UserError('pairs.jsonl:3: chosen is 4; allowed: text')", 2, "pairs.jsonl:3: chosen is 4"),
        ("raise RunError('the engine died: out of memory')", 1, "the engine died: out of memory"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        # A write to /dev/full is refused by the kernel with the very error of a full disk.
        ("open('/dev/full', 'w').write('x' * 100000)", 1, "the disk is full"),
    ],
)
def test_a_stage_that_fails_leaves_one_line_its_exit_code_and_nothing_half_written(
    project: Callable[[str], Path], body: str, code: int, words: str
) -> None:
    here = project(body)
    done = oneaxis(here, "run")
    assert done.returncode == code
    assert "prepare_data" in last_line(done.stderr)
    assert words in last_line(done.stderr)
    assert payloads(here) == []


def test_a_mistake_in_the_settings_touches_nothing(project: Callable[[str], Path]) -> None:
    here = project("pass")
    done = oneaxis(here, "run", "train.beta=much")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "train.beta='much'" in done.stderr
    assert not (here / "params.yaml").exists()
    assert payloads(here) == []


def test_a_file_that_is_not_there_is_refused_before_anything_is_written(project: Callable[[str], Path]) -> None:
    here = project("pass")
    done = oneaxis(here, "run", "data=mine", "data.pairs.source.path=none.jsonl")
    assert done.returncode == 2
    assert "data.pairs.source.path=none.jsonl: no such file" in done.stderr
    assert not (here / "params.yaml").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_the_stage_and_a_second_one_completes(
    project: Callable[[str], Path], number: signal.Signals
) -> None:
    here = project("time.sleep(0 if os.path.exists('go') else 600)")
    run = start(here, "oneaxis.cli", "run")
    stage = int((here / "started").read_text(encoding="utf-8"))
    run.send_signal(number)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "interrupted" in last_line(errors)
    assert gone(stage)
    assert payloads(here) == []
    (here / "go").touch()
    write_params(compose(here / "conf"), here)
    subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=here, env=environment(), check=True, capture_output=True)
    assert "prepare_data" in payloads(here)


@pytest.mark.parametrize("command", [("oneaxis.cli", "run"), ("dvc", "repro")])
def test_a_killed_run_takes_its_stage_with_it(project: Callable[[str], Path], command: tuple[str, ...]) -> None:
    here = project("time.sleep(600)")
    write_params(compose(here / "conf"), here)
    run = start(here, *command)
    stage = int((here / "started").read_text(encoding="utf-8"))
    run.kill()
    run.communicate(timeout=60)
    wait_until(lambda: gone(stage), seconds=20)
    assert [name for name in payloads(here) if not name.startswith(".tmp-")] == []


def test_a_stage_killed_by_9_leaves_nothing_that_the_next_run_does_not_clean(project: Callable[[str], Path]) -> None:
    here = project("time.sleep(0 if os.path.exists('go') else 600)")
    write_params(compose(here / "conf"), here)
    run = start(here, "dvc", "repro")
    os.kill(int((here / "started").read_text(encoding="utf-8")), signal.SIGKILL)
    run.communicate(timeout=60)
    assert run.returncode != 0
    assert [name for name in payloads(here) if not name.startswith(".tmp-")] == []
    (here / "go").touch()
    subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=here, env=environment(), check=True, capture_output=True)
    assert payloads(here) == ["prepare_data", "prepare_data.metrics.json", "prepare_data.provenance.json"]


def test_a_second_run_in_the_same_folder_is_told_who_is_at_work(project: Callable[[str], Path]) -> None:
    here = project("time.sleep(600)")
    run = start(here, "oneaxis.cli", "run")
    second = oneaxis(here, "run", "seed=1")
    assert second.returncode == 2
    assert f"process {run.pid}" in second.stderr
    assert "seed: 0" in (here / "params.yaml").read_text(encoding="utf-8")
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)


@pytest.mark.parametrize("command", [("reset",), ("track",), ("run", "seed=1")])
def test_nothing_else_may_touch_a_run_at_work(project: Callable[[str], Path], command: tuple[str, ...]) -> None:
    here = project("time.sleep(600)")
    run = start(here, "oneaxis.cli", "run")
    before = (here / "params.yaml").read_text(encoding="utf-8")
    refused = oneaxis(here, *command)
    assert refused.returncode == 2
    assert f"process {run.pid}" in refused.stderr
    assert (here / "params.yaml").read_text(encoding="utf-8") == before
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)


def test_settings_that_change_under_a_stage_void_its_result(project: Callable[[str], Path]) -> None:
    """DVC records the settings at the end of a stage: a result made with others must not be kept under them."""
    here = project(
        "time.sleep(0) if os.path.exists('go') else [time.sleep(0.1) for _ in range(600) if not os.path.exists('go')]"
    )
    run = start(here, "oneaxis.cli", "run")
    params = here / "params.yaml"
    params.write_text(params.read_text(encoding="utf-8").replace("seed: 0", "seed: 7"), encoding="utf-8")
    (here / "go").touch()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "params.yaml changed while this stage ran" in last_line(errors)
    assert payloads(here) == []


def test_a_bare_repro_beside_a_run_is_refused_by_its_stage(project: Callable[[str], Path]) -> None:
    """DVC's own locks cover overlapping paths only, so the stage itself looks who has the work tree."""
    here = project("time.sleep(600)")
    run = start(here, "oneaxis.cli", "run")
    stage = [sys.executable, "stages/prepare_data.py"]
    second = subprocess.run(stage, cwd=here, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"process {run.pid}" in last_line(second.stderr)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)


def test_a_second_interrupt_does_not_cut_the_cleaning_up_short(project: Callable[[str], Path]) -> None:
    here = project(
        """try:
        time.sleep(600)
    finally:
        open("cleaning", "w").close(); time.sleep(2); open("cleaned", "w").close()"""
    )
    run = start(here, "oneaxis.cli", "run")
    stage = int((here / "started").read_text(encoding="utf-8"))
    os.kill(stage, signal.SIGTERM)
    wait_until(lambda: (here / "cleaning").exists())
    os.kill(stage, signal.SIGTERM)
    os.kill(stage, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert (here / "cleaned").exists()
    assert run.returncode == 130
    assert "Traceback" not in errors


def test_a_stage_killed_by_9_is_named(project: Callable[[str], Path]) -> None:
    here = project("time.sleep(600)")
    run = start(here, "oneaxis.cli", "run")
    stage = int((here / "started").read_text(encoding="utf-8"))
    os.kill(stage, signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert f"prepare_data was killed (process {stage})" in last_line(errors)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+serve.engine_args.foo=1", "serve.engine_args.foo=1"),
        ("+serve.engine_args.host=0.0.0.0", "serve.engine_args.host"),
        ("+train.dpo_args.learning_rate=3", "train.learning_rate"),
        ("data.items.tasks=[foo]", "data.items.tasks=foo"),
        ("serve.max_model_len=64", "load.shapes: prefill_heavy is 384 + 8 = 392 tokens"),
        ("load.rates_rps=[1e6]", "requests"),
    ],
)
def test_mistakes_that_only_a_library_knows_are_refused_before_anything_is_written(
    project: Callable[[str], Path], override: str, words: str
) -> None:
    here = project("pass")
    done = oneaxis(here, "run", override)
    assert done.returncode == 2, done.stderr
    assert words in last_line(done.stderr)
    assert not (here / "params.yaml").exists()


def test_a_context_that_a_made_model_has_not_is_refused_where_it_is_served(root: Path) -> None:
    long = ["model=random", "train=none", "quantize=none"]
    with pytest.raises(UserError, match=r"^serve\.max_model_len=2048: allowed: up to 1024"):
        check_inputs(root, compose(root / "conf", long))
    check_inputs(root, compose(root / "conf", [*long, "serve.max_model_len=1024"]))
    check_inputs(root, compose(root / "conf", [*long, "experiment.targets=[prepare_data]"]))


SERVED = ["profile=tiny", "train=none", "quantize=none"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["serve.threads=4096"], r"serve\.threads=4096: allowed: 0 to "),
        (["serve.kv_cache_gib=100000"], r"serve\.kv_cache_gib=100000\.0: the engine needs .* GiB are all there is"),
        (["serve.kv_cache_gib=1e-6"], r"serve\.kv_cache_gib=1e-06: allowed: .* to hold one sequence"),
        (["serve.port={port}"], r"serve\.port=\d+: in use"),
        (
            ["serve=attach", "serve.base_url=http://127.0.0.1:1", "serve.api_key_env=NO_SUCH_KEY"],
            r"serve\.api_key_env=NO_SUCH_KEY: not set",
        ),
        (
            ["draft=ngram", "serve.engine_args={{speculative_config: {{method: ngram, num_speculative_tokens: 2}}}}"],
            r"serve\.engine_args\.speculative_config: draft=ngram sets this",
        ),
        (["draft=layers", "draft.num_layers=8"], r"draft\.num_layers=8: allowed: fewer than the policy has \(2\)"),
        (["load.duration_s=0.01"], r"load\.rates_rps: 4: no request arrives in load\.duration_s"),
        (
            ["+serve.engine_args.max_num_batched_tokens=abc"],
            r"serve\.engine_args\.max_num_batched_tokens='abc': allowed: a whole number",
        ),
    ],
)
def test_what_a_stage_would_refuse_is_refused_before_anything_is_written(
    root: Path, tmp_path: Path, overrides: list[str], words: str
) -> None:
    shutil.copy(root / "dvc.yaml", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "SOURCES.md").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [*SERVED, *(override.format(port=taken.getsockname()[1]) for override in overrides)]
        for target in ("sweep", "score"):
            config = compose(root / "conf", [*given, f"experiment.targets=[{target}]", "score.engine=transformers"])
            if target == "sweep":
                with pytest.raises(UserError, match=words):
                    run_pipeline(tmp_path, config, [])
            elif "max_num_batched_tokens" not in words:
                # Nothing is served, and so nothing is refused.
                check_inputs(tmp_path, config)
                check_draws(tmp_path, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "dvc.yaml"]


def test_outside_a_project_every_command_says_so(tmp_path: Path) -> None:
    for command in ("run", "reset", "track", "verify", "ui"):
        done = oneaxis(tmp_path, command)
        assert done.returncode == 2
        assert "root of an oneaxis project" in done.stderr
        assert done.stderr.count("\n") == 1


def test_reset_restores_the_defaults_and_cfg_prints_without_writing(project: Callable[[str], Path]) -> None:
    here = project("pass")
    shown = oneaxis(here, "run", "seed=5", "--cfg", "job")
    assert shown.returncode == 0
    assert "seed: 5" in shown.stdout
    assert not (here / "params.yaml").exists()
    write_params(compose(here / "conf", ["seed=5"]), here)
    assert oneaxis(here, "reset").returncode == 0
    assert "seed: 0" in (here / "params.yaml").read_text(encoding="utf-8")


def test_doctor_outside_a_project_does_not_say_that_the_pipeline_runs_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diagnose(tmp_path)
    assert "can run here" not in capsys.readouterr().out


def test_doctor_finds_the_engine_and_the_libraries(root: Path) -> None:
    done = oneaxis(root, "doctor")
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if len(line.split()) > 2}
    assert lines["engine"].startswith("ok")
    assert lines["trl"].startswith("ok")
    assert lines["memory"].split()[2].replace(".", "").isdigit()
