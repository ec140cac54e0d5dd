"""What a checkpoint says otherwise. Oracle: both models whole, through transformers, with torch's own KL in float64."""

import math

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from oneaxis.artifacts import read_json, write_json
from oneaxis.checkpoint.layerwise import Layerwise
from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.config.schema import Copying
from oneaxis.quantize.copying import CopyTasks, discriminates, make_copy_tasks, score_copies
from oneaxis.quantize.nll import clustered_mean, whole_model_nll
from oneaxis.quantize.quality import (
    COPY_METRICS,
    METRICS,
    compare_distributions,
    measure_quality,
    unchanged_quality,
)
from oneaxis.quantize.text import Sequences
from tests.serve.tiny import random_llama

S, T = 3, 40


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The files of `calibrate` that quality reads, of a random model, and another model close to it."""
    folder = tmp_path_factory.mktemp("quality")
    policy, other = random_llama(folder / "policy"), random_llama(folder / "other")
    tensors = load_file(other / "model.safetensors")
    noise = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensor += (0.1 * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    out = folder / "calibrate"
    out.mkdir()
    model = Layerwise.open(policy)
    token_ids_ST = torch.randint(2, 258, (S, T), generator=torch.Generator().manual_seed(1))
    # The first sequence is all of one source, the third half of each.
    source_ids_ST = torch.tensor([[0] * T, [1] * T, [0] * (T // 2) + [1] * (T // 2)])
    text = Sequences(token_ids_ST, source_ids_ST, ["novel", "web"], 0)
    text.frame().write_parquet(out / "heldout_tokens.parquet")
    whole, _ = load_for_measuring(policy, torch.float32)
    whole_model_nll(whole, text).write_parquet(out / "heldout_nll.parquet")
    save_file({"hidden": model.run(token_ids_ST, 2)}, out / "heldout_hidden.safetensors")
    tasks = make_copy_tasks(model.tokenizer, Copying(sequences=2, context_tokens=256), 512, 0)
    scores = score_copies(model, tasks)
    tasks.tokens.write_parquet(out / "copy_tokens.parquet")
    scores.write_parquet(out / "copy.parquet")
    write_json(out / "copying.json", discriminates(scores, scores))
    return policy, other, out, text


def test_another_model_against_whole_models(calibrated, tmp_path):
    policy, other, folder, text = calibrated
    metrics = measure_quality(Layerwise.open(other), folder, tmp_path)
    logits = []
    for path in (policy, other):
        model, _ = load_for_measuring(path, torch.float32)
        logits.append(model(input_ids=text.token_ids_ST).logits[:, :-1].double().log_softmax(dim=-1).flatten(0, 1))
    base, changed = logits
    kl = torch.nn.functional.kl_div(changed, base, reduction="none", log_target=True).sum(dim=-1)
    same = base.argmax(dim=-1) == changed.argmax(dim=-1)
    nll = -changed.gather(1, text.token_ids_ST[:, 1:].reshape(-1, 1)).squeeze(1)

    moved = pl.read_parquet(tmp_path / "quality.parquet")
    assert moved.columns == ["sequence", "position", "source", "kl", "same_top1"]
    assert moved["kl"].to_numpy() == pytest.approx(kl.numpy(), rel=1e-4, abs=1e-6)
    assert moved["same_top1"].to_list() == same.tolist()
    assert 0 < same.float().mean() < 1
    after = pl.read_parquet(tmp_path / "heldout_nll.parquet")
    assert after["nll"].to_numpy() == pytest.approx(nll.numpy(), rel=1e-5, abs=1e-5)
    assert metrics["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
    assert metrics["kl_ci_low"] < metrics["kl"] < metrics["kl_ci_high"]
    assert metrics["top1_agreement"] == pytest.approx(float(same.double().mean()))
    assert metrics["perplexity_after"] == pytest.approx(math.exp(float(nll.mean())), rel=1e-5)


def test_report_by_source_and_copies(calibrated, tmp_path):
    _, other, folder, _ = calibrated
    metrics = measure_quality(Layerwise.open(other), folder, tmp_path)
    report = read_json(tmp_path / "quality.json")
    after = pl.read_parquet(tmp_path / "heldout_nll.parquet")
    for source, found in report["sources"].items():
        own = after.filter(pl.col("source") == source)
        assert found["after"] == pytest.approx(math.exp(own["nll"].mean()))
        assert found["n"] == 2
        # The ratio of the perplexities is the exponential of the effect: one statement, not two.
        assert found["ratio"] == pytest.approx(math.exp(found["delta_nll"]["effect"]))
    assert read_json(tmp_path / "perplexity.json") == report["perplexity"]
    tasks = CopyTasks(pl.read_parquet(folder / "copy_tokens.parquet"))
    scored = score_copies(Layerwise.open(other), tasks)
    assert pl.read_parquet(tmp_path / "copy.parquet").equals(scored)
    assert report["copies"]["all"]["num_tasks"] == scored.height
    assert report["suite"]["discriminates"] is False
    assert "recovery" not in (tmp_path / "quality.json").read_text()
    named = {
        f"{name}{end}" for name in ("delta_nll", *METRICS, *COPY_METRICS[2:]) for end in ("", "_ci_low", "_ci_high")
    }
    assert metrics.keys() == named | {"perplexity_before", "perplexity_after", "perplexity_ratio", *COPY_METRICS[:2]}


def test_the_model_itself_has_not_moved(calibrated, tmp_path):
    policy, _, folder, _ = calibrated
    metrics = measure_quality(Layerwise.open(policy), folder, tmp_path)
    assert metrics["kl"] == 0.0
    assert metrics["top1_agreement"] == 1.0
    assert metrics["delta_nll"] == pytest.approx(0, abs=1e-6)
    assert metrics["copy_exact_delta"] == 0.0
    assert metrics["copy_exact_delta_ci_low"] < 0 < metrics["copy_exact_delta_ci_high"]
    same = unchanged_quality(folder, tmp_path)
    assert same["perplexity_after"] == same["perplexity_before"] == pytest.approx(metrics["perplexity_before"])
    assert same["copy_exact_after"] == metrics["copy_exact_after"]


def test_files_are_the_same_twice(calibrated, tmp_path):
    _, other, folder, _ = calibrated
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        measure_quality(Layerwise.open(other), folder, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_without_copies(calibrated, tmp_path):
    _, other, folder, _ = calibrated
    bare, out = tmp_path / "calibrate", tmp_path / "out"
    bare.mkdir()
    out.mkdir()
    for name in ("heldout_tokens.parquet", "heldout_nll.parquet", "heldout_hidden.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    metrics = measure_quality(Layerwise.open(other), bare, out)
    assert not [name for name in metrics if name.startswith("copy")]
    assert sorted(path.name for path in out.iterdir()) == [
        "heldout_nll.parquet", "perplexity.json", "quality.json", "quality.parquet"]  # fmt: skip
    assert set(unchanged_quality(bare, out)) == {"perplexity_before", "perplexity_after"}


def test_kl_by_hand():
    """Base 1/2, 1/4, 1/4 against 1/4, 1/2, 1/4: KL = 1/2 log 2 - 1/4 log 2 = 0.173287. What cannot be adds 0."""
    text = Sequences(torch.tensor([[0, 2], [0, 2]]), torch.zeros(2, 2, dtype=torch.long), ["a"], 0)
    rows = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.25, 0.0]]).log()
    base = torch.tensor([[[0.0], [0.0]], [[0.0], [0.0]]])
    other = torch.tensor([[[1.0], [0.0]], [[0.0], [0.0]]])
    nll, moved = compare_distributions(base, other, lambda hidden_ND: rows[hidden_ND[:, 0].long()], text)
    assert moved["kl"].to_list() == pytest.approx([0.173287, 0.0], abs=1e-6)
    assert moved["same_top1"].to_list() == [False, True]
    assert nll["nll"].to_list() == pytest.approx([math.log(4)] * 2)


def test_interval_of_clusters_by_hand():
    values = pl.Series([1.0, 2.0, 3.0, 8.0]).to_numpy()
    # Clusters of one size: the t interval of their means 1.5 and 5.5: t(1) = 12.7062, deviation 2.828427.
    equal = clustered_mean(values, pl.Series([0, 0, 1, 1]).to_numpy())
    assert equal["effect"] == 3.5
    assert equal["ci_high"] == pytest.approx(3.5 + 12.7062 * 2.828427 / 2**0.5, rel=1e-5)
    # Of sizes 3 and 1: residual sums 6 - 3 * 3.5 = -4.5 and 4.5; deviation 6.363961, mean size 2.
    unequal = clustered_mean(values, pl.Series([7, 7, 7, 9]).to_numpy())
    assert unequal["effect"] == 3.5
    assert unequal["ci_low"] == pytest.approx(3.5 - 12.7062 * 6.363961 / 2 / 2**0.5, rel=1e-5)
    assert clustered_mean(values, pl.Series([0] * 4).to_numpy()) == {"effect": 3.5, "ci_low": None, "ci_high": None}
