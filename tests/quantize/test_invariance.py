"""Every fold of every family changes nothing: logits before and after, on tiny random models in float32.

A case per family and tensor, each folded alone, and one with all that the family has; `pytest -rP -k invariance` prints
the changes. Oracle: the model's own forward in transformers. Controls fold wrongly on purpose and must be caught.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from oneaxis.errors import UserError
from oneaxis.quantize.families import FAMILIES, KINDS, Decoder, Norm, Rows, Site, decoder
from oneaxis.quantize.smooth import fold_layer, refuse_unfoldable, site_scales, site_statistics, smoothing_scale
from tests.quantize.models import MODELS, SIZES, layers_of, site_inputs, split, statistics_of, tiny, token_ids

TOLERANCE = 1e-5
"""Of the logits' absmax."""
ALPHA = 0.7
SMALL = {"initializer_range": 0.15, "init_std": 0.15}
"""Smaller weights than elsewhere: attention that saturates blows up float32's rounding, whatever is folded."""
IDS = token_ids(3, 40, seed=9)


@dataclass(frozen=True)
class Made:
    """A model as transformers computes it, and what scales are made of."""

    model: PreTrainedModel
    """With its experts split."""
    description: Decoder
    logits: Tensor
    """Before the experts were split."""
    statistics: dict[str, Tensor]


def make(family: str, **more: Any) -> Made:
    model = tiny(family, **SMALL, **more)
    with torch.inference_mode():
        logits = model(IDS).logits
    description = split(model)
    ids = token_ids(4, 40)
    return Made(model, description, logits, statistics_of(model, description, site_inputs(model, description, ids)))


made = cache(make)


def scales_of(one: Made, layer: int, names: list[str], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = dict(layers_of(one.model, one.description)[layer].state_dict())
    alphas = dict.fromkeys(names, ALPHA)
    return site_scales(one.description, layer, tensors, one.statistics, alphas, "absmax", dtype)


def folded(one: Made, layer: int, sites: Iterable[Site], scales: dict[str, Tensor]) -> PreTrainedModel:
    """A copy of the model with one layer folded."""
    model = copy.deepcopy(one.model)
    fold_in_place(layers_of(model, one.description)[layer], sites, scales)
    return model


def fold_in_place(module: nn.Module, sites: Iterable[Site], scales: dict[str, Tensor]) -> None:
    module.load_state_dict(fold_layer(dict(module.state_dict()), sites, scales))


@torch.inference_mode()
def change(one: Made, model: PreTrainedModel) -> float:
    """The largest change of a logit, relative to the logits' absmax."""
    return float((model(IDS).logits - one.logits).abs().max() / one.logits.abs().max())


def described(family: str) -> Decoder:
    _, config_class, extra = MODELS[family]
    return decoder(config_class(**{**SIZES, **extra}))


def cases(foldable: bool) -> list[Any]:
    """(family, layer, site) of every tensor of the layers that differ, by whether it can be folded."""
    found = []
    for family in MODELS:
        description = described(family)
        for sites in dict.fromkeys(description.layers):
            layer = description.layers.index(sites)
            found += [
                pytest.param(family, layer, site, id=f"{family}-{layer}.{site.name}")
                for site in sites
                if (site.producer is not None) == foldable
            ]
    return found


def test_every_family_has_a_model() -> None:
    assert {described(family).model_type for family in MODELS} == set(FAMILIES)


@pytest.mark.parametrize(("family", "layer", "site"), cases(foldable=True))
def test_invariance(family: str, layer: int, site: Site) -> None:
    """One tensor folded in one layer: the logits stay, and every linear that reads the tensor was really scaled."""
    one = made(family)
    assert one.statistics[f"layers.{layer}.{site.name}.absmax"].max() > 0, "no token reached it"
    model = folded(one, layer, [site], scales_of(one, layer, [site.name]))
    moved = change(one, model)
    print(f"{family:<13} layer {layer}  {site.name:<15} {moved:.1e}")
    assert moved < TOLERANCE
    old, new = (layers_of(each, one.description)[layer].state_dict() for each in (one.model, model))
    for reader in (*site.readers, *site.high):
        factors = new[f"{reader}.weight"] / old[f"{reader}.weight"]
        assert (factors - 1).abs().median() > 0.05, f"{reader} was not scaled"
    assert site.producer
    touched = {*site.readers, *site.high, site.producer.name}
    assert {name for name in old if not torch.equal(old[name], new[name])} <= {
        f"{name}.{part}" for name in touched for part in ("weight", "bias")
    }


@pytest.mark.parametrize("family", MODELS)
def test_invariance_of_all_folds_together(family: str) -> None:
    """Every layer, every tensor that can be folded, as a checkpoint is folded."""
    moved = change_of_all_folds(made(family))
    print(f"{family:<13} all              {moved:.1e}")
    assert moved < TOLERANCE


def change_of_all_folds(one: Made) -> float:
    model = copy.deepcopy(one.model)
    for layer, module in enumerate(layers_of(model, one.description)):
        sites = [site for site in one.description.sites(layer) if site.producer]
        fold_in_place(module, sites, scales_of(one, layer, [site.name for site in sites]))
    return change(one, model)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"layer_norm_elementwise_affine": False}),
        ("opt", {"enable_bias": False, "word_embed_proj_dim": 16}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
        ("gemma2", {"attn_implementation": "eager", "attn_logit_softcapping": 5.0, "num_key_value_heads": 1}),
        ("phi3", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
        ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 8}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_invariance_of_variants(family: str, more: dict[str, Any]) -> None:
    """What a config of the family may ask for beside the sizes."""
    one = make(family, **more)
    assert one.description.foldable()
    assert change_of_all_folds(one) < TOLERANCE


@pytest.mark.parametrize("family", MODELS)
def test_invariance_of_a_written_checkpoint(family: str, tmp_path: Path) -> None:
    """Folded layers under their stored names: the names that transformers writes, and the logits when it reads them."""
    one, model = made(family), tiny(family, **SMALL)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    description, written = one.description, {}
    for layer, module in enumerate(layers_of(one.model, description)):
        sites = [site for site in description.sites(layer) if site.producer]
        scales = scales_of(one, layer, [site.name for site in sites])
        for name, tensor in fold_layer(dict(module.state_dict()), sites, scales).items():
            turned = tensor.t().contiguous() if description.transposed(layer, name) else tensor
            written[description.stored_name(layer, name)] = turned
    assert set(written) == {name for name in tensors if name.startswith(description.layers_path)}
    assert {name: tensor.shape for name, tensor in written.items()} == {name: tensors[name].shape for name in written}
    save_file(tensors | written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    attention = model.config._attn_implementation
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=attention)
    assert change(one, read) < TOLERANCE


@pytest.mark.parametrize(("family", "layer", "site"), cases(foldable=False))
def test_invariance_is_refused_where_no_fold_exists(family: str, layer: int, site: Site) -> None:
    description = described(family)
    with pytest.raises(UserError) as raised:
        refuse_unfoldable(description, KINDS)
    assert f"{site.kind} of model_type '{description.model_type}' {site.why_not}" in str(raised.value)
    allowed = str(raised.value).rpartition("allowed: ")[2]
    assert allowed == f"[{', '.join(description.foldable())}]"
    assert site.kind not in description.foldable()
    refuse_unfoldable(description, description.foldable())


# Controls: a fold that is wrong, each in the way that somebody got it wrong or easily could.


def find(one: Made, name: str) -> Site:
    return next(site for site in one.description.sites(0) if site.name == name)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_invariance_control_of_the_norm_behind_gemmas_attention(family: str) -> None:
    """It has the name of the norm that feeds Llama's MLP, and feeds the residual stream."""
    one = made(family)
    site = replace(find(one, "gate_up"), producer=Norm("post_attention_layernorm", 1.0))
    assert change(one, folded(one, 0, [site], scales_of(one, 0, ["gate_up"]))) > 0.01


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_invariance_control_of_an_offset_that_is_forgotten(family: str) -> None:
    one = made(family)
    site = replace(find(one, "qkv"), producer=Norm("input_layernorm", 0.0))
    assert change(one, folded(one, 0, [site], scales_of(one, 0, ["qkv"]))) > 0.01


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_invariance_control_of_a_router_that_is_forgotten(family: str) -> None:
    one = made(family)
    site = replace(find(one, "gate_up"), high=())
    assert change(one, folded(one, 0, [site], scales_of(one, 0, ["gate_up"]))) > 0.01


def test_invariance_control_of_the_wrong_rows_of_a_fused_linear() -> None:
    """Gate's instead of up's: the nonlinearity is between them and down_proj."""
    one = made("phi3")
    site = find(one, "down")
    assert isinstance(site.producer, Rows)
    wrong = replace(site, producer=replace(site.producer, first=0))
    assert change(one, folded(one, 0, [wrong], scales_of(one, 0, ["down"]))) > 0.01


def test_invariance_control_of_a_nonlinearity_between() -> None:
    one = made("gpt2")
    site = replace(find(one, "down"), producer=Rows("mlp.c_fc", 0, 48))
    assert change(one, folded(one, 0, [site], scales_of(one, 0, ["down"]))) > 0.01


def test_invariance_control_of_scales_that_differ_inside_a_group_of_query_heads() -> None:
    one = made("llama")
    s_C = smoothing_scale(site_statistics(one.statistics, 0, "o"), ALPHA)
    assert change(one, folded(one, 0, [find(one, "o")], {"o": s_C})) > 0.001


def test_invariance_control_of_a_bias_that_is_forgotten() -> None:
    one = made("opt")
    site = find(one, "qkv")
    model = folded(one, 0, [site], scales_of(one, 0, ["qkv"]))
    assert change(one, model) < TOLERANCE
    layers_of(model, one.description)[0].self_attn_layer_norm.bias.data = layers_of(one.model, one.description)[
        0
    ].self_attn_layer_norm.bias.data.clone()
    assert change(one, model) > 0.01
