"""A training that is killed, that diverges, in several processes, with adapters, or by another loss. Tiny models."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from oneaxis.errors import RunError, UserError
from oneaxis.preference.dpo import claim, inputs_key, train_dpo
from oneaxis.preference.dpo_config import LOSSES
from oneaxis.preference.forward import load, response_logps
from oneaxis.preference.pairs import tokenize_pair
from oneaxis.preference.probes import Escapes
from oneaxis.preference.trainer import Training, fit, gap_warning, trl_dataset
from oneaxis.preference.watch import Watched

from .conftest import small_tokenizer
from .test_dpo import PROBES, pairs, run
from .test_dpo_config import train

SFT = {"epochs": 1.0, "learning_rate": 1e-3}
LORA = {"r": 4, "alpha": 8, "targets": "all-linear"}


def payload(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def dpo(checkpoint: Path, folder: Path, table: pl.DataFrame, **changes: Any) -> pl.DataFrame:
    """DPO alone, without what the stage measures before and after; the log."""
    training = Training("dpo", checkpoint, checkpoint, train(**changes), seed=1)
    trl_dataset(table, folder / "pairs")
    escapes = Escapes(PROBES["prompt"], training.config.probes.texts, [0], small_tokenizer())
    fit(training, Watched(escapes, [], 0.0), folder, None)
    return pl.read_parquet(folder / "result" / "log.parquet")


# --- fast ----------------------------------------------------------------------------------------------------------


def test_what_another_run_left_is_removed_and_what_ours_left_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    table = pairs()
    key = inputs_key(checkpoint, table, PROBES, train(), 1)
    assert key == inputs_key(checkpoint, pairs(), PROBES, train(checkpoint_s=9.0), 1), "when to save changes no result"
    others = [
        inputs_key(checkpoint, table, PROBES, train(beta=0.2), 1),
        inputs_key(checkpoint, table, PROBES, train(), 2),
        inputs_key(checkpoint, table.head(11), PROBES, train(), 1),
        inputs_key(checkpoint, table, PROBES.head(2), train(), 1),
        inputs_key(checkpoint.parent, table, PROBES, train(), 1),
    ]
    assert len({key, *others}) == 6

    claim(tmp_path / "scratch", key)
    (tmp_path / "scratch" / "state").write_text("of step 8")
    claim(tmp_path / "scratch", key)
    assert (tmp_path / "scratch" / "state").exists()
    claim(tmp_path / "scratch", others[0])
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["inputs.json"]


def test_a_gap_to_the_reference_is_said_with_its_size() -> None:
    assert gap_warning({"chosen": 1e-4, "rejected": -1e-4, "largest": 4e-4, "pairs": 8}) is None
    said = gap_warning({"chosen": 7.25, "rejected": 0.5, "largest": 9.0, "pairs": 8})
    assert said
    assert "+7.25 nats (chosen) and +0.50 nats (rejected) from it on the first 8 pairs" in said


# --- slow: a kill ----------------------------------------------------------------------------------------------------


def killed(checkpoint: str, out: str, scratch: str, changes: str) -> None:
    """Train, and die by SIGKILL at the last logging step, after the checkpoint of the one before. In a process."""

    def die(_values: dict[str, float], step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    train_dpo(Path(checkpoint), pairs(), PROBES, train(**json.loads(changes)), seed=1, out=Path(out),
              scratch=Path(scratch), on_log=die)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"rpo_alpha": 1.0, "sft": SFT}, {"lora": LORA, "gradient_accumulation": 2}],
    ids=["full, after SFT", "LoRA, accumulated"],
)
def test_a_training_killed_by_9_goes_on_and_ends_with_the_same_bytes(
    root: Path, checkpoint: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Seven pairs in batches of two: it goes on at step 4, where the second epoch begins."""
    settings = {**changes, "steps": 6, "log_every": 2, "checkpoint_s": 0.0}
    (tmp_path / "dead").mkdir()
    arguments = [str(checkpoint), str(tmp_path / "dead"), str(tmp_path / "scratch"), json.dumps(settings)]
    child = subprocess.run(
        [sys.executable, "-c", f"from tests.preference.test_trainer import killed; killed(*{arguments!r})"],
        cwd=root, env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
                       "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    left = (tmp_path / "scratch" / "dpo" / "trainer").glob("checkpoint-*/complete")
    assert [path.parent.name for path in left] == ["checkpoint-4"]

    observed: dict[str, Any] = {}
    out = tmp_path / "out"
    out.mkdir()
    first = train_dpo(checkpoint, pairs(), PROBES, train(**settings), seed=1, out=out, scratch=tmp_path / "scratch",
                      observed=observed)  # fmt: skip
    assert observed == {"dpo_went_on_from_step": 4}, "and SFT, which had ended, did not run again"
    assert not (tmp_path / "scratch").exists()
    whole = run(checkpoint, tmp_path / "whole" / "out", **settings)
    assert first == whole
    assert payload(out) == payload(tmp_path / "whole" / "out")
    assert pl.read_parquet(out / "train_log.parquet")["step"].to_list() == [2, 4, 6]


# --- slow: divergence ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_that_diverges_stops_and_keeps_the_last_good_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The first step of the warm-up has a learning rate of 0; the second makes the weights useless."""
    with pytest.raises(RunError, match=r"after step 2; .*the last good checkpoint is .*checkpoint-1$") as caught:
        run(checkpoint, tmp_path / "out", learning_rate=1e38, checkpoint_s=0.0)
    assert "\n" not in str(caught.value)
    good, _ = load(tmp_path / "scratch" / "dpo" / "trainer" / "checkpoint-1")
    fetched, _ = load(checkpoint)
    assert all(torch.equal(one, other) for one, other in zip(good.parameters(), fetched.parameters(), strict=True))


# --- slow: adapters, several processes, another reference ------------------------------------------------------------


@pytest.mark.slow
def test_lora_trains_its_targets_alone_and_is_merged(checkpoint: Path, tmp_path: Path) -> None:
    """Oracle for the merge: a matrix of rank r is all that a target may differ by, before it is rounded."""
    lora = {"r": 2, "alpha": 4, "targets": ["q_proj", "down_proj"]}
    dpo(checkpoint, tmp_path, pairs(), lora=lora, learning_rate=1e-2)
    old, new = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "result" / "model.safetensors")
    assert old.keys() == new.keys()
    for name in old:
        change = new[name] - old[name].float()
        if "q_proj" in name or "down_proj" in name:
            assert torch.linalg.matrix_rank(change, atol=1e-5) == 2
        else:
            assert not change.any()


@pytest.mark.slow
def test_targets_that_the_model_does_not_have_are_a_mistake_in_the_settings(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train\.lora\.targets=\['c_attn'\]: .*c_attn") as caught:
        dpo(checkpoint, tmp_path, pairs(), lora={"r": 2, "alpha": 4, "targets": ["c_attn"]})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_two_processes_train_as_one(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same effective batch, shared out: the same means and the same weights, but for the order of sums."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told: dict[str, list[Any]] = {}
    for processes in (1, 2):
        name = str(processes)
        (tmp_path / name / "out").mkdir(parents=True)
        told[name] = []
        train_dpo(
            checkpoint, pairs(13), PROBES, train(processes=processes, steps=6, log_every=2, rpo_alpha=None),
            seed=1, out=tmp_path / name / "out", scratch=tmp_path / name / "scratch",
            on_log=lambda values, step, name=name: told[name].append((step, values)),
        )  # fmt: skip
    logs = [pl.read_parquet(tmp_path / name / "out" / "train_log.parquet") for name in ("1", "2")]
    assert logs[0]["step"].to_list() == logs[1]["step"].to_list() == [2, 4, 6]
    for column in logs[0].columns:
        np.testing.assert_allclose(logs[0][column], logs[1][column], rtol=1e-3, atol=1e-4, err_msg=column)
    assert [(step, values["loss"]) for step, values in told["2"]] == list(logs[1].select("step", "loss").iter_rows())
    one, two = (pl.read_parquet(tmp_path / name / "out" / "heldout.parquet") for name in ("1", "2"))
    moved = (one["chosen_after"] - one["chosen_before"]).abs().max()
    assert (one["chosen_after"] - two["chosen_after"]).abs().max() < 0.1 < moved


@pytest.mark.slow
def test_a_reference_that_is_not_the_sft_checkpoint_is_warned_of(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gap is what SFT did to the pairs; TRL's first log-ratios, logged as rewards, are the same."""
    settings = {"sft": {"epochs": 4.0, "learning_rate": 3e-3}, "reference": "fetched", "warmup_steps": 0, "steps": 1}
    table = pairs(heldout=4)
    kept = table.filter((pl.col("split") == "train") & pl.col("kept"))
    _, notes = run(checkpoint, tmp_path / "out", batch_size=kept.height, **settings)
    gap = notes["reference_gap_nats"]
    log = pl.read_parquet(tmp_path / "out" / "train_log.parquet")
    assert gap["pairs"] == kept.height == 7
    assert gap["chosen"] == pytest.approx(log["rewards/chosen"][0] / 0.1, abs=1e-2)
    assert gap["rejected"] == pytest.approx(log["rewards/rejected"][0] / 0.1, abs=1e-2)
    assert gap["chosen"] > 1
    warnings = json.loads((tmp_path / "out" / "displacement.json").read_text())["warnings"]
    assert [said in capfd.readouterr().err for said in warnings] == [True]


# --- slow: the losses ------------------------------------------------------------------------------------------------

BETA, SMOOTHING = 0.1, 0.2
AT_THE_REFERENCE = {
    "sigmoid": math.log(2),
    "sigmoid_norm": math.log(2),
    "hinge": 1.0,
    "ipo": (1 / (2 * BETA)) ** 2,
    # p_theta is (1/2, 1/2): KL(p_theta || (1 - e, e)).
    "exo_pair": 0.5 * math.log(0.5 / (1 - SMOOTHING)) + 0.5 * math.log(0.5 / SMOOTHING),
    "nca_pair": 2 * math.log(2),
    "robust": math.log(2),
    "bco_pair": 2 * math.log(2),
    "sppo_hard": 2 * (0.5 / BETA) ** 2,
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "discopop": 0.5 * math.log(2) + 0.5,
    "sft": None,
}
"""Each loss in closed form where all log-ratios are 0, as they are before the first step."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_trl_begins_where_its_formula_says(checkpoint: Path, tmp_path: Path, name: str) -> None:
    kept = pairs(heldout=4).filter((pl.col("split") == "train") & pl.col("kept"))
    smoothing = {"label_smoothing": SMOOTHING} if name in ("exo_pair", "robust") else {}
    log = dpo(checkpoint, tmp_path, kept, batch_size=kept.height, steps=2, warmup_steps=0,
              dpo_args={"loss_type": [name], **smoothing})  # fmt: skip
    expected = AT_THE_REFERENCE[name]
    if expected is None:
        model, tokenizer = load(checkpoint)
        chosen = [tokenize_pair(row, tokenizer, append_eos=True)[0] for row in kept.iter_rows(named=True)]
        expected = -response_logps(model, chosen).sum() / sum(part.response_tokens for part in chosen)
    assert log["loss"][0] == pytest.approx(expected, abs=1e-3)
    assert log["grad_norm"][0] > 0
    if name != "discopop":  # near 0 it falls with the margin, by its formula
        assert log["loss"][1] < log["loss"][0]
