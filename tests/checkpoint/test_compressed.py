"""The compressed-tensors description: as compressed-tensors itself reads it, and which modules `ignore` names."""

from typing import Any

import pytest

from oneaxis.checkpoint.compressed import ignored_modules, quantization_config, read_scheme
from oneaxis.errors import UserError

LAYERS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                   "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]  # fmt: skip
NAMES = [*LAYERS, "lm_head"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["w8a8_int8_dynamic", "w8a8_int8_static"])
def test_compressed_tensors_reads_what_is_meant(scheme: Any) -> None:
    """Oracle: the library whose format it is."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, QuantizationStrategy

    config = QuantizationConfig.model_validate(quantization_config(scheme, ["lm_head"]))
    (group,) = config.config_groups.values()
    assert (config.format, config.ignore) == ("int-quantized", ["lm_head"])
    assert config.quantization_status == QuantizationStatus.COMPRESSED
    assert group.targets == ["Linear"]
    assert (group.weights.num_bits, group.weights.type, group.weights.symmetric) == (8, "int", True)
    assert (group.weights.strategy, group.weights.dynamic) == (QuantizationStrategy.CHANNEL, False)
    activations = group.input_activations
    static = scheme == "w8a8_int8_static"
    assert (activations.num_bits, activations.symmetric, activations.dynamic) == (8, True, not static)
    assert activations.strategy == (QuantizationStrategy.TENSOR if static else QuantizationStrategy.TOKEN)
    # As other tools write it, with every default spelled out, it is the same scheme.
    assert read_scheme(config.model_dump(mode="json"), "config.json") == scheme
    assert read_scheme(quantization_config(scheme, []), "config.json") == scheme


def changed(**changes: Any) -> dict[str, Any]:
    settings = quantization_config("w8a8_int8_dynamic", ["lm_head"])
    part = changes.pop("part", None)
    (settings["config_groups"]["group_0"][part] if part else settings).update(changes)
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        changed(format="pack-quantized"),
        changed(kv_cache_scheme={"num_bits": 8, "type": "float"}),
        changed(part="weights", num_bits=4),
        changed(part="weights", strategy="group"),
        changed(part="input_activations", symmetric=False),
        changed(part="input_activations", type="float"),
        changed(config_groups={}),
    ],
)
def test_other_formats_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^x/config\.json: quantization_config.*allowed: compressed-tensors"):
        read_scheme(settings, "x/config.json")


def test_ignore_takes_names_and_expressions() -> None:
    found = ignored_modules(NAMES, ["lm_head", "model.layers.1.mlp.down_proj", "re:.*layers.10.self_attn"])
    attention = [f"model.layers.10.self_attn.{part}_proj" for part in "qkvo"]
    assert found == {"lm_head", "model.layers.1.mlp.down_proj", *attention}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_expressions_match_at_the_start_as_in_vllm() -> None:
    """Oracle: vLLM's own matching, on every linear of its fused model."""
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    ignore = ["lm_head", "re:.*down_proj", "re:model.layers.1[.]", r"re:.*layers\.0\.self_attn\.[qkv]_proj$"]
    found = ignored_modules(NAMES, ignore)
    mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    fused = {name: name for name in NAMES} | {
        name.replace(shard, whole): name for name in NAMES for whole, shards in mapping.items() for shard in shards
        if name.endswith(f".{shard}")
    }  # fmt: skip
    for engine_name, name in fused.items():
        assert should_ignore_layer(engine_name, ignore, mapping) == (name in found), engine_name
    with pytest.raises(UserError, match="'re:down_proj' matches no linear"):
        ignored_modules(NAMES, ["re:down_proj"])


@pytest.mark.parametrize("pattern", ["model.layers.0.self_attn.k_proj", "re:.*up_proj", "re:.*[qv]_proj"])
def test_part_of_a_fused_group_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"quantize\.ignore: leaves model\.layers\.0.*the engine fuses them"):
        ignored_modules(NAMES, [pattern])


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("model.layers.7.mlp.down_proj", "matches no linear module"), ("re:(", "is no regular expression")],
)
def test_pattern_that_cannot_be_meant_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ignored_modules(NAMES, [pattern])
