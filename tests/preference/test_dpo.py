"""DPO on a tiny random model: what it logs, measures and writes, and that a run can be repeated to the byte."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from oneaxis.config import Config
from oneaxis.errors import UserError
from oneaxis.judge.paired import paired_difference
from oneaxis.multirun.metric_names import metric_names
from oneaxis.preference.dpo import fitting, sampled, stochastic_bfloat16, train_dpo
from oneaxis.preference.forward import load, response_logps
from oneaxis.preference.pairs import tokenize_pair

from .conftest import small_tokenizer
from .test_dpo_config import train

PROBES = pl.DataFrame({"probe_id": ["a", "b", "c"], "category": ["x"] * 3, "prompt": ["open a jar", "cook", "a dog"]})


PROBED = ("probe/refusal_logp", "probe/empty_logp")


def pairs(count: int = 12, heldout: int = 4, conversational: bool = False) -> pl.DataFrame:
    """Pairs of random words, as filter_pairs writes them (what train_dpo reads of them)."""
    random = np.random.default_rng(3)

    def words(number: int) -> str:
        return "".join(" " + "".join(random.choice(list("abcdeot"), size=4)) for _ in range(number))

    def text(role: str, value: str) -> str:
        return json.dumps([{"role": role, "content": value}]) if conversational else value

    return pl.DataFrame([
        {"pair_id": f"p{index:02}", "prompt": text("user", f"Goal:{words(2)}\nAnswer:"),
         "chosen": text("assistant", words(3)), "rejected": text("assistant", words(2 + index % 4)),
         "conversational": conversational, "split": "heldout" if index < heldout else "train", "kept": index != 5}
        for index in range(count)
    ])  # fmt: skip


def run(checkpoint: Path, folder: Path, table: pl.DataFrame | None = None, **changes: Any) -> Any:
    """Train into `folder`; the seed, the probes and the pairs are fixed."""
    folder.mkdir(parents=True, exist_ok=True)
    return train_dpo(
        checkpoint, pairs() if table is None else table, PROBES, train(**changes),
        seed=1, out=folder, scratch=folder.parent / "scratch",
    )  # fmt: skip


# --- fast ----------------------------------------------------------------------------------------------------------


def test_a_sample_is_what_the_steps_will_see() -> None:
    table = pairs(40)
    sample = sampled(table, 8, seed=0)
    assert sample.height == 8
    assert sample["pair_id"].is_sorted()
    assert sample.equals(sampled(table, 8, seed=0))
    assert not sample.equals(sampled(table, 8, seed=1))
    assert sampled(table, 99, seed=0).equals(table)


def test_stochastic_rounding_keeps_the_expectation_and_the_neighbours() -> None:
    """Between 1 and the next bfloat16, 1 + 2^-7, a quarter of the way up: a quarter of the draws go up."""
    for sign in (1.0, -1.0):
        value = sign * (1 + 2**-9)
        rounded = stochastic_bfloat16(torch.full((100_000,), value), torch.Generator().manual_seed(0)).float()
        assert set(rounded.tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert (rounded != sign).float().mean().item() == pytest.approx(0.25, abs=0.005)
    assert torch.full((1,), 1 + 2**-9).to(torch.bfloat16).item() == 1.0, "to nearest, the update is lost"


def test_stochastic_rounding_leaves_bfloat16_numbers_alone_and_repeats() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(stochastic_bfloat16(exact.float(), torch.Generator().manual_seed(2)), exact)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    once, again = (stochastic_bfloat16(weights, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, stochastic_bfloat16(weights, torch.Generator().manual_seed(5)))


def test_pairs_longer_than_max_length_are_left_out_and_counted(tokenizer: Any) -> None:
    table = pairs()
    lengths = [
        max(len(part.ids) for part in tokenize_pair(row, tokenizer, append_eos=True))
        for row in table.iter_rows(named=True)
    ]
    kept, tokens, long = fitting(table, tokenizer, train(max_length=sorted(lengths)[6]))
    assert kept.height == len(tokens) == sum(length <= sorted(lengths)[6] for length in lengths)
    assert kept.height + long == table.height
    assert long > 0


@pytest.mark.parametrize(
    ("table", "changes", "says"),
    [
        (pairs(6), {}, "allowed: at least train.batch_size=2"),
        (pairs(heldout=1), {}, "allowed: at least 2"),
        (pl.concat([pairs(), pairs(conversational=True)]), {}, "plain and conversational pairs are mixed"),
        (pairs(), {"max_length": 16}, "within train.max_length=16"),
    ],
)
def test_what_cannot_be_trained_is_one_clear_line(
    checkpoint: Path, tmp_path: Path, table: pl.DataFrame, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        run(checkpoint, tmp_path / "out", table, **changes)
    assert "\n" not in str(caught.value)


def watched_agrees(out: Path, judged: dict[str, Any], metrics: dict[str, float]) -> None:
    """The verdict's numbers on benign prompts are those of the tables."""
    escapes = pl.read_parquet(out / "escapes.parquet")
    for name in ("refusal", "empty"):
        one = escapes.filter(pl.col("escape") == name)
        before, after = (one.filter(pl.col("moment") == when).sort("probe_id") for when in ("before", "after"))
        assert before["probe_id"].to_list() == after["probe_id"].to_list() == ["a", "b", "c"]
        effect = paired_difference(before["logp"].to_numpy(), after["logp"].to_numpy(), 0.95)
        told = judged["escapes"][name]
        assert (told["effect"], told["ci_low"], told["n"]) == pytest.approx((effect.effect, effect.ci_low, 3))
        assert metrics[f"escape_{name}_delta"] == pytest.approx(effect.effect)
        during = one.filter(pl.col("moment") == "during")
        log = pl.read_parquet(out / "train_log.parquet")
        means = during.group_by("step", maintain_order=True).agg(pl.col("logp").mean())["logp"].to_list()
        assert log[f"probe/{name}_logp"].to_list() == pytest.approx(means)
    answers = pl.read_parquet(out / "answers.parquet")
    assert answers.height == judged["answers"]["refusal"]["n"] == 3
    assert metrics["empty_rate_after"] == pytest.approx(answers["empty_after"].mean())
    assert judged["detector"]["validation"]["accuracy"] > 0.9
    moved = json.loads((out / "mass.json").read_text())
    assert moved["num_prompts"] == 4
    assert moved["first"]["moved"] > 0


# --- slow: real training ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [None, 1.0], ids=["plain", "anchored"])
@pytest.mark.parametrize("conversational", [False, True], ids=["text", "messages"])
def test_dpo_writes_evidence_that_agrees_with_itself(
    checkpoint: Path, tmp_path: Path, alpha: float | None, conversational: bool
) -> None:
    """Oracle for the measurements: the written checkpoints, read back and scored again one response at a time."""
    out = tmp_path / "out"
    metrics, notes = run(checkpoint, out, pairs(conversational=conversational), rpo_alpha=alpha)

    log = pl.read_parquet(out / "train_log.parquet")
    assert log["step"].to_list() == [1, 2, 3, 4]
    assert {"loss", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected", "rewards/margins",
            "rewards/accuracies", *PROBED} < set(log.columns)  # fmt: skip
    assert (log["rewards/margins"] - (log["rewards/chosen"] - log["rewards/rejected"])).abs().max() < 1e-4

    tokenizer = small_tokenizer()
    heldout = pl.read_parquet(out / "heldout.parquet")
    rows = {row["pair_id"]: row for row in pairs(conversational=conversational).iter_rows(named=True)}
    for when, folder in (("before", checkpoint), ("after", out / "checkpoint")):
        model, _ = load(folder)
        for row in heldout.iter_rows(named=True):
            chosen, rejected = tokenize_pair(rows[row["pair_id"]], tokenizer, append_eos=True)
            assert row[f"chosen_{when}"] == pytest.approx(response_logps(model, [chosen])[0], abs=1e-3)
            assert row[f"rejected_{when}"] == pytest.approx(response_logps(model, [rejected])[0], abs=1e-3)

    judged = json.loads((out / "displacement.json").read_text())
    effect = paired_difference(heldout["chosen_before"].to_numpy(), heldout["chosen_after"].to_numpy(), 0.95)
    assert judged["chosen"]["effect"] == pytest.approx(effect.effect)
    assert judged["chosen"]["ci_low"] == pytest.approx(effect.ci_low)
    assert judged["n"] == heldout.height == 4
    assert judged["thresholds"] == {"slight_nats": 0.5, "steep_nats": 5.0, "refusal_share": 0.05, "stop_nats": None}
    assert judged["stopped"] is None
    watched_agrees(out, judged, metrics)
    assert notes["verdict"] == judged["verdict"]
    assert metrics["chosen_delta"] == pytest.approx(metrics["chosen_logp_after"] - metrics["chosen_logp_before"])
    assert metrics["steps"] == 4
    named = metric_names(Config.model_construct(train=train()), "train_dpo")
    assert {f"train_dpo/{name}" for name in metrics} == named, "what a claim may be made on before a run"
    assert not (tmp_path / "scratch").exists()


@pytest.mark.slow
def test_the_anchor_holds_the_chosen_responses_up(checkpoint: Path, tmp_path: Path) -> None:
    final = {}
    for name, alpha in (("plain", None), ("anchored", 5.0)):
        run(checkpoint, tmp_path / name, rpo_alpha=alpha, steps=8, learning_rate=3e-3)
        log = pl.read_parquet(tmp_path / name / "train_log.parquet")
        final[name] = log["rewards/chosen"][-1]
    assert final["anchored"] > final["plain"]


@pytest.mark.slow
def test_trl_logps_at_step_0_are_our_summed_logps(checkpoint: Path, tmp_path: Path) -> None:
    """One batch of all pairs, so TRL's first logged mean is that of the untrained model over exactly these pairs.

    The same for the loss: -log sigmoid(0) = log 2, plus alpha times the mean NLL over all chosen tokens.
    """
    table = pairs(heldout=2)
    kept = table.filter((pl.col("split") == "train") & pl.col("kept"))
    out = tmp_path / "out"
    run(checkpoint, out, table, batch_size=kept.height, steps=3, warmup_steps=0, rpo_alpha=0.5)
    model, tokenizer = load(checkpoint)
    tokens = [tokenize_pair(row, tokenizer, append_eos=True) for row in kept.iter_rows(named=True)]
    chosen = response_logps(model, [pair[0] for pair in tokens])
    rejected = response_logps(model, [pair[1] for pair in tokens])
    log = pl.read_parquet(out / "train_log.parquet")
    first = log.row(0, named=True)
    assert first["logps/chosen"] == pytest.approx(chosen.mean(), abs=1e-3)
    assert first["logps/rejected"] == pytest.approx(rejected.mean(), abs=1e-3)
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-4), "the reference pass saw the same tokens"
    nll = -chosen.sum() / sum(pair[0].response_tokens for pair in tokens)
    assert first["loss"] == pytest.approx(np.log(2) + 0.5 * nll, abs=1e-3)
    assert 0 < log["rewards/margins"][1] < log["rewards/margins"][2], "the margin of these pairs opens"


@pytest.mark.slow
def test_a_run_after_a_kill_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    """What a killed run leaves in the scratch folder, a half-written TRL cache too, changes nothing."""
    run(checkpoint, tmp_path / "a" / "out")
    left = tmp_path / "b" / "scratch" / "pairs"
    left.mkdir(parents=True)
    (left / "dataset_info.json").write_text("{")
    (left / "cache-0123.arrow").write_bytes(b"half")
    run(checkpoint, tmp_path / "b" / "out")
    first = {path.relative_to(tmp_path / "a"): path.read_bytes() for path in (tmp_path / "a").rglob("*.*")}
    second = {path.relative_to(tmp_path / "b"): path.read_bytes() for path in (tmp_path / "b").rglob("*.*")}
    assert first == second


@pytest.mark.slow
def test_the_checkpoint_has_the_layout_of_the_fetched_one_and_has_moved(checkpoint: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path / "out")
    written = tmp_path / "out" / "checkpoint"
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in checkpoint.iterdir())
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            assert (written / path.name).read_bytes() == path.read_bytes()
    old, new = load_file(checkpoint / "model.safetensors"), load_file(written / "model.safetensors")
    assert old.keys() == new.keys()
    assert {tensor.dtype for tensor in new.values()} == {torch.bfloat16}
    assert any(not torch.equal(old[name], new[name]) for name in old)
    assert AutoTokenizer.from_pretrained(written).chat_template
    AutoModelForCausalLM.from_pretrained(written)


@pytest.mark.slow
def test_live_log_gets_each_row_and_the_last_step_is_always_logged_and_probed(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, float | None]] = []
    out = tmp_path / "out"
    out.mkdir()
    probes = train().probes.model_dump() | {"every": 2}
    metrics, _ = train_dpo(
        checkpoint, pairs(), PROBES, train(steps=5, log_every=2, probes=probes), seed=1, out=out,
        scratch=tmp_path / "scratch", on_log=lambda values, step: seen.append((step, values.get(PROBED[0]))),
    )  # fmt: skip
    log = pl.read_parquet(out / "train_log.parquet")
    assert seen == list(log.select("step", PROBED[0]).iter_rows())
    assert [step for step, _ in seen] == [2, 4, 5]
    assert [value is None for _, value in seen] == [True, False, False], "every second logging step, and the last"
    assert log[PROBED[0]][-1] == pytest.approx(metrics["escape_refusal_logp_after_float32"], abs=1e-3)


@pytest.mark.slow
def test_a_fall_of_the_held_out_chosen_responses_stops_the_training_on_request(
    checkpoint: Path, tmp_path: Path
) -> None:
    """At a learning rate that breaks the model, so that every response falls."""
    settings = train().displacement.model_dump() | {"stop_nats": 0.5}
    metrics, notes = run(checkpoint, tmp_path / "out", displacement=settings, steps=40, learning_rate=2e-2)
    log = pl.read_parquet(tmp_path / "out" / "train_log.parquet")
    fell = log["heldout/chosen_logp"] - metrics["chosen_logp_before"]
    assert (fell[:-1] >= -0.5).all()
    assert fell[-1] < -0.5
    assert log["step"][-1] == metrics["steps"] < 40
    assert metrics["stopped_early"] == 1
    judged = json.loads((tmp_path / "out" / "displacement.json").read_text())
    assert judged["stopped"] == notes["stopped"]
    assert judged["stopped"]["heldout_chosen_change"] == pytest.approx(fell[-1])
    assert judged["reasons"][0] == judged["stopped"]["reason"]
    assert judged["reasons"][0].startswith(
        f"stopped at step {log['step'][-1]} of 40: the held-out chosen responses had"
    )
    assert log["probe/refusal_logp"][-1] is not None, "the last step is probed"
    assert metrics["chosen_logp_after_float32"] == pytest.approx(log["heldout/chosen_logp"][-1], abs=1e-3)
