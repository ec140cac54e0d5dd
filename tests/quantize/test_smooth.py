"""SmoothQuant: its formulas and folds on literal numbers, and what is stored. (Folds of whole models: invariance.)"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oneaxis.errors import UserError
from oneaxis.quantize.families import Heads, Norm, Rows, Site
from oneaxis.quantize.smooth import (
    equal_in_groups,
    fold_layer,
    refuse_unfoldable,
    site_scales,
    smoothing_scale,
    storable_scale,
)
from tests.quantize.models import MODELS, layers_of, site_inputs, split, statistics_of, tiny, token_ids


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


def test_range_formula() -> None:
    """llm-compressor's: (max - min)^alpha / (2 max|W|)^(1 - alpha)."""
    statistics = {
        "max": torch.tensor([30.0, 4.0, 5.0, 0.0]),
        "min": torch.tensor([-2.0, -4.0, 5.0, 0.0]),
        "weight_absmax": torch.tensor([0.25, 4.0, 1.0, 1.0]),
    }
    # sqrt(32 / 0.5) = 8, sqrt(8 / 8) = 1, a constant channel has no range, a dead one neither
    torch.testing.assert_close(smoothing_scale(statistics, 0.5, "range"), torch.tensor([8.0, 1.0, 1.0, 1.0]))
    # alpha 0.75 on a symmetric channel: 2^(2 * 0.75 - 1) times the absmax formula's 4^0.75 / 4^0.25 = 2
    assert float(smoothing_scale(statistics, 0.75, "range")[1]) == pytest.approx(2 * 2**0.5)


@pytest.mark.parametrize("formula", ["absmax", "range"])
def test_an_expert_that_no_token_reached_is_left_alone(formula: Any) -> None:
    """Its range is empty: from +inf to -inf."""
    statistics = {
        "absmax": torch.zeros(2),
        "min": torch.full((2,), float("inf")),
        "max": torch.full((2,), float("-inf")),
        "weight_absmax": torch.ones(2),
    }
    assert smoothing_scale(statistics, 0.5, formula).tolist() == [1.0, 1.0]


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


def test_storable_scale_of_an_offset_norm() -> None:
    """1 + w = 3, wanted 2: w' = 0.5, held exactly. 1 + w = 1, wanted 3: w' = -2/3, in BF16 -0.66796875 = -171/256, so
    the scale is 1 / (85/256). 1 + w = 0.001, wanted 100: w' would round to -1, the channel would vanish: left alone.
    1 + w = 0: no scale changes a zero."""
    norm, wanted = torch.tensor([2.0, 0.0, -0.999, -1.0]), torch.tensor([2.0, 3.0, 100.0, 7.0])
    scale = storable_scale(wanted, norm, 1.0, torch.bfloat16)
    torch.testing.assert_close(scale, torch.tensor([2.0, 256 / 85, 1.0, 7.0]), rtol=1e-7, atol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_norms_stored_in_bf16_cost_no_accuracy(family: str) -> None:
    """Scales that the norms absorb exactly in BF16: rounding the folded norms changes nothing but float32 dust."""
    model = tiny(family)
    description = split(model)
    rounded = [
        layer.get_submodule(site.producer.name).weight
        for index, layer in enumerate(layers_of(model, description))
        for site in description.sites(index)
        if isinstance(site.producer, Norm)
    ]

    def round_norms() -> None:
        for weight in rounded:
            weight.data = weight.data.bfloat16().float()

    round_norms()
    ids = token_ids(3, 20, seed=9)
    before = model(ids).logits
    fold_all(model, torch.bfloat16)
    round_norms()
    assert (model(ids).logits - before).abs().max() < 1e-5 * before.abs().max()


def fold_all(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Fold every tensor of every layer of a split model in place."""
    description = split(model)
    statistics = statistics_of(model, description, site_inputs(model, description, token_ids(4, 24)))
    for index, layer in enumerate(layers_of(model, description)):
        sites, tensors = description.sites(index), dict(layer.state_dict())
        alphas = {site.name: 0.5 for site in sites}
        scales = site_scales(description, index, tensors, statistics, alphas, "absmax", dtype)
        layer.load_state_dict(fold_layer(tensors, sites, scales))


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
    fold_all(model, torch.float32)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (model(ids).logits - before).abs().max() < 1e-5 * before.abs().max()


@pytest.mark.parametrize("family", MODELS)
def test_fold_with_s_then_with_its_inverse_restores_the_weights(family: str) -> None:
    model = tiny(family)
    description = split(model)
    original = dict(layers_of(model, description)[0].state_dict())
    sites = [site for site in description.sites(0) if site.producer]
    generator = torch.Generator().manual_seed(3)
    scales = {}
    for site in sites:
        s_C = torch.exp(torch.randn(original[f"{site.readers[0]}.weight"].shape[1], generator=generator))
        scales[site.name] = equal_in_groups(s_C, site.heads) if site.heads else s_C
    there = fold_layer(original, sites, scales)
    back = fold_layer(there, sites, {name: 1 / s_C for name, s_C in scales.items()})
    assert original.keys() == back.keys()
    for name in original:
        # An offset norm is restored as a sum: 1 + w to float32's digits, so w to theirs of 1.
        torch.testing.assert_close(back[name], original[name], rtol=2e-6, atol=1e-6 if "gemma" in family else 0)
    assert all((there[f"{name}.weight"] != original[f"{name}.weight"]).any() for site in sites for name in site.readers)


def test_only_what_has_an_alpha_gets_a_scale() -> None:
    model = tiny("mixtral")
    description = split(model)
    statistics = statistics_of(model, description, site_inputs(model, description, token_ids(4, 24)))
    tensors = dict(layers_of(model, description)[1].state_dict())
    alphas = {"gate_up": 0.8, "experts.2.down": 0.5}
    scales = site_scales(description, 1, tensors, statistics, alphas, "absmax", torch.float32)
    assert list(scales) == ["gate_up", "experts.2.down"]
    expected = statistics["layers.1.experts.2.down.absmax"].sqrt()
    expected /= statistics["layers.1.experts.2.down.weight_absmax"].sqrt()
    torch.testing.assert_close(scales["experts.2.down"], expected, rtol=1e-5, atol=0)


def test_fold_follows_literal_numbers() -> None:
    """One head of one dimension, two hidden channels, two in the MLP, a router, biases: every factor visible."""
    sites = [
        Site("qkv", "qkv", ("qkv",), producer=Norm("norm", 1.0)),
        Site("o", "o", ("o",), producer=Rows("qkv", 2, 1), heads=Heads(1, 1, 1)),
        Site("gate_up", "gate_up", ("gate", "up"), high=("router",), producer=Norm("mlp_norm")),
        Site("down", "down", ("down",), producer=Rows("up", 0, 2)),
    ]
    tensors = {
        "norm.weight": torch.tensor([7.0, 9.0]),  # used as 8, 10
        "qkv.weight": torch.ones(3, 2),
        "qkv.bias": torch.tensor([1.0, 2.0, 6.0]),
        "o.weight": torch.ones(2, 1),
        "o.bias": torch.tensor([5.0, 5.0]),
        "mlp_norm.weight": torch.tensor([8.0, 10.0]),
        "mlp_norm.bias": torch.tensor([4.0, 6.0]),
        "router.weight": torch.ones(1, 2),
        "gate.weight": torch.ones(2, 2),
        "up.weight": torch.ones(2, 2),
        "up.bias": torch.tensor([20.0, 30.0]),
        "down.weight": torch.ones(2, 2),
    }
    scales = {
        "qkv": torch.tensor([2.0, 5.0]),
        "o": torch.tensor([3.0]),
        "gate_up": torch.tensor([4.0, 2.0]),
        "down": torch.tensor([10.0, 20.0]),
    }
    new = fold_layer(tensors, sites, scales)
    assert new["norm.weight"].tolist() == [3.0, 1.0]  # used as 4, 2
    torch.testing.assert_close(new["qkv.weight"], torch.tensor([[2.0, 5.0], [2.0, 5.0], [2 / 3, 5 / 3]]))
    assert new["qkv.bias"].tolist() == [1.0, 2.0, 2.0]
    assert new["o.weight"].tolist() == [[3.0], [3.0]]
    assert new["o.bias"].tolist() == [5.0, 5.0]
    assert new["mlp_norm.weight"].tolist() == [2.0, 5.0]
    assert new["mlp_norm.bias"].tolist() == [1.0, 3.0]
    assert new["router.weight"].tolist() == [[4.0, 2.0]]
    assert new["gate.weight"].tolist() == [[4.0, 2.0], [4.0, 2.0]]
    torch.testing.assert_close(new["up.weight"], torch.tensor([[0.4, 0.2], [0.2, 0.1]]))
    assert new["up.bias"].tolist() == [2.0, 1.5]
    assert new["down.weight"].tolist() == [[10.0, 20.0], [10.0, 20.0]]


@pytest.mark.parametrize(
    ("family", "more", "kinds", "message"),
    [
        ("olmo2", {}, ["qkv", "down"], r"sites=\[qkv, down\]: qkv .* 'olmo2' reads the residual .* \[o, down\]$"),
        ("opt", {}, ["down"], r"down .* 'opt' reads what a nonlinearity gives.*allowed: \[qkv, o, gate_up\]$"),
        ("opt", {"do_layer_norm_before": False}, ["gate_up"], r"do_layer_norm_before=False.*allowed: \[o\]$"),
        ("opt", {"layer_norm_elementwise_affine": False}, ["qkv"], r"no weight to take the scale.*allowed: \[o\]$"),
        ("gpt2", {}, ["o", "down"], r"sites=\[o, down\]: down of model_type 'gpt2'.*allowed: \[qkv, o, gate_up\]$"),
    ],
)
def test_sites_that_cannot_be_folded_are_refused(
    family: str, more: dict[str, Any], kinds: list[str], message: str
) -> None:
    description = split(tiny(family, **more))
    with pytest.raises(UserError, match=r"^quantize\.smooth\..*" + message):
        refuse_unfoldable(description, kinds)
    refuse_unfoldable(description, [])
