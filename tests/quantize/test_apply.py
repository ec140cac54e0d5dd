"""The whole of `quantize` on tiny random checkpoints; the arithmetic is checked from the written file alone."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.errors import UserError
from oneaxis.quantize.apply import quantize
from oneaxis.quantize.gptq import Moments, gptq
from oneaxis.quantize.int8 import Int8Linear
from oneaxis.quantize.linears import round_weight, weight_grid
from tests.quantize.checkpoints import SITES, calibrated, int8, scheme, sizes_of
from tests.quantize.models import tiny
from tests.serve.tiny import random_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    policy, out, _ = calibrated(tmp_path_factory.mktemp("base"), num_sequences=32)
    return policy, out


def run(base: tuple[Path, Path], out: Path, settings: Any) -> dict[str, float]:
    out.mkdir(exist_ok=True)
    return quantize(*base, settings, out)[0]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_checkpoint_holds_rounded_smoothed_weights(base: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    """Oracle: SmoothQuant of one site and RTN, written out again from the policy and the statistics."""
    metrics = run(base, tmp_path, int8(kind, alpha=0.6))
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    policy, stats = load_file(base[0] / "model.safetensors"), load_file(base[1] / "stats.safetensors")
    name = "model.layers.1.mlp.down_proj"
    s = stats["layers.1.down.absmax"] ** 0.6 / stats["layers.1.down.weight_absmax"] ** 0.4
    smoothed = policy[f"{name}.weight"].float() * s
    scale = smoothed.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(tensors[f"{name}.weight_scale"], scale)
    assert tensors[f"{name}.weight"].dtype == torch.int8
    assert (tensors[f"{name}.weight"] - smoothed / scale).abs().max() < 0.501
    if kind == "static":
        expected = (stats["layers.1.down.absmax"] / s).max() / 127
        torch.testing.assert_close(tensors[f"{name}.input_scale"], expected[None])
        shared = [tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"] for part in "qkv"]
        assert shared[0].equal(shared[1])
        assert shared[0].equal(shared[2])
    assert (kind == "static") == any(key.endswith("input_scale") for key in tensors)
    norm = tensors["model.layers.0.input_layernorm.weight"]
    assert norm.dtype == torch.bfloat16
    assert not norm.equal(policy["model.layers.0.input_layernorm.weight"])
    for key in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert tensors[key].equal(policy[key])
    assert metrics["quantize/num_quantized_linears"] == 14
    assert metrics["quantize/fold_error_max"] < 1e-5
    assert 0 < metrics["quantize/weight_error_max"] < 0.05


def test_nll_after_is_that_of_the_checkpoint_read_back(base: tuple[Path, Path], tmp_path: Path) -> None:
    metrics = run(base, tmp_path, int8("dynamic"))
    model, _ = load_for_measuring(tmp_path / "checkpoint", torch.float32)
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == 14
    tokens = pl.read_parquet(base[1] / "heldout_tokens.parquet")
    ids = torch.tensor(tokens["token_id"].to_list()).view(4, 64)
    log_probs = model(ids).logits[:, :-1].log_softmax(-1)
    expected = -log_probs.gather(2, ids[:, 1:, None]).flatten()
    after = pl.read_parquet(tmp_path / "heldout_nll.parquet")
    torch.testing.assert_close(torch.tensor(after["nll"].to_list()), expected, rtol=1e-4, atol=1e-4)
    before = pl.read_parquet(base[1] / "heldout_nll.parquet")
    difference = after["nll"].mean() - before["nll"].mean()  # type: ignore[operator]
    assert metrics["quantize/delta_nll"] == pytest.approx(difference)
    assert metrics["quantize/delta_nll_ci_low"] < difference < metrics["quantize/delta_nll_ci_high"]
    assert abs(difference) < 0.05 * before["nll"].mean()  # type: ignore[operator]
    recorded = json.loads((tmp_path / "perplexity.json").read_text(encoding="utf-8"))
    assert recorded["after"] == metrics["quantize/perplexity_after"]


@pytest.mark.parametrize(
    "settings",
    [int8("static", alpha="auto"), scheme("w4a16", symmetric=False, rounding="gptq", weight_range="mse", kv="fp8")],
    ids=["int8-auto-rtn", "w4a16-gptq-kv"],
)
def test_is_byte_identical_when_run_again(base: tuple[Path, Path], tmp_path: Path, settings: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        run(base, out, settings)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    assert all((second / name).read_bytes() == (first / name).read_bytes() for name in files)


def test_checkpoint_is_complete(base: tuple[Path, Path], tmp_path: Path) -> None:
    run(base, tmp_path, int8("dynamic"))
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {path.name for path in base[0].iterdir()} | {"recipe.json"}
    for name in names - {"config.json", "model.safetensors", "recipe.json"}:
        assert (tmp_path / "checkpoint" / name).read_bytes() == (base[0] / name).read_bytes()
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text(encoding="utf-8"))
    assert config.pop("quantization_config")["ignore"] == ["lm_head"]
    assert config == json.loads((base[0] / "config.json").read_text(encoding="utf-8"))


def test_ignored_linears_stay_as_they_are(base: tuple[Path, Path], tmp_path: Path) -> None:
    """An unsmoothed site keeps its weights bit for bit; what feeds another site is folded and stored in BF16."""
    run(
        base,
        tmp_path,
        int8("dynamic", ignore=(r"re:.*layers\.0\.self_attn\.[qkv]_proj", "model.layers.1.mlp.down_proj")),
    )
    tensors, policy = load_file(tmp_path / "checkpoint" / "model.safetensors"), load_file(base[0] / "model.safetensors")
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm", "model.layers.1.mlp.down_proj"):
        assert tensors[f"{name}.weight"].equal(policy[f"{name}.weight"])
    value = "model.layers.0.self_attn.v_proj.weight"
    assert tensors[value].dtype == torch.bfloat16
    assert not tensors[value].equal(policy[value])
    layers = pl.read_parquet(tmp_path / "layers.parquet").filter(pl.col("module") != "layer")
    assert layers.filter(~pl.col("quantized")).height == 4
    assert layers.filter(pl.col("alpha").is_null()).height == 4
    assert layers.filter(pl.col("weight_error").is_null()).height == 4
    model, _ = load_for_measuring(tmp_path / "checkpoint", torch.float32)
    assert isinstance(model.model.layers[1].mlp.down_proj, torch.nn.Linear)


def test_smoothing_helps_static_activations_with_outliers(tmp_path: Path) -> None:
    """A policy whose up_proj makes a few channels 100 times larger: smoothing must win most of the loss back."""
    policy, out, _ = calibrated(tmp_path)
    tensors = load_file(policy / "model.safetensors")
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][:3] *= 128
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, :3] /= 128
    from oneaxis.quantize.calibrate import calibrate

    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    texts = tmp_path / "calibration.parquet", tmp_path / "heldout.parquet"
    calibrate(policy, *texts, sizes_of(), out)
    plain = run((policy, out), tmp_path / "plain", int8("static", sites=[]))["quantize/output_error_max"]
    smooth = run((policy, out), tmp_path / "smooth", int8("static", alpha=0.5))["quantize/output_error_max"]
    assert smooth < plain / 10


def test_statistics_of_another_model_are_refused(base: tuple[Path, Path], tmp_path: Path) -> None:
    other = random_llama(tmp_path / "other")
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), encoding="utf-8")
    tensors = load_file(other / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}, other / "model.safetensors"
    )
    with pytest.raises(UserError, match="statistics are not of this model"):
        run((other, base[1]), tmp_path, int8())


SCHEMES = ["w8a8_int8_dynamic", "w8a8_int8_static", "w4a16", "w8a8_fp8"]


@pytest.mark.parametrize("kind", SCHEMES)
def test_gptq_loses_less_of_the_outputs_than_rounding(base: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    """On held-out text, over all linears; and the layers together, whose later ones repair what the first lost."""
    errors = {}
    for rounding in ("rtn", "gptq"):
        metrics = run(base, tmp_path / rounding, scheme(kind, rounding=rounding, num_sequences=32))
        layers = pl.read_parquet(tmp_path / rounding / "layers.parquet")
        errors[rounding] = layers.filter(pl.col("module") != "layer")["output_error"].mean(), metrics["quantize/kl"]
    assert errors["gptq"][0] < errors["rtn"][0]
    assert errors["gptq"][1] < errors["rtn"][1]


def test_gptq_sees_what_is_quantised_already_and_repairs_its_own_layer(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Oracle: moments from whole models, the policy and the written one; the written levels must be GPTQ's for them.

    o_proj of layer 0 reads what the rounded q, k and v make, and is to give what it gave without; q_proj of layer 1
    reads what the whole rounded layer 0 makes, and has nothing before it in its own layer.
    """
    settings = scheme("w4a16", sites=[], rounding="gptq", num_sequences=32)
    run(base, tmp_path, settings)
    tokens = pl.read_parquet(base[1] / "calibration_tokens.parquet")
    ids = torch.tensor(tokens["token_id"].to_list()).view(32, 64)
    inputs: dict[tuple[str, str], torch.Tensor] = {}
    names = ("layers.0.self_attn.o_proj", "layers.1.self_attn.q_proj")
    for which, folder in (("exact", base[0]), ("seen", tmp_path / "checkpoint")):
        model, _ = load_for_measuring(folder, torch.float32)
        for name in names:
            model.model.get_submodule(name).register_forward_pre_hook(
                lambda _m, args, key=(which, name): inputs.update({key: args[0]})
            )
        model(ids)
    policy = load_file(base[0] / "model.safetensors")
    for name in names:
        moments = Moments(128)
        moments.add(inputs["seen", name], inputs["exact", name] if "o_proj" in name else None)
        weight = policy[f"model.{name}.weight"].float()
        grid = weight_grid(weight, settings)
        levels = gptq(moments.shifted(weight, 0.01), moments.hessian_II, grid, damping=0.01, act_order=True)
        written = model.model.get_submodule(name).weight_values()
        # All but ties within float32's rounding, and what follows from them.
        assert (grid.values(levels) == written).float().mean() > 0.98
        assert (grid.values(round_weight(weight, grid)) == written).float().mean() < 0.9


def test_groups_that_do_not_divide_are_refused_before_any_work(tmp_path: Path) -> None:
    """The statistics, which come first otherwise, do not even exist."""
    tiny("llama").save_pretrained(tmp_path / "policy")
    allowed = "group_size=32: does not divide 48, the input width of model.layers.0.mlp.down_proj"
    with pytest.raises(UserError, match=allowed):
        run((tmp_path / "policy", tmp_path), tmp_path / "out", scheme("w4a16"))
    assert not list((tmp_path / "out").iterdir())


def test_nothing_left_to_quantise_is_refused(base: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leaves no linear to quantise; allowed: fewer, or quantize=none"):
        run(base, tmp_path, int8(ignore=("re:.*",)))


def test_quantised_policy_is_refused(base: tuple[Path, Path], tmp_path: Path) -> None:
    run(base, tmp_path, int8())
    with pytest.raises(UserError, match=r"quantised already.*allowed: an unquantised"):
        run((tmp_path / "checkpoint", base[1]), tmp_path / "again", int8())


def test_values_that_the_fold_divides_have_the_scale_of_what_the_cache_then_holds(
    base: tuple[Path, Path], tmp_path: Path
) -> None:
    """Oracle: the divisor, read off the rows of v_proj before and after."""
    run(base, tmp_path, scheme("w8a8_fp8", ["o"], alpha=0.9, kv="fp8"))
    tensors, policy = load_file(tmp_path / "checkpoint" / "model.safetensors"), load_file(base[0] / "model.safetensors")
    stats = load_file(base[1] / "stats.safetensors")
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.v_proj"
        after_OI = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()
        divisor_O = policy[f"{name}.weight"].float().norm(dim=1) / after_OI.norm(dim=1)
        assert divisor_O.max() > 1.2 * divisor_O.min()
        expected = float((stats[f"layers.{layer}.v_absmax"].flatten() / divisor_O).max()) / 448
        found = float(tensors[f"model.layers.{layer}.self_attn.v_scale"])
        assert found == pytest.approx(expected, rel=0.03)
        assert abs(found * 448 / float(stats[f"layers.{layer}.v_absmax"].max()) - 1) > 0.05


def test_static_scales_for_experts_are_refused(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "policy")
    with pytest.raises(UserError, match=r"experts\.0\.w1 is an expert.*allowed: w8a8_int8_dynamic"):
        run((tmp_path / "policy", tmp_path), tmp_path / "out", scheme("w8a8_int8_static"))


def test_kv_alone_leaves_the_weights_and_adds_scales(base: tuple[Path, Path], tmp_path: Path) -> None:
    """Level 448 of a layer's cache is the largest key (or value) that calibration saw."""
    from oneaxis.config.schema import QuantizeNone

    metrics = run(base, tmp_path, QuantizeNone(kind="none", kv="fp8"))
    tensors, policy = load_file(tmp_path / "checkpoint" / "model.safetensors"), load_file(base[0] / "model.safetensors")
    assert all(tensors[name].equal(tensor) for name, tensor in policy.items())
    added = sorted(tensors.keys() - policy.keys())
    assert [name.rpartition(".")[2] for name in added] == ["k_scale", "v_scale"] * 2
    stats = load_file(base[1] / "stats.safetensors")
    assert float(tensors[added[2]]) == pytest.approx(float(stats["layers.1.k_absmax"].max()) / 448, rel=1e-2)
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    assert 0 < metrics["quantize/kl"] < 0.5  # Its logits are in the hundreds: what a random model says is easily moved.


def test_alpha_auto_is_recorded(base: tuple[Path, Path], tmp_path: Path) -> None:
    run(base, tmp_path, scheme("w8a8_int8_static", alpha="auto", site_alpha=dict.fromkeys(SITES) | {"down": 0.85}))
    tried, layers = pl.read_parquet(tmp_path / "alpha.parquet"), pl.read_parquet(tmp_path / "layers.parquet")
    assert set(tried["site"]) == {"qkv", "o", "gate_up"}
    chosen = tried.filter("chosen").select("layer", "site", "alpha")
    assert chosen.height == 6
    used = layers.filter(pl.col("site").is_not_null()).select("layer", "site", "alpha").unique()
    assert used.filter(pl.col("site") == "down")["alpha"].to_list() == [0.85, 0.85]
    assert used.filter(pl.col("site") != "down").sort("layer", "site").equals(chosen.sort("layer", "site"))
