"""SmoothQuant: its formula on literal numbers, and folds that leave what a model computes unchanged."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oneaxis.quantize.decoder import LINEARS, NORMS, SITES, Heads, decoder_layers, heads
from oneaxis.quantize.smooth import equal_in_groups, fold_layer, layer_scales, smoothing_scale, storable_scale
from oneaxis.quantize.statistics import gather, to_tensors, weight_absmax
from tests.quantize.models import FAMILIES, tiny, token_ids


def ranges(activations: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {"absmax": activations, "weight_absmax": weights}


def test_scale_formula() -> None:
    activations, weights = torch.tensor([16.0, 100.0, 0.25]), torch.tensor([0.25, 4.0, 1.0])
    # alpha 0.5: sqrt(16 / 0.25) = 8, sqrt(100 / 4) = 5, sqrt(0.25 / 1) = 0.5
    torch.testing.assert_close(smoothing_scale(ranges(activations, weights), 0.5), torch.tensor([8.0, 5.0, 0.5]))
    # alpha 0.75: 16^0.75 / 0.25^0.25 = 8 / 0.70711, 100^0.75 / 4^0.25 = 31.6228 / 1.41421, 0.25^0.75 = 0.353553
    expected = torch.tensor([11.3137, 22.3607, 0.353553])
    torch.testing.assert_close(smoothing_scale(ranges(activations, weights), 0.75), expected, rtol=1e-5, atol=0)
    # alpha 1: all of the range moves; alpha 0: every weight column ends at 1.
    torch.testing.assert_close(smoothing_scale(ranges(activations, weights), 1.0), activations)
    torch.testing.assert_close(smoothing_scale(ranges(activations, weights), 0.0), 1 / weights)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_channel_without_range_is_left_alone(alpha: float) -> None:
    activations, weights = torch.tensor([0.0, 3.0, 0.0, 5.0]), torch.tensor([2.0, 0.0, 0.0, 5.0])
    scale = smoothing_scale(ranges(activations, weights), alpha)
    assert scale[:3].tolist() == [1.0, 1.0, 1.0]
    assert scale.isfinite().all()
    assert (scale > 0).all()


def test_scales_are_equal_inside_a_group_of_query_heads() -> None:
    # 4 query heads of 2, 2 KV heads: heads 0 and 1 read the first KV head, 2 and 3 the second.
    scale = equal_in_groups(torch.tensor([1.0, 8.0, 3.0, 2.0, 5.0, 5.0, 4.0, 6.0]), Heads(4, 2, 2))
    assert scale.tolist() == [3.0, 8.0, 3.0, 8.0, 5.0, 6.0, 5.0, 6.0]


def test_storable_scale_divides_the_norm_into_stored_values() -> None:
    generator = torch.Generator().manual_seed(0)
    norm, wanted = torch.randn(500, generator=generator), torch.rand(500, generator=generator) * 20 + 0.01
    norm[:2] = 0.0
    scale = storable_scale(wanted, norm, 0.0, torch.bfloat16)
    quotient = norm / scale
    # BF16 holds the quotient up to float32 rounding, and the scale moved by no more than BF16's half step of 2^-9.
    torch.testing.assert_close(quotient.to(torch.bfloat16).float(), quotient, rtol=1e-6, atol=0)
    torch.testing.assert_close(scale, wanted, rtol=2**-8, atol=0)
    assert scale[:2].tolist() == wanted[:2].tolist()


def statistics_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return to_tensors(gather(model, token_ids(4, 24), 4), weight_absmax(model))


def folded(model: PreTrainedModel, sites: list[str], alpha: float, dtype: torch.dtype = torch.float32) -> None:
    """Fold every layer of the model in place."""
    statistics = statistics_of(model)
    for index, layer in enumerate(decoder_layers(model)):
        tensors = dict(layer.state_dict())
        scales = layer_scales(statistics, index, tensors, alpha=alpha, sites=sites, heads=heads(model), dtype=dtype)
        layer.load_state_dict(fold_layer(tensors, scales, heads(model)))


@pytest.mark.parametrize("sites", [[site] for site in SITES] + [list(SITES)], ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_fold_leaves_the_logits(family: str, sites: list[str]) -> None:
    """The logits of the same model unfolded, within 1e-5 of their absmax; each site must really move range."""
    model, plain = tiny(family), tiny(family)
    folded(model, sites, 0.7)
    ids = token_ids(3, 20, seed=9)
    before, after = plain(ids).logits, model(ids).logits
    assert (after - before).abs().max() < 1e-5 * before.abs().max()
    for site in sites:
        for linear in SITES[site]:
            old, new = (each.model.layers[0].get_submodule(linear).weight for each in (plain, model))
            assert (new / old - 1).abs().median() > 0.05, f"{linear} was not smoothed"


def test_norms_stored_in_bf16_cost_no_accuracy() -> None:
    """Scales that the norms absorb exactly in BF16: rounding the folded norms changes nothing but float32 dust."""
    model = tiny("llama")
    for layer in model.model.layers:
        for norm in NORMS.values():
            weight = layer.get_submodule(norm).weight
            weight.data = weight.data.bfloat16().float()
    ids = token_ids(3, 20, seed=9)
    before = model(ids).logits
    folded(model, list(SITES), 0.5, torch.bfloat16)
    for layer in model.model.layers:
        for norm in NORMS.values():
            weight = layer.get_submodule(norm).weight
            weight.data = weight.data.bfloat16().float()
    assert (model(ids).logits - before).abs().max() < 1e-5 * before.abs().max()


def test_unequal_scales_inside_a_group_would_break_the_fold() -> None:
    """Why the o_proj scales are made equal: the plain formula changes a model with grouped queries."""
    model = tiny("llama")
    statistics = statistics_of(model)
    name = "layers.0.o"
    scale = smoothing_scale(ranges(statistics[f"{name}.absmax"], statistics[f"{name}.weight_absmax"]), 0.5)
    ids = token_ids(3, 20, seed=9)
    before = model(ids).logits
    layer = decoder_layers(model)[0]
    layer.load_state_dict(fold_layer(dict(layer.state_dict()), {"o": scale}, heads(model)))
    assert (model(ids).logits - before).abs().max() > 1e-3 * before.abs().max()


def test_channels_without_range_give_finite_weights() -> None:
    model = tiny("llama_biases")
    for layer in model.model.layers:
        layer.input_layernorm.weight.data[3] = 0.0
        layer.mlp.up_proj.weight.data[5] = 0.0
        layer.mlp.up_proj.bias.data[5] = 0.0
        layer.mlp.down_proj.weight.data[:, 7] = 0.0
        layer.self_attn.o_proj.weight.data[:, 2] = 0.0
    ids = token_ids(3, 20, seed=9)
    before = model(ids).logits
    folded(model, list(SITES), 0.5)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (model(ids).logits - before).abs().max() < 1e-5 * before.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_fold_with_s_then_with_its_inverse_restores_the_weights(family: str) -> None:
    model = tiny(family)
    layer = decoder_layers(model)[1]
    shape = heads(model)
    original = dict(layer.state_dict())
    scales = layer_scales(statistics_of(model), 1, original, alpha=0.5, sites=list(SITES), heads=shape,
                          dtype=torch.float32)  # fmt: skip
    there = fold_layer(original, scales, shape)
    back = fold_layer(there, {site: 1 / scale for site, scale in scales.items()}, shape)
    assert original.keys() == back.keys()
    for name in original:
        torch.testing.assert_close(back[name], original[name], rtol=1e-6, atol=0)
    assert all((there[f"{name}.weight"] != original[f"{name}.weight"]).any() for name in LINEARS)


def test_fold_follows_literal_numbers() -> None:
    """One head of one dimension, two hidden channels, two in the MLP: every factor visible."""
    tensors = {f"{name}.weight": torch.ones(1, 2) for name in SITES["qkv"]}
    tensors |= {"self_attn.o_proj.weight": torch.ones(2, 1), "self_attn.v_proj.bias": torch.tensor([6.0])}
    tensors |= {f"{name}.weight": torch.ones(2, 2) for name in (*SITES["gate_up"], *SITES["down"])}
    tensors |= {f"{name}.weight": torch.tensor([8.0, 10.0]) for name in NORMS.values()}
    tensors |= {"mlp.up_proj.bias": torch.tensor([20.0, 30.0])}
    scales = {
        "qkv": torch.tensor([2.0, 5.0]),
        "o": torch.tensor([3.0]),
        "gate_up": torch.tensor([4.0, 2.0]),
        "down": torch.tensor([10.0, 20.0]),
    }
    new = fold_layer(tensors, scales, Heads(1, 1, 1))
    assert new["input_layernorm.weight"].tolist() == [4.0, 2.0]
    assert new["self_attn.q_proj.weight"].tolist() == [[2.0, 5.0]]
    torch.testing.assert_close(new["self_attn.v_proj.weight"], torch.tensor([[2 / 3, 5 / 3]]))
    assert new["self_attn.v_proj.bias"].tolist() == [2.0]
    assert new["self_attn.o_proj.weight"].tolist() == [[3.0], [3.0]]
    assert new["post_attention_layernorm.weight"].tolist() == [2.0, 5.0]
    assert new["mlp.gate_proj.weight"].tolist() == [[4.0, 2.0], [4.0, 2.0]]
    torch.testing.assert_close(new["mlp.up_proj.weight"], torch.tensor([[0.4, 0.2], [0.2, 0.1]]))
    assert new["mlp.up_proj.bias"].tolist() == [2.0, 1.5]
    assert new["mlp.down_proj.weight"].tolist() == [[10.0, 20.0], [10.0, 20.0]]
