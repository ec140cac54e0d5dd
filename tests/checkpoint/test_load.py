"""Loading for measuring: plain and INT8 folders, and folders that do not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.errors import UserError
from oneaxis.quantize.apply import quantize
from oneaxis.quantize.int8 import Int8Linear
from tests.quantize.checkpoints import calibrated, int8
from tests.serve.tiny import random_llama


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain checkpoint and its INT8 one with static activations."""
    folder = tmp_path_factory.mktemp("written")
    policy, out, _ = calibrated(folder)
    quantize(policy, out, int8("static"), folder)
    return policy, folder / "checkpoint"


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


def test_int8_in_bf16_is_near_float32(written: tuple[Path, Path]) -> None:
    ids = torch.arange(2, 40)[None]
    single, half = (
        load_for_measuring(written[1], dtype)[0](ids).logits.float() for dtype in (torch.float32, torch.bfloat16)
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
