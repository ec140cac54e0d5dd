"""The whole of `calibrate` on a tiny random checkpoint and random text."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from oneaxis.checkpoint.layerwise import Layerwise
from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.errors import UserError
from oneaxis.quantize.apply import quantize
from oneaxis.quantize.calibrate import WEAK, WeakBaseline, calibrate
from oneaxis.quantize.copying import CopyTasks, discriminates, score_copies
from oneaxis.quantize.int8 import quantize_activation, quantize_weight, static_scale
from oneaxis.quantize.nll import whole_model_nll
from oneaxis.quantize.statistics import read_statistics
from oneaxis.quantize.text import sequences_from_frame
from tests.quantize.checkpoints import calibrated, int8, sizes_of, write_text
from tests.quantize.models import tiny
from tests.serve.tiny import random_llama

FILES = {
    "calibration_tokens.parquet", "copy.parquet", "copy_tokens.parquet", "copy_weak.parquet", "copying.json",
    "coverage.json", "heldout_hidden.safetensors", "heldout_nll.parquet", "heldout_tokens.parquet", "outliers.parquet",
    "samples.safetensors", "stats.json", "stats.safetensors",
}  # fmt: skip
SITES = {"qkv": 128, "o": 128, "gate_up": 128, "down": 256}

Calibrated = tuple[Path, Path, dict[str, float]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return calibrated(tmp_path_factory.mktemp("calibrated"))


def test_writes_the_files_that_its_docstring_describes(made: Calibrated) -> None:
    policy, out, metrics = made
    assert {path.name for path in out.iterdir()} == FILES
    tensors = load_file(out / "stats.safetensors")
    for layer in (0, 1):
        for site, width in SITES.items():
            name = f"layers.{layer}.{site}"
            for statistic in ("absmax", "min", "max", "first_absmax", "rest_absmax", "weight_absmax"):
                assert tensors.pop(f"{name}.{statistic}").shape == (width,)
            assert tensors.pop(f"{name}.token_norm").shape == (8 * 64,)
        for cached in ("k_absmax", "v_absmax"):
            assert tensors.pop(f"layers.{layer}.{cached}").shape == (64,)
    assert not tensors
    model, _ = load_for_measuring(policy, torch.float32)
    expected = model.model.layers[1].mlp.down_proj.weight.abs().amax(0)
    assert load_file(out / "stats.safetensors")["layers.1.down.weight_absmax"].equal(expected)
    samples = load_file(out / "samples.safetensors")
    expected_shapes = {f"layers.{layer}.{site}": (32, width) for layer in (0, 1) for site, width in SITES.items()}
    assert {name: tuple(rows.shape) for name, rows in samples.items()} == expected_shapes
    assert {rows.dtype for rows in samples.values()} == {torch.bfloat16}
    outliers = pl.read_parquet(out / "outliers.parquet")
    assert outliers.select("layer", "site").n_unique() == outliers.height == 8
    assert metrics["calibrate/outlier_ratio_max"] == outliers["ratio"].max()
    coverage = json.loads((out / "coverage.json").read_text(encoding="utf-8"))
    assert 0 < coverage["channels_exceeded_share"] < 1
    assert metrics["calibrate/channels_exceeded_share"] == coverage["channels_exceeded_share"]
    stats = json.loads((out / "stats.json").read_text(encoding="utf-8"))
    assert (stats["num_tokens"], set(stats["tokens_by_source"])) == (512, {"novel", "encyclopaedia"})
    assert (stats["num_kv_heads"], stats["head_dim"], stats["unseen"]) == (1, 64, [])
    assert stats["sites"]["gate_up"] == ["mlp.gate_proj", "mlp.up_proj"]
    tokens = sequences_from_frame(pl.read_parquet(out / "calibration_tokens.parquet"))
    assert tokens.token_ids_ST.shape == (8, 64)


def test_held_out_text_is_measured_as_the_whole_model_measures_it(made: Calibrated) -> None:
    """Oracle: the whole model loaded by transformers, its NLL and its hidden states."""
    policy, out, metrics = made
    model, _ = load_for_measuring(policy, torch.float32)
    unseen = sequences_from_frame(pl.read_parquet(out / "heldout_tokens.parquet"))
    nll = pl.read_parquet(out / "heldout_nll.parquet")
    expected = whole_model_nll(model, unseen)
    assert nll.select("sequence", "position", "source").equals(expected.select("sequence", "position", "source"))
    assert nll.height == 4 * 63 == metrics["calibrate/heldout_tokens"]
    assert (nll["nll"] - expected["nll"]).abs().max() < 1e-4  # type: ignore[operator]
    assert metrics["calibrate/nll"] == pytest.approx(expected["nll"].mean(), abs=1e-5)
    hidden_STD = load_file(out / "heldout_hidden.safetensors")["hidden"]
    exact_STD = model.model(unseen.token_ids_ST).last_hidden_state
    assert hidden_STD.dtype == torch.float32
    torch.testing.assert_close(hidden_STD, exact_STD, rtol=1e-4, atol=1e-4)


def test_the_weak_baseline_is_static_int8_without_smoothing(made: Calibrated) -> None:
    """Oracle: the whole model, with each linear replaced by a function of the tests' own."""
    policy, out, metrics = made
    assert (WEAK.kind, WEAK.smooth.sites) == ("w8a8_int8_static", [])
    statistics = read_statistics(out / "stats.safetensors")
    weak = WeakBaseline.open(policy)
    weak.statistics = statistics
    model, _ = load_for_measuring(policy, torch.float32)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layer, part = int(name.split(".")[2]), name.split(".")[-1]
            site = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "down_proj": "down"}.get(part)
            absmax = float(statistics[f"layers.{layer}.{site or 'gate_up'}.absmax"].max())
            levels_OI, scale_O1 = quantize_weight(module.weight)
            module.weight = torch.nn.Parameter(levels_OI * scale_O1, requires_grad=False)
            step = static_scale(absmax)
            module.register_forward_pre_hook(lambda _, args, step=step: (quantize_activation(args[0], step)[0] * step,))
    ids_ST = sequences_from_frame(pl.read_parquet(out / "heldout_tokens.parquet")).token_ids_ST
    exact_STD = model.model(ids_ST).last_hidden_state
    found_STD = weak.run(ids_ST, 4)
    # A value between two levels may go to the other one when sums differ in their last bits.
    assert float((found_STD - exact_STD).norm() / exact_STD.norm()) < 0.02
    plain_STD = load_file(out / "heldout_hidden.safetensors")["hidden"]
    assert float((plain_STD - exact_STD).norm() / exact_STD.norm()) > 0.02

    tasks = CopyTasks(pl.read_parquet(out / "copy_tokens.parquet"))
    base, scores = pl.read_parquet(out / "copy.parquet"), pl.read_parquet(out / "copy_weak.parquet")
    assert scores.equals(score_copies(weak, tasks.half()))
    assert base.equals(score_copies(Layerwise.open(policy), tasks))
    both = base.join(scores, on=["kind", "sequence", "task"], how="semi")
    assert json.loads((out / "copying.json").read_text(encoding="utf-8")) == discriminates(both, scores)
    assert metrics["calibrate/copy_exact"] == base["exact"].mean()
    assert metrics["calibrate/copy_exact_weak"] == scores["exact"].mean()
    assert metrics["calibrate/copy_tasks"] == base.height > 0


def test_says_that_the_suite_cannot_tell_and_which_experts_no_token_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random Mixtral copies nothing. Its router gives a, -a, 0 and 0: of two experts one is always above the rest."""
    policy = random_llama(tmp_path / "policy")
    vocab_size = json.loads((policy / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    model = tiny("mixtral", vocab_size=vocab_size, num_experts_per_tok=1)
    for layer in model.model.layers:
        layer.mlp.gate.weight[1] = -layer.mlp.gate.weight[0]
        layer.mlp.gate.weight[2:] = 0
    model.save_pretrained(policy)
    out = tmp_path / "calibrate"
    out.mkdir()
    texts = write_text(tmp_path / "calibration.parquet", 20, 1), write_text(tmp_path / "heldout.parquet", 10, 2)
    calibrate(policy, *texts, sizes_of(), out)
    said = capsys.readouterr().err
    assert json.loads((out / "copying.json").read_text(encoding="utf-8"))["why"] in said
    assert "no token reached 4 of 14 tensors (layers.0.experts.2.down)" in said
    unseen = [f"layers.{layer}.experts.{expert}.down" for layer in (0, 1) for expert in (2, 3)]
    assert json.loads((out / "stats.json").read_text(encoding="utf-8"))["unseen"] == unseen


def test_is_byte_identical_when_run_again(made: Calibrated, tmp_path: Path) -> None:
    first, second = made[1], calibrated(tmp_path)[1]
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    assert all((second / path.name).read_bytes() == path.read_bytes() for path in first.iterdir())


def test_no_copy_tasks_no_copy_files(tmp_path: Path) -> None:
    _, out, metrics = calibrated(tmp_path, copying={"sequences": 0, "context_tokens": 128})
    assert {path.name for path in out.iterdir()} == {name for name in FILES if "copy" not in name}
    assert not [name for name in metrics if "copy" in name]


def test_channels_without_range_and_infinite_weights(tmp_path: Path) -> None:
    """A row of up_proj that is zero leaves a channel of down_proj's input at zero; an infinity is named."""
    policy = random_llama(tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][5] = 0
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    texts = write_text(tmp_path / "calibration.parquet", 20, 1), write_text(tmp_path / "heldout.parquet", 10, 2)
    out = tmp_path / "calibrate"
    out.mkdir()
    metrics = calibrate(policy, *texts, sizes_of(), out)
    statistics = read_statistics(out / "stats.safetensors")
    assert statistics["layers.0.down.absmax"][5] == statistics["layers.0.down.min"][5] == 0
    assert all(torch.tensor(value).isfinite() for value in metrics.values())

    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        calibrate(policy, *texts, sizes_of(), out)


def test_activations_beyond_float32_name_the_tensor(tmp_path: Path) -> None:
    policy = random_llama(tmp_path / "policy")
    tensors = load_file(policy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1e37
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 1e37
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    texts = write_text(tmp_path / "calibration.parquet", 20, 1), write_text(tmp_path / "heldout.parquet", 10, 2)
    with pytest.raises(UserError, match=r"layers\.0\.down: the activations hold NaN or infinity"):
        calibrate(policy, *texts, sizes_of(), tmp_path)


def test_a_quantised_policy_is_measured_as_it_is_served(made: Calibrated, tmp_path: Path) -> None:
    """It cannot be quantised again, but it can be the policy of `quantize=none`."""
    quantize(made[0], made[1], int8("static", sites=["down"]), tmp_path)
    policy, out = tmp_path / "checkpoint", tmp_path / "calibrate"
    out.mkdir()
    texts = write_text(tmp_path / "calibration.parquet", 20, 1), write_text(tmp_path / "heldout.parquet", 10, 2)
    metrics = calibrate(policy, *texts, sizes_of(copying={"sequences": 0, "context_tokens": 128}), out)
    model, _ = load_for_measuring(policy, torch.float32)
    expected = whole_model_nll(model, sequences_from_frame(pl.read_parquet(out / "heldout_tokens.parquet")))
    assert metrics["calibrate/nll"] == pytest.approx(expected["nll"].mean(), rel=1e-3)
    linear = model.model.layers[1].mlp.down_proj
    absmax_C = read_statistics(out / "stats.safetensors")["layers.1.down.weight_absmax"]
    assert absmax_C.equal((linear.weight * linear.weight_scale).abs().amax(0))


def test_sequences_beyond_the_models_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"calibrate\.sequence_tokens=513.*allowed: up to 512"):
        calibrated(tmp_path, sequence_tokens=513)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"heldout\.parquet: calibrate\.heldout_sequences=99 .* need 6336 .* there are 4020; allowed: up to 62",
    ):
        calibrated(tmp_path, heldout_sequences=99)


def test_an_unknown_family_has_its_perplexity_and_is_refused_by_quantize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = random_llama(tmp_path / "policy")
    vocab_size = json.loads((policy / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    torch.manual_seed(0)
    config = GPTNeoXConfig(vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                           num_attention_heads=2, max_position_embeddings=512)  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(policy)
    out = tmp_path / "calibrate"
    out.mkdir()
    texts = write_text(tmp_path / "calibration.parquet", 20, 1), write_text(tmp_path / "heldout.parquet", 10, 2)
    metrics = calibrate(policy, *texts, sizes_of(), out)
    unseen = sequences_from_frame(pl.read_parquet(out / "heldout_tokens.parquet"))
    model, _ = load_for_measuring(policy, torch.float32)
    losses = [float(model(ids_T[None], labels=ids_T[None]).loss) for ids_T in unseen.token_ids_ST]
    assert metrics["calibrate/nll"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert set(metrics) == {"calibrate/perplexity", "calibrate/nll", "calibrate/heldout_tokens"}
    assert {path.name for path in out.iterdir()} == {"heldout_tokens.parquet", "heldout_nll.parquet"}
    said = capsys.readouterr().err
    assert "perplexity only; model_type='gpt_neox'" in said
    assert "allowed: llama" in said
    with pytest.raises(UserError, match=r"model_type='gpt_neox': .*cannot be calibrated and quantised"):
        quantize(policy, out, int8(), tmp_path / "quantize")
