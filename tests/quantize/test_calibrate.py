"""The whole of `calibrate` on a tiny random checkpoint and random text."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.errors import UserError
from oneaxis.quantize.apply import quantize
from oneaxis.quantize.calibrate import calibrate
from tests.quantize.checkpoints import calibrated, int8, sizes_of, write_text
from tests.serve.tiny import random_llama


def test_writes_what_later_stages_read(tmp_path: Path) -> None:
    policy, out, metrics = calibrated(tmp_path)
    tensors = load_file(out / "stats.safetensors")
    assert len(tensors) == 2 * 4 * 6
    assert tensors["layers.1.down.absmax"].shape == (256,)
    model, _ = load_for_measuring(policy, torch.float32)
    expected = model.model.layers[1].mlp.down_proj.weight.abs().amax(0)
    assert tensors["layers.1.down.weight_absmax"].equal(expected)
    outliers = pl.read_parquet(out / "outliers.parquet")
    assert outliers.select("layer", "site").n_unique() == outliers.height == 8
    assert metrics["calibrate/outlier_ratio_max"] == outliers["ratio"].max()
    nll = pl.read_parquet(out / "heldout_nll.parquet")
    assert nll.columns == ["sequence", "position", "source", "nll"]
    assert nll.height == 4 * 63
    coverage = json.loads((out / "coverage.json").read_text(encoding="utf-8"))
    assert 0 < coverage["channels_exceeded_share"] < 1
    assert metrics["calibrate/channels_exceeded_share"] == coverage["channels_exceeded_share"]
    stats = json.loads((out / "stats.json").read_text(encoding="utf-8"))
    assert (stats["num_tokens"], set(stats["tokens_by_source"])) == (512, {"novel", "encyclopaedia"})


def test_is_byte_identical_when_run_again(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = (calibrated(tmp_path / name)[1] for name in ("first", "second"))
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    assert all((second / path.name).read_bytes() == path.read_bytes() for path in first.iterdir())


def test_sequences_beyond_the_models_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"calibrate\.sequence_tokens=513.*allowed: up to 512"):
        calibrated(tmp_path, sequence_tokens=513)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"heldout\.parquet: calibrate\.heldout_sequences=99 .* need 6336 .* there are 4020"
    ):
        calibrated(tmp_path, heldout_sequences=99)


def test_a_family_that_cannot_be_smoothed_has_its_perplexity_and_is_refused_by_quantize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma2 has Llama's module names and other meanings: its norms store 1 + w, and two of them feed the residual."""
    policy = random_llama(tmp_path / "policy")
    vocab_size = json.loads((policy / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(policy)
    out = tmp_path / "calibrate"
    out.mkdir()
    texts = write_text(tmp_path / "calibration.parquet", 20, 1), write_text(tmp_path / "heldout.parquet", 10, 2)
    metrics = calibrate(policy, *texts, sizes_of(), out)
    assert set(metrics) == {"calibrate/perplexity", "calibrate/nll", "calibrate/heldout_tokens"}
    assert {path.name for path in out.iterdir()} == {"heldout_tokens.parquet", "heldout_nll.parquet"}
    assert "perplexity only; model_type='gemma2'" in capsys.readouterr().err
    with pytest.raises(UserError, match="model_type='gemma2': cannot be calibrated and quantised"):
        quantize(policy, out, int8(), tmp_path / "quantize")
