"""The compressed-tensors description: as compressed-tensors itself reads it, and which modules `ignore` names."""

from typing import Any

import pytest
import torch

from oneaxis.checkpoint.compressed import (
    KV_SCHEME,
    ignored_linears,
    ignored_modules,
    quantization_config,
    read_scheme,
    routers_of,
    scheme_of,
)
from oneaxis.config.schema import QuantizeNone
from oneaxis.errors import UserError
from oneaxis.quantize.families import decoder
from tests.quantize.checkpoints import scheme
from tests.quantize.models import tiny

LAYERS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                   "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]  # fmt: skip
NAMES = [*LAYERS, "lm_head"]
FUSED = [
    [f"model.layers.{layer}.{parent}.{part}_proj" for part in parts]
    for layer in (0, 1, 10)
    for parent, parts in (("self_attn", "qkv"), ("mlp", ("gate", "up")))
]
W4A8 = {
    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}


SCHEMES = {
    "w8a8_int8_dynamic": scheme("w8a8_int8_dynamic"),
    "w8a8_int8_static": scheme("w8a8_int8_static", kv="fp8"),
    "w8a8_fp8": scheme("w8a8_fp8"),
    "w4a16": scheme("w4a16", group_size=64, kv="fp8"),
    "w4a16_asymmetric": scheme("w4a16", symmetric=False),
    "kv_alone": QuantizeNone(kind="none", kv="fp8"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_reads_what_is_meant(name: str) -> None:
    """Oracle: the library whose format it is. It infers the format of such a scheme by itself, and ours is the same."""
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, QuantizationStrategy

    settings = SCHEMES[name]
    config = QuantizationConfig.model_validate(quantization_config(settings, ["model.layers.0.mlp.gate"]))
    assert config.quantization_status == QuantizationStatus.COMPRESSED
    if settings.kind == "none":
        assert (config.config_groups, config.ignore) == ({}, ["model.layers.0.mlp.gate"])
    else:
        (group,) = config.config_groups.values()
        assert config.ignore == ["lm_head", "model.layers.0.mlp.gate"]
        assert group.targets == ["Linear"]
        assert config.format == infer_module_format(torch.nn.Linear, group).value
        assert group.weights.num_bits == (4 if "w4" in name else 8)
        assert group.weights.type == ("float" if "fp8" in name else "int")
        assert group.weights.symmetric == ("asymmetric" not in name)
        assert group.weights.group_size == {"w4a16": 64, "w4a16_asymmetric": 32}.get(name)
        if "w4" in name:
            assert group.input_activations is None
        else:
            activations = group.input_activations
            static = settings.kind == "w8a8_int8_static"
            assert (activations.num_bits, activations.symmetric, activations.dynamic) == (8, True, not static)
            assert activations.strategy == (QuantizationStrategy.TENSOR if static else QuantizationStrategy.TOKEN)
    assert (config.kv_cache_scheme is not None) == (settings.kv == "fp8")
    if config.kv_cache_scheme is not None:
        assert config.kv_cache_scheme.strategy == QuantizationStrategy.TENSOR
        assert (config.kv_cache_scheme.type, config.kv_cache_scheme.dynamic) == ("float", False)
    # As other tools write it, with every default spelled out, it is the same scheme.
    assert read_scheme(config.model_dump(mode="json"), "config.json") == scheme_of(settings)
    assert read_scheme(quantization_config(settings), "config.json") == scheme_of(settings)


def changed(of: str = "w8a8_int8_dynamic", **changes: Any) -> dict[str, Any]:
    settings = quantization_config(SCHEMES[of])
    part = changes.pop("part", None)
    (settings["config_groups"]["group_0"][part] if part else settings).update(changes)
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        changed(format="pack-quantized"),
        changed(kv_cache_scheme={"num_bits": 8, "type": "int"}),
        changed(kv_cache_scheme={**KV_SCHEME, "strategy": "attn_head"}),
        changed(part="weights", num_bits=4),
        changed(part="weights", strategy="group"),
        changed(part="input_activations", symmetric=False),
        changed(part="input_activations", type="float"),
        changed(config_groups={}),
        changed("w8a8_fp8", part="input_activations", strategy="tensor", dynamic=False),
        changed("w4a16", part="weights", strategy="channel", group_size=None),
        changed("w4a16", config_groups={"g": {"targets": ["Linear"], **W4A8}}),
    ],
)
def test_other_formats_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^x/config\.json: quantization_config.*allowed: compressed-tensors"):
        read_scheme(settings, "x/config.json")


def test_routers_stay_and_all_experts_go_together() -> None:
    """Mixtral's names in the checkpoint, in vLLM's order of layers."""
    family = decoder(tiny("mixtral").config)
    router = "model.layers.0.block_sparse_moe.gate"
    assert router in routers_of(family)
    assert router in ignored_linears(family, ["lm_head"])
    with pytest.raises(UserError, match=r"leaves model\.layers\.0\.block_sparse_moe\.experts\.1\.w1 alone but not the "
                       r"rest of .* and \d+ more; allowed: all or none"):  # fmt: skip
        ignored_linears(family, ["model.layers.0.block_sparse_moe.experts.1.w1"])


def test_ignore_takes_names_and_expressions() -> None:
    found = ignored_modules(NAMES, ["lm_head", "model.layers.1.mlp.down_proj", "re:.*layers.10.self_attn"], FUSED)
    attention = [f"model.layers.10.self_attn.{part}_proj" for part in "qkvo"]
    assert found == {"lm_head", "model.layers.1.mlp.down_proj", *attention}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_expressions_match_at_the_start_as_in_vllm() -> None:
    """Oracle: vLLM's own matching, on every linear of its fused model."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    ignore = ["lm_head", "re:.*down_proj", "re:model.layers.1[.]", r"re:.*layers\.0\.self_attn\.[qkv]_proj$"]
    found = ignored_modules(NAMES, ignore, FUSED)
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    fused = {name: name for name in NAMES} | {
        name.replace(shard, whole): name for name in NAMES for whole, shards in mapping.items() for shard in shards
        if name.endswith(f".{shard}")
    }  # fmt: skip
    for engine_name, name in fused.items():
        assert should_ignore_layer(engine_name, ignore, mapping) == (name in found), engine_name
    with pytest.raises(UserError, match="'re:down_proj' matches no linear"):
        ignored_modules(NAMES, ["re:down_proj"], FUSED)


@pytest.mark.parametrize("pattern", ["model.layers.0.self_attn.k_proj", "re:.*up_proj", "re:.*[qv]_proj"])
def test_part_of_a_fused_group_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"quantize\.ignore: leaves model\.layers\.0.*the engine fuses them"):
        ignored_modules(NAMES, [pattern], FUSED)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("model.layers.7.mlp.down_proj", "matches no linear module"), ("re:(", "is no regular expression")],
)
def test_pattern_that_cannot_be_meant_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ignored_modules(NAMES, [pattern], FUSED)
