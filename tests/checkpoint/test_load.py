"""Loading for measuring: plain and INT8 folders, and folders that do not fit."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.config.schema import QuantizeNone
from oneaxis.errors import UserError
from oneaxis.installed import engine_device
from oneaxis.quantize.experts import split_experts
from oneaxis.quantize.families import decoder
from oneaxis.quantize.int8 import Int8Linear
from oneaxis.quantize.kv import round_kv
from oneaxis.quantize.linears import QuantizedLinear
from tests.checkpoint.quantised import log_probabilities, write_quantised
from tests.quantize.checkpoints import int8, scheme
from tests.quantize.models import tiny
from tests.serve.tiny import byte_tokenizer, random_llama


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain checkpoint and its INT8 one with static activations."""
    folder = tmp_path_factory.mktemp("written")
    policy = random_llama(folder / "policy")
    return policy, write_quantised(policy, folder / "checkpoint", int8("static"))


def test_plain_folder_in_the_dtype_asked_for(written: tuple[Path, Path]) -> None:
    model, tokenizer = load_for_measuring(written[0], torch.float32)
    stored = load_file(written[0] / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert model.model.layers[1].mlp.up_proj.weight.equal(stored.float())
    assert not model.training
    assert tokenizer.eos_token == "</s>"
    assert load_for_measuring(written[0], torch.bfloat16)[0].dtype == torch.bfloat16


def test_int8_forward_is_integer_arithmetic(written: tuple[Path, Path]) -> None:
    """Oracle: one linear of the loaded model against int64 sums from the file's tensors."""
    model, _ = load_for_measuring(written[1], torch.float32)
    tensors = {name.removeprefix("model.layers.0.mlp.up_proj."): tensor.numpy() for name, tensor in load_file(
        written[1] / "model.safetensors").items() if name.startswith("model.layers.0.mlp.up_proj.")}  # fmt: skip
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * 3
    levels = (x.double().numpy() / tensors["input_scale"]).round().clip(-128, 127).astype("int64")
    sums = levels @ tensors["weight"].astype("int64").T
    expected = sums * tensors["input_scale"].astype("float64") * tensors["weight_scale"].astype("float64").T
    module = model.model.layers[0].mlp.up_proj
    assert isinstance(module, Int8Linear)
    torch.testing.assert_close(module(x).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


def test_int8_in_bf16_is_near_float32(written: tuple[Path, Path], tmp_path: Path) -> None:
    ids = torch.arange(2, 40)[None]
    folder = write_quantised(written[0], tmp_path / "dynamic", int8("dynamic"))
    single, half = (
        load_for_measuring(folder, dtype)[0](ids).logits.float() for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.dtype == torch.float32
    assert (single - half).norm() < 0.1 * single.norm()


def test_loading_leaves_the_random_state(written: tuple[Path, Path]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_for_measuring(written[1], torch.float32)
    assert torch.rand(3).equal(expected)


def changed_folder(source: Path, target: Path, *, without: str = "", config: dict[str, object] | None = None) -> Path:
    shutil.copytree(source, target)
    if without:
        (target / without).unlink()
    if config is not None:
        old = json.loads((target / "config.json").read_text(encoding="utf-8"))
        (target / "config.json").write_text(json.dumps(old | config), encoding="utf-8")
    return target


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("tokenizer.json", "no tokenizer; allowed"),
        ("config.json", r"no config\.json"),
        ("model.safetensors", r"no \*\.saf"),
    ],
)
def test_missing_file_is_named(written: tuple[Path, Path], tmp_path: Path, without: str, said: str) -> None:
    for number, source in enumerate(written):
        folder = changed_folder(source, tmp_path / f"{number}", without=without)
        with pytest.raises(UserError, match=said):
            load_for_measuring(folder, torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'.*allowed: compressed-tensors"),
        ({"model_type": "unheard_of"}, "does not load"),
        ({"model_type": "own_kind", "auto_map": {"AutoConfig": "code.Config"}}, "does not load"),
    ],
)
def test_unknown_format_or_model_is_refused(tmp_path: Path, config: dict[str, object], said: str) -> None:
    plain = random_llama(tmp_path / "plain")
    with pytest.raises(UserError, match=said):
        load_for_measuring(changed_folder(plain, tmp_path / "changed", config=config), torch.float32)


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        ("model.norm.weight", r"model\.norm\.weight is missing"),
        ("model.layers.0.mlp.up_proj.input_scale", "input_scale is missing"),
        ("model.layers.0.mlp.up_proj.weight_scale", "up_proj"),
    ],
)
def test_missing_tensor_is_named(written: tuple[Path, Path], tmp_path: Path, drop: str, said: str) -> None:
    folder = changed_folder(written[1], tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    del tensors[drop]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=said):
        load_for_measuring(folder, torch.float32)


@pytest.mark.parametrize("number", [0, 1])
def test_another_shape_is_named(written: tuple[Path, Path], tmp_path: Path, number: int) -> None:
    folder = changed_folder(written[number], tmp_path / "changed", config={"vocab_size": 384})
    with pytest.raises(UserError, match=r"\w+\.weight has shape \[320, 128\], not \[384, 128\] \(1 more"):
        load_for_measuring(folder, torch.float32)


def test_missing_tensor_of_a_plain_folder_is_named(written: tuple[Path, Path], tmp_path: Path) -> None:
    """transformers alone would go on with random weights."""
    folder = changed_folder(written[0], tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load_for_measuring(folder, torch.float32)


SCHEMES = {
    "w8a8_int8_dynamic": scheme("w8a8_int8_dynamic", kv="fp8"),
    "w8a8_int8_static": scheme("w8a8_int8_static"),
    "w8a8_fp8": scheme("w8a8_fp8", ignore=("re:.*down_proj",)),
    "w4a16": scheme("w4a16"),
    "w4a16_asymmetric": scheme("w4a16", symmetric=False, group_size=64, kv="fp8"),
    "kv_alone": QuantizeNone(kind="none", kv="fp8"),
}
IDS = torch.randint(2, 250, (2, 24), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_computes_with_the_stored_weights(tmp_path: Path, name: str) -> None:
    """Oracle: the plain model, in which weights are replaced and a hook rounds what a linear reads."""
    settings = SCHEMES[name]
    policy = random_llama(tmp_path / "policy")
    folder = write_quantised(policy, tmp_path / "quantised", settings)
    model, _ = load_for_measuring(folder, torch.float32)
    plain, _ = load_for_measuring(policy, torch.float32)
    before = log_probabilities(plain, IDS)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == {"kv_alone": 0, "w8a8_fp8": 12}.get(name, 14)
    for linear_name, linear in linears.items():
        module = plain.get_submodule(linear_name)
        error = (linear.weight_values() - module.weight).norm() / module.weight.norm()
        assert 0 < error < (0.15 if "w4" in name else 0.03)
        module.weight.data = linear.weight_values()
        module.register_forward_pre_hook(lambda _, args: (rounded(settings.kind, args[0]),))
    for layer, scale in zip(plain.model.layers, (1, 2), strict=True):
        if settings.kv == "fp8":
            rounds_keys_and_values(layer.self_attn, 6.0 * scale / 448, 3.0 * scale / 448)
    found, expected = log_probabilities(model, IDS), log_probabilities(plain, IDS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.003)
    assert (found - expected).abs().mean() < 0.0002
    assert (found - before).abs().mean() > 0.003


def rounded(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Per token, or with the static scale of `write_quantised`; in float64 where rounding is to integers."""
    if kind == "w8a8_fp8":
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale
    if kind.startswith("w8a8"):
        scale = x.abs().amax(-1, keepdim=True) / 127 if kind.endswith("dynamic") else torch.tensor(8 / 127)
        return (x / scale).round().clamp(-128, 127) * scale
    return x


def rounds_keys_and_values(attention: torch.nn.Module, k_scale: float, v_scale: float) -> None:
    """Replace torch's own attention inside one module's forward by one that rounds first, as the engine here does."""
    forward, cut = attention.forward, engine_device() == "cpu"
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def call(*args: object, **kwargs: object) -> object:
        def rounding(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: object) -> torch.Tensor:
            return sdpa(query, round_kv(key, k_scale, cut=cut), round_kv(value, v_scale, cut=cut), **more)

        with patch("torch.nn.functional.scaled_dot_product_attention", rounding):
            return forward(*args, **kwargs)

    attention.forward = call


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2", "gemma2", "gemma3", "phi3"])
def test_families_are_read_under_their_stored_names(tmp_path: Path, family: str) -> None:
    """Experts one by one, fused projections, biases. Oracle: the model in memory, its weights and inputs rounded."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "policy")
    byte_tokenizer(tmp_path / "policy")
    folder = write_quantised(tmp_path / "policy", tmp_path / "quantised", scheme("w8a8_int8_dynamic"))
    loaded, _ = load_for_measuring(folder, torch.float32)
    ids = torch.randint(1, 96, (2, 12), generator=torch.Generator().manual_seed(7))
    before, found = model(ids).logits, loaded(ids).logits
    for layer in model.model.layers:
        split_experts(layer)
    linears = {name: module for name, module in loaded.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == sum(len(decoder(model.config).linears(layer)) for layer in range(2))
    for name, linear in linears.items():
        module = model.get_submodule(name)
        assert (linear.weight_values() - module.weight).norm() < 0.03 * module.weight.norm()
        module.weight.data = linear.weight_values()
        module.register_forward_pre_hook(lambda _, args: (rounded("w8a8_int8_dynamic", args[0]),))
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-3)
    assert (found - before).abs().mean() > 0.01


def test_a_plain_gemma_2_has_the_cap_on_its_scores(tmp_path: Path) -> None:
    """Oracle: transformers' eager attention, which `tiny` asks for."""
    model = tiny("gemma2", attn_logit_softcapping=5.0)
    model.save_pretrained(tmp_path / "policy")
    byte_tokenizer(tmp_path / "policy")
    ids = torch.randint(1, 96, (2, 12), generator=torch.Generator().manual_seed(7))
    found, expected = load_for_measuring(tmp_path / "policy", torch.float32)[0](ids).logits, model(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"down_proj.weight_packed": None}, r"layers\.0\.mlp\.down_proj\.weight_packed is missing"),
        ({"down_proj.input_scale": torch.ones(1)}, r"down_proj\.input_scale is there"),
        (
            {"down_proj.weight_scale": torch.ones(128, 4)},
            r"down_proj\.weight_scale has shape \[128, 4\], not \[128, 8\]",
        ),
        ({"down_proj.weight_packed": torch.zeros(128, 32)}, r"down_proj\.weight_packed holds torch\.float32, not "),
        ({"down_proj.bias": torch.ones(128)}, r"down_proj\.bias is unknown to this model"),
    ],
)
def test_a_tensor_that_the_scheme_does_not_say_is_named(
    tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    folder = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "quantised", SCHEMES["w4a16"])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        full = f"model.layers.0.mlp.{name}"
        tensors = {key: value for key, value in tensors.items() if key != full}
        if tensor is not None:
            tensors[full] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=said):
        load_for_measuring(folder, torch.float32)


def test_a_missing_kv_scale_is_named(tmp_path: Path) -> None:
    folder = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "quantised", SCHEMES["kv_alone"])
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.v_scale is missing"):
        load_for_measuring(folder, torch.float32)
