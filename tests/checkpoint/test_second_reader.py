"""The reader of `benchmarks/peer/evaluate.py`, which shares no code with oneaxis, and `load_for_measuring` agree.

Oracle: two readings of one checkpoint, each linear on the same input. Nothing is faked.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.quantize.linears import QuantizedLinear
from tests.checkpoint.quantised import write_quantised
from tests.quantize.checkpoints import scheme
from tests.serve.tiny import random_llama

SCHEMES = {
    "int8 dynamic": scheme("w8a8_int8_dynamic"),
    "int8 static": scheme("w8a8_int8_static"),
    "int8 of the best range": scheme("w8a8_int8_dynamic", weight_range="mse"),
    "int4": scheme("w4a16"),
    "int4 with zero points": scheme("w4a16", symmetric=False, group_size=64),
    "fp8": scheme("w8a8_fp8"),
    "some left alone": scheme("w4a16", ignore=("re:.*self_attn.*", "model.layers.1.mlp.down_proj")),
}


@pytest.fixture(scope="module")
def reader(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("evaluate", root / "benchmarks" / "peer" / "evaluate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("reader") / "policy")


@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_linears_are_the_same_to_both(reader: Any, policy: Path, tmp_path: Path, name: str) -> None:
    folder = write_quantised(policy, tmp_path / "quantised", SCHEMES[name])
    ours, theirs = load_for_measuring(folder, torch.float32)[0], reader.load(folder)
    linears = {name: module for name, module in ours.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == (5 if name == "some left alone" else 14)
    # Beyond the range of a static scale too (8.0).
    draws = torch.randn(6, 256, generator=torch.Generator().manual_seed(3)) * 4
    for module, linear in linears.items():
        other = theirs.get_submodule(module)
        torch.testing.assert_close(other.weight, linear.weight_values(), rtol=0, atol=0)
        x = draws[:, : linear.in_features]
        torch.testing.assert_close(other(x), linear(x), rtol=1e-5, atol=1e-4)
    assert theirs.lm_head.weight.equal(ours.lm_head.weight)


def test_base_is_what_it_is(reader: Any, policy: Path) -> None:
    """NLL of a plain checkpoint: the model's own loss."""
    token_ids = torch.arange(2, 66).view(2, 32)
    model = load_for_measuring(policy, torch.float32)[0]
    nll = reader.token_nll(reader.load(policy), token_ids, 1)
    assert float(nll.mean()) == pytest.approx(float(model(token_ids, labels=token_ids).loss), rel=1e-6)


@pytest.mark.parametrize("broken", [{"ignore": ["lm_head", "model.layers.0.mlp.up_proj"]}, {"static": True}])
def test_tensors_that_are_not_those_of_the_config_stop_it(
    reader: Any, policy: Path, tmp_path: Path, broken: dict[str, Any]
) -> None:
    import json

    folder = write_quantised(policy, tmp_path / "quantised", scheme("w8a8_int8_dynamic"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config["quantization_config"]
    if broken.pop("static", False):
        quantization["config_groups"]["group_0"]["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization | broken}), encoding="utf-8"
    )
    with pytest.raises(SystemExit, match=r"ignored \S+ is quantised|input_scale"):
        reader.load(folder)
