"""What is said of each family's layers, against transformers' modules; and what unknown layers are told."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, MixtralConfig, OPTConfig, Qwen3MoeConfig

from oneaxis.errors import UserError
from oneaxis.quantize.experts import Experts, split_experts
from oneaxis.quantize.families import KINDS, Heads, Norm, Rows, check_layer, decoder
from tests.quantize.models import MODELS, SIZES, layers_of, site_inputs, split, tiny, token_ids


@pytest.mark.parametrize("family", MODELS)
def test_description_covers_what_the_layers_hold(family: str) -> None:
    """Every linear of every layer belongs to exactly one tensor, and every tensor to one of the four kinds."""
    model = tiny(family)
    description = split(model)
    layers = layers_of(model, description)
    assert description.num_layers == len(layers) == 2
    for index, layer in enumerate(layers):
        linears = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        assert sorted(description.linears(index)) == sorted(linears)
        assert {site.kind for site in description.sites(index)} == set(KINDS)
        assert all(site.producer or site.why_not for site in description.sites(index))


@pytest.mark.parametrize("family", MODELS)
def test_readers_of_a_site_read_one_tensor(family: str) -> None:
    """What the tap sees is what each reader sees: of experts, the tokens routed to them."""
    model = tiny(family)
    description = split(model)
    seen: dict[str, list[torch.Tensor]] = {}
    layer = layers_of(model, description)[0]
    for name in (name for site in description.sites(0) for name in (*site.readers, *site.high)):
        layer.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2))
        )
    inputs = site_inputs(model, description, token_ids(2, 40))
    for site in description.sites(0):
        x_NC = inputs[f"layers.0.{site.name}"]
        assert len(x_NC), site.name
        for reader in (*site.readers, *site.high):
            (read_NC,) = seen[reader]
            if ".experts." in reader and site.name == "gate_up":
                assert len(read_NC) < len(x_NC)
                assert torch.isin(read_NC[:, 0], x_NC[:, 0]).all()
            else:
                assert torch.equal(read_NC, x_NC), reader


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_split_experts_compute_the_same(family: str) -> None:
    """As transformers' eager and grouped forms of the fused ones do; the router and its choice are untouched."""
    ids = token_ids(3, 40)
    with torch.inference_mode():
        for implementation in ("eager", "grouped_mm"):
            fused, parts = tiny(family), tiny(family)
            fused.set_experts_implementation(implementation)
            split(parts)
            before, after = fused(ids).logits, parts(ids).logits
            assert (after - before).abs().max() < 1e-6 * before.abs().max()
    assert isinstance(parts.model.layers[0].mlp.experts, Experts)
    assert len(parts.model.layers[0].mlp.experts) == 4
    weight = fused.model.layers[0].mlp.experts.gate_up_proj[3]
    width = len(weight) // 2
    assert torch.equal(parts.model.layers[0].mlp.experts[3].gate_proj.weight, weight[:width])
    assert torch.equal(parts.model.layers[0].mlp.experts[3].up_proj.weight, weight[width:])


def test_split_experts_share_the_memory_of_the_fused_ones() -> None:
    layer = tiny("mixtral").model.layers[0]
    fused = layer.mlp.experts
    split_experts(layer)
    up = layer.mlp.experts[1].up_proj.weight
    assert up.untyped_storage().data_ptr() == fused.gate_up_proj.untyped_storage().data_ptr()


@pytest.mark.parametrize("family", MODELS)
def test_layers_without_memory_are_split_and_checked_too(family: str) -> None:
    model_class, config_class, extra = MODELS[family]
    with torch.device("meta"):
        model = model_class(config_class(**{**SIZES, **extra}))
    split(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_gpt2s_weights_lie_the_other_way_round() -> None:
    model = tiny("gpt2")
    stored = model.transformer.h[0].mlp.c_fc.weight.clone()  # Conv1D: [in, out]
    description = split(model)
    linear = model.transformer.h[0].mlp.c_fc
    assert (linear.in_features, linear.out_features) == tuple(stored.shape) == (32, 48)
    assert torch.equal(linear.weight, stored.t())
    assert description.transposed(0, "mlp.c_fc.weight")
    assert not description.transposed(0, "mlp.c_fc.bias")
    assert not description.transposed(0, "ln_1.weight")
    assert not decoder(tiny("llama").config).transposed(0, "mlp.up_proj.weight")


def test_heads_and_rows() -> None:
    """Phi-3, 4 query heads and 2 KV heads of 8: q is rows 0-31 of the fused linear, k 32-47, v 48-63."""
    description = decoder(tiny("phi3").config)
    o, down = description.sites(0)[1], description.sites(0)[3]
    assert (o.heads, o.producer) == (Heads(4, 2, 8), Rows("self_attn.qkv_proj", 48, 16))
    assert down.producer == Rows("mlp.gate_up_proj", 48, 48)
    assert decoder(tiny("mistral").config).heads == Heads(4, 2, 12)
    assert decoder(tiny("gpt2").config).heads == Heads(4, 4, 8)


def test_gemma_folds_into_one_plus_w_before_the_mlp() -> None:
    for family in ("gemma2", "gemma3"):
        sites = decoder(tiny(family).config).sites(0)
        assert sites[0].producer == Norm("input_layernorm", 1.0)
        assert sites[2].producer == Norm("pre_feedforward_layernorm", 1.0)


def test_fused_groups() -> None:
    """As engines merge them (vLLM's packed_modules_mapping and its fused experts)."""
    qkv, gate_up = (f"self_attn.{name}_proj" for name in "qkv"), ("mlp.gate_proj", "mlp.up_proj")
    assert decoder(tiny("llama").config).fused(0) == (tuple(qkv), gate_up)
    assert decoder(tiny("phi3").config).fused(0) == ()
    sparse, dense = (decoder(tiny("qwen3_moe").config).fused(layer) for layer in (0, 1))
    assert dense[1] == gate_up
    assert len(sparse[1]) == 12
    assert {"mlp.experts.0.gate_proj", "mlp.experts.3.down_proj"} <= set(sparse[1])
    assert not any("mlp.gate" in group for group in sparse)


def test_names_in_the_checkpoint() -> None:
    mixtral = decoder(MixtralConfig(**SIZES, num_local_experts=4))
    assert mixtral.stored_name(1, "mlp.experts.3.gate_proj.weight") == (
        "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    )
    assert mixtral.stored_name(1, "mlp.experts.3.down_proj") == "model.layers.1.block_sparse_moe.experts.3.w2"
    assert mixtral.stored_name(1, "mlp.experts.3.up_proj") == "model.layers.1.block_sparse_moe.experts.3.w3"
    assert mixtral.stored_name(0, "mlp.gate.weight") == "model.layers.0.block_sparse_moe.gate.weight"
    assert decoder(GPT2Config()).stored_name(3, "attn.c_attn.bias") == "transformer.h.3.attn.c_attn.bias"
    assert decoder(OPTConfig()).stored_name(3, "fc1") == "model.decoder.layers.3.fc1"


@pytest.mark.parametrize(
    ("step", "dense_layers", "sparse"), [(1, [], [0, 1, 2, 3]), (2, [], [1, 3]), (2, [3], [1]), (1, [0, 2], [1, 3])]
)
def test_qwen3_moe_layers_with_experts(step: int, dense_layers: list[int], sparse: list[int]) -> None:
    config = Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 4}, num_experts=4, decoder_sparse_step=step,
                            mlp_only_layers=dense_layers, moe_intermediate_size=24)  # fmt: skip
    description = decoder(config)
    assert [layer for layer in range(4) if len(description.sites(layer)) > 4] == sparse


def test_an_unknown_family_is_refused_with_what_its_layers_hold() -> None:
    """Cohere has Llama's names, and one norm that both halves of a layer read."""
    with torch.device("meta"):
        model = CohereForCausalLM(CohereConfig(**SIZES))
    with pytest.raises(UserError, match=r"^model_type='cohere': .*its layers hold input_layernorm, mlp\.down_proj, .*"
                                        r"self_attn\.v_proj; allowed: llama, mistral, .*gpt2$"):  # fmt: skip
        decoder(model.config, model)
    with pytest.raises(UserError, match=r"^model_type='cohere': [^;]*; allowed: llama"):
        decoder(model.config)


def broken(what: str) -> tuple[Any, Any]:
    model = tiny("llama")
    layer = model.model.layers[1]
    if what == "more":
        layer.mlp.router = nn.Linear(4, 4)
    elif what == "less":
        del layer.self_attn.k_proj
    elif what == "width":
        layer.mlp.down_proj = nn.Linear(40, 32)
    elif what == "rows":
        layer.self_attn.v_proj = nn.Linear(32, 8)
    return decoder(model.config), layer


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("more", r"^model_type='llama': model\.layers\.1 holds mlp\.router; allowed: "),
        ("less", r"model\.layers\.1 lacks self_attn\.k_proj; allowed: "),
        ("width", r"model\.layers\.1 has widths.*: mlp\.down_proj 40, rows of mlp\.up_proj 48; allowed: "),
        ("rows", r"model\.layers\.1\.self_attn\.v_proj has 8 outputs, of which 16 are needed; allowed: "),
    ],
)
def test_a_layer_of_another_shape_is_refused(what: str, message: str) -> None:
    description, layer = broken(what)
    with pytest.raises(UserError, match=message):
        check_layer(description, 1, layer)


def test_experts_that_are_still_fused_are_refused() -> None:
    model = tiny("mixtral")
    with pytest.raises(UserError, match=r"holds mlp\.experts and lacks mlp\.experts\.0\.down_proj, .*, \.\.\.;"):
        check_layer(decoder(model.config), 0, model.model.layers[0])


def test_gpt2_with_cross_attention_is_refused() -> None:
    with pytest.raises(UserError, match=r"add_cross_attention=True.*allowed: False"):
        decoder(GPT2Config(add_cross_attention=True))


def test_a_stray_number_of_kv_heads_means_nothing_to_gpt2() -> None:
    assert decoder(GPT2Config(n_head=12, n_embd=768, num_key_value_heads=4)).heads == Heads(12, 12, 64)
