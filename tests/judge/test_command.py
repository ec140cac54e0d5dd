"""`oneaxis judge`: what is printed, and its exit codes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from oneaxis.cli import main
from oneaxis.config.compose import compose_raw
from oneaxis.judge.command import found_axes
from oneaxis.judge.records import find_records
from tests.judge.records import edit, settings, write_run


@pytest.fixture
def arms(tmp_path: Path) -> tuple[str, str]:
    """Two runs: a higher alpha, a perplexity that is lower by 5%."""
    shift = -0.05 + 0.01 * (-1.0) ** np.arange(12)
    write_run(tmp_path / "b", session="default")
    write_run(tmp_path / "c", session="default", config=settings(quantize__smooth__alpha=0.8), nll=shift)
    return str(tmp_path / "b"), str(tmp_path / "c" / "artifacts")


def test_headlines_without_a_claim(arms: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", *arms]) == 0
    said = capsys.readouterr().out
    assert "BETTER      quantize/perplexity_after" in said
    assert "TIE         score/quiz/acc_bytes" in said
    assert "timings are left out: those of session `default`" in said


def test_a_metric_is_a_gate(arms: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    metric = ["--metric", "quantize/perplexity_after"]
    assert main(["judge", *arms, *metric, "--bar", "0.1"]) == 0
    assert "ACCEPT" in capsys.readouterr().out
    assert main(["judge", *arms, *metric, "--bar", "5"]) == 1
    assert "the effect is real and too small" in capsys.readouterr().out
    assert main(["judge", *reversed(arms), *metric]) == 1
    assert "REJECT" in capsys.readouterr().out
    assert main(["judge", *reversed(arms), *metric, "--margin", "5"]) == 0
    assert "may lose up to 5" in capsys.readouterr().out
    assert main(["judge", *arms, "--metric", "score/quiz/acc_bytes"]) == 1
    assert "TIE" in capsys.readouterr().out


def test_an_invalid_comparison_exits_with_1(arms: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    edit(Path(arms[1]) / "quantize" / "manifest.json", lambda m: m["params"].update(quantize={"kind": "w4a16"}))
    edit(Path(arms[1]) / "calibrate" / "manifest.json", lambda m: m["params"]["calibrate"].update(heldout_sequences=9))
    assert main(["judge", *arms]) == 1
    assert "guard 4, one axis: 2 axes differ" in capsys.readouterr().out


def test_json_is_what_verdicts_json_holds(arms: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", *arms, "--json", "--metric", "quantize/perplexity_after"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["decision"] == "accept"
    assert verdict["effect"] == pytest.approx(verdict["baseline_value"] * np.expm1(-0.05))


CONF = Path(__file__).resolve().parents[2] / "conf"


def test_without_a_plan_the_choices_of_a_group_are_one_axis(tmp_path: Path) -> None:
    """`pairs=all` against `pairs=ches pairs.value=...` moves two settings; only exact choices are one axis."""
    every, ches = (compose_raw(CONF, [f"pairs={choice}"])["pairs"] for choice in ("all", "ches"))
    (tmp_path / "conf").mkdir()
    shutil.copytree(CONF, tmp_path / "conf", dirs_exist_ok=True)
    (tmp_path / "conf" / "pairs" / "few.yaml").write_text("defaults: [ches, _self_]\nrule: count\nvalue: 9\n")
    for arm, pairs in (("b", every), ("c", {**every, "rule": "count", "value": 9}), ("d", {**ches, "value": 0.5})):
        write_run(tmp_path / arm, config={**settings(), "pairs": pairs})
    runs = {arm: find_records(tmp_path / arm)[0] for arm in "bcd"}
    (group,) = found_axes(runs["b"], runs["c"], tmp_path / "conf")
    assert (group.name, group.kind, group.before, group.after) == ("pairs", "group", "all", "few")
    assert set(group.leaves) == {"pairs.rule", "pairs.value"}
    keys = found_axes(runs["b"], runs["d"], tmp_path / "conf")
    assert [(axis.name, axis.kind) for axis in keys] == [("pairs.rule", "key"), ("pairs.value", "key")]


def test_a_run_that_recorded_fewer_sections_is_compared_in_those_that_both_have(tmp_path: Path) -> None:
    """As after `dvc repro quantize` of a point with another alpha: no stage of it has recorded `guards` or `load`."""
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(quantize__smooth__alpha=0.8))
    shutil.rmtree(tmp_path / "c" / "artifacts" / "sweep")
    axes = found_axes(*(find_records(tmp_path / arm)[0] for arm in "bc"), CONF)
    assert [axis.name for axis in axes] == ["quantize.smooth.alpha"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{b}", "{b}"], "the same run twice"),
        (["{b}", "{b}/artifacts"], "the same run twice"),
        (["{b}", "{b}/nothing"], "not a folder"),
        (["{b}", "{b}/artifacts/score"], "holds no artifacts"),
        (["{b}", "{c}", "--metric", "quantize/nothing"], "--metric=quantize/nothing: neither folder has it; allowed: "),
        (["{b}", "{c}", "--metric", "sweep/chat/r1/n"], "does not say which way is better; give --better"),
        (["{b}", "{c}", "--metric", "quantize/perplexity_after", "--bar", "-1"], "--bar=-1.0: allowed: 0 or more"),
        (["{b}", "{c}", "--metric", "quantize/perplexity_after", "--bar", "nan"], "--bar=nan: allowed"),
        (["{b}", "{c}", "--metric", "quantize/perplexity_after", "--better", "higher"], "allowed: lower, or --margin"),
        (["{b}", "{c}", "--metric", "quantize/perplexity_after", "--bar", "1", "--margin", "1"], "no --bar beside it"),
        (["{b}", "{c}", "--bar", "1"], "allowed: with --metric NAME"),
        (["{b}", "{c}", "--metric", "score/quiz/acc_bytes", "--margin", "5"], "--margin=5: score/quiz/acc_bytes is a"),
        (
            ["{b}", "{c}", "--metric", "score/quiz/acc_bytes", "--bar", "1"],
            "between 0 and 1; allowed: 0 or more, and le",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arms: tuple[str, str], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["judge", *(text.format(b=arms[0], c=arms[1]) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("oneaxis: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err


SWAPPED = "calibrate/heldout_nll.parquet"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("sweep/requests.parquet", b"garbage" * 40, "no parquet table that can be read"),
        ("sweep/requests.parquet", slice(300), "no parquet table that can be read"),
        ("sweep/requests.parquet", SWAPPED, "no column shape; allowed: the table of requests"),
        ("score/items_scored.parquet", SWAPPED, "no column acc_bytes_correct; allowed: the table that score writes"),
        ("score/manifest.json", b"[]", "holds []; allowed: an object"),
        ("sweep/manifest.json", b'{"params": {"load": null}}', "section load is null; allowed: an object of settings"),
        ("sweep/manifest.json", b'{"params": {"load": {"duration_s": "x"}}}', "its section load has no service_class"),
        ("sweep/manifest.json", b'{"files": {"a": 5}}', "files.a is 5; allowed: an object with bytes and sha256"),
        ("sweep.provenance.json", b"null", "holds null; allowed: an object"),
        ("sweep.provenance.json", b'{"lease": 5}', "lease is 5; allowed: an object or null"),
        (
            "sweep.provenance.json",
            b'{"lease": {"device": "cpu"}}',
            "lease.exclusive is missing; allowed: true or false or",
        ),
        (
            "sweep.provenance.json",
            b'{"lease": {"device": "cpu", "exclusive": "no", "waited_s": 0}}',
            'exclusive is "no"',
        ),
        ("sweep.provenance.json", b'{"hardware": {"boot_id": ["x"]}}', 'boot_id is ["x"]; allowed: a text or null'),
        ("sweep.provenance.json", b'{"hardware": {"cpus": true}}', "hardware.cpus is true; allowed: a number or null"),
        ("sweep.provenance.json", b'{"load_before": [1, "2"]}', 'load_before.1 is "2"; allowed: a number'),
        ("sweep.provenance.json", b'{"observed": {"cells": ["r1"]}}', 'observed.cells.0 is "r1"; allowed: an object'),
        ("sweep.provenance.json", b'{"observed": {"cells": [{}]}}', "cells.0.shape is missing; allowed: a text"),
        ("sweep.metrics.json", b"[]", "holds []; allowed: an object"),
        ("sweep.metrics.json", b"[" * 100_000, "sweep.metrics.json: not JSON"),
        ("sweep.metrics.json", b'{"sweep/chat/r1/ttft_p50_ms": 1' + b"0" * 400 + b"}", "allowed: a finite number"),
        (
            "sweep/guards.json",
            b'[{"guard": true, "name": "x", "valid": true, "reason": "", "evidence": {}}]',
            "guard is true in an entry; allowed: a number",
        ),
        ("sweep.metrics.json", b'{"sweep/chat/r1/ttft_p50_ms": NaN}', "ttft_p50_ms is NaN; allowed: a finite number"),
        ("score.metrics.json", b'{"score/quiz/acc_bytes": "x"}', 'acc_bytes is "x"; allowed: a finite number'),
        ("sweep/guards.json", b"[5]", "5 is no entry of it; allowed: an object with guard"),
        ("sweep/guards.json", b'[{"guard": 1}]', "name is null in an entry; allowed: a text"),
        (
            "sweep/guards.json",
            b'[{"guard": 1, "name": "x", "valid": true, "reason": "", "evidence": 1}]',
            "evidence is 1 in an entry; allowed: an object",
        ),
        ("serve/realised.json", b'{"resolved": []}', "resolved is []; allowed: an object"),
        ("train_dpo/displacement.json", b'["severe"]', 'holds ["severe"]; allowed: an object'),
    ],
)
def test_a_broken_record_is_one_line_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes | slice | str, said: str
) -> None:
    timings = {"sweep/chat/r1/ttft_p50_ms": 100.0}
    write_run(tmp_path / "b", timings=timings)
    write_run(tmp_path / "c", timings=timings, config=settings(quantize__smooth__alpha=0.8))
    for name in ("params.yaml", "status.json"):
        (tmp_path / "c" / name).unlink()
    artifacts = tmp_path / "c" / "artifacts"
    if isinstance(content, str):
        content = (artifacts / content).read_bytes()
    elif isinstance(content, slice):
        content = (artifacts / file).read_bytes()[content]
    (artifacts / file).write_bytes(content)
    metric = "score/quiz/acc_bytes" if file.startswith("score") else "sweep/chat/r1/ttft_p50_ms"
    assert main(["judge", str(tmp_path / "b"), str(tmp_path / "c"), "--metric", metric]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert str(artifacts / file) in printed.err
    assert said in printed.err


def test_a_point_of_a_multirun_is_all_its_repetitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(6):
        for side, point in enumerate(("b", "c")):
            config = settings(quantize__smooth__alpha=0.8) if side else settings()
            write_run(tmp_path / point / f"r{k}", config=config, repetition=k,
                      started=f"2026-01-02T03:{2 * k + side:02}:00.000+00:00",
                      timings={"serve/cold_start_s": 20.0 + 0.1 * k - 2 * side + 0.05 * side * (-1) ** k})  # fmt: skip
    assert main(["judge", str(tmp_path / "b"), str(tmp_path / "c"), "--metric", "serve/cold_start_s"]) == 0
    assert "n 6 repetitions; sign-flip, exact, and paired t, p 0.031" in capsys.readouterr().out
