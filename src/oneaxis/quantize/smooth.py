"""SmoothQuant (Xiao et al., 2023): range moves from activations to weights, without changing what the model computes.

    Y = X W = (X diag(s)^-1)(diag(s) W),   s_c = max|X_c|^alpha / max|W_c|^(1 - alpha)

`diag(s)^-1` is folded into what produces the tensor: the weight (and bias) of the norm before it, the rows of up_proj
and its bias (down; up feeds only the product with act(gate)), the rows of v_proj and its bias (o). With grouped-query
attention one KV head feeds several query heads: their scales are made equal, or the fold would not be exact. A router
reads the same tensor as its experts: its columns are scaled too.

Dims: C channels of a site's tensor, K KV heads, G query heads of a group, D size of a head.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from oneaxis.errors import UserError
from oneaxis.quantize.families import Decoder, Heads, Norm, Rows, Site

Formula = Literal["absmax", "range"]


def refuse_unfoldable(description: Decoder, kinds: Iterable[str]) -> None:
    """Refuse `quantize.smooth.sites` that this family cannot fold.

    Raises:
        UserError: which, why, and which are allowed.
    """
    allowed, wanted = description.foldable(), list(kinds)
    reasons = {site.kind: site.why_not for sites in description.layers for site in sites if not site.producer}
    if refused := [kind for kind in wanted if kind in reasons]:
        because = ", and ".join(f"{kind} of model_type {description.model_type!r} {reasons[kind]}" for kind in refused)
        raise UserError(f"quantize.smooth.sites=[{', '.join(wanted)}]: {because}; allowed: [{', '.join(allowed)}]")


def smoothing_scale(statistics: Mapping[str, Tensor], alpha: float, formula: Formula = "absmax") -> Tensor:
    """s_C of one tensor; 1 for a channel whose activations or weights are all zero, where nothing needs to move.

    Args:
        statistics: of one tensor, [C] each: absmax, weight_absmax, and for `range` min and max.
        formula: `absmax` as above; `range`: llm-compressor's (max - min)^alpha / (2 max|W|)^(1 - alpha), equal to the
            first but for one factor where a channel's range is symmetric.
    """
    if formula == "absmax":
        x_C, w_C = statistics["absmax"].double(), statistics["weight_absmax"].double()
    else:
        x_C, w_C = statistics["max"].double() - statistics["min"].double(), 2 * statistics["weight_absmax"].double()
    # A tensor that no calibration token reached (an expert) has the empty range, -inf.
    alive_C = (x_C > 0) & (w_C > 0)
    one_C = torch.ones_like(x_C)
    s_C = torch.where(alive_C, x_C, one_C) ** alpha / torch.where(alive_C, w_C, one_C) ** (1 - alpha)
    return torch.where(alive_C, s_C, one_C).float()


def equal_in_groups(s_C: Tensor, heads: Heads) -> Tensor:
    """Scales of o_proj's input with one scale per KV head and dimension: the maximum over the query heads it feeds."""
    s_KGD = s_C.view(heads.num_kv_heads, -1, heads.head_dim)
    return s_KGD.amax(dim=1, keepdim=True).expand_as(s_KGD).reshape(-1)


def storable_scale(s_C: Tensor, norm_C: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """The scales nearest to `s_C` that divide a norm weight into values that `dtype` holds exactly.

    A checkpoint stores norm weights in BF16. Rounding `w / s` would change the model; taking `s = w / bf16(w / s)` as
    the scale instead puts the remainder into the quantised weights, whose scales are per channel of the other axis.
    With an offset, as Gemma has, `w` is `offset + w`. A channel that would be stored as zero or infinite is left alone.

    Args:
        norm_C: the weight as stored.
    """
    weight_C = offset + norm_C.double()
    stored_C = offset + (weight_C / s_C.double() - offset).to(dtype).double()
    usable_C = (stored_C != 0) & stored_C.isfinite()
    exact_C = torch.where(usable_C, weight_C / torch.where(usable_C, stored_C, 1.0), 1.0).float()
    return torch.where(weight_C != 0, exact_C, s_C)  # A zero stays a zero under any scale.


def site_scales(
    description: Decoder,
    layer: int,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    alphas: Mapping[str, float],
    formula: Formula,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The scales [C] of a layer's tensors, by the names of their sites.

    Args:
        tensors: the layer's, by their names inside the layer. statistics: what `calibrate` wrote.
        alphas: by the name of the site; one that is not in it is not smoothed.
        dtype: in which the norm weights will be stored.
    """
    scales = {}
    for site in description.sites(layer):
        if site.name not in alphas:
            continue
        s_C = smoothing_scale(site_statistics(statistics, layer, site.name), alphas[site.name], formula)
        if site.heads:
            s_C = equal_in_groups(s_C, site.heads)
        if isinstance(site.producer, Norm):
            s_C = storable_scale(s_C, tensors[f"{site.producer.name}.weight"], site.producer.offset, dtype)
        scales[site.name] = s_C
    return scales


def site_statistics(statistics: Mapping[str, Tensor], layer: int, site: str) -> dict[str, Tensor]:
    """Those of one tensor, by their own names (`absmax`, ...)."""
    names = ("absmax", "min", "max", "weight_absmax")
    return {name: statistics[f"layers.{layer}.{site}.{name}"] for name in names}


def fold_layer(tensors: Mapping[str, Tensor], sites: Iterable[Site], scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layer's tensors with the scales folded in, float32; what they compute together is unchanged.

    Args:
        tensors: by their names inside the layer (`self_attn.q_proj.weight`, ...), linears as [out, in].
        sites: of the layer. scales: s_C by the name of the site; for `o` equal within the groups.
    """
    folded = {name: tensor.float().clone() for name, tensor in tensors.items()}
    for site in sites:
        if site.name not in scales:
            continue
        s_C = scales[site.name]
        for reader in (*site.readers, *site.high):
            folded[f"{reader}.weight"] *= s_C
        if isinstance(site.producer, Norm):
            weight, bias, offset = f"{site.producer.name}.weight", f"{site.producer.name}.bias", site.producer.offset
            folded[weight] = ((offset + folded[weight].double()) / s_C.double() - offset).float()
            if bias in folded:
                folded[bias] /= s_C
            continue
        assert site.producer is not None, f"{site.name}: {site.why_not}"
        _divide_rows(folded, site.producer, per_row(s_C, site.heads))
    return folded


def per_row(s_C: Tensor, heads: Heads | None) -> Tensor:
    """One scale per row of the producer: for attention, that of the first query head of each group."""
    return s_C if heads is None else s_C.view(heads.num_kv_heads, -1, heads.head_dim)[:, 0].reshape(-1)


def _divide_rows(folded: dict[str, Tensor], rows: Rows, s_R: Tensor) -> None:
    part = slice(rows.first, rows.first + rows.count)
    folded[f"{rows.name}.weight"][part] /= s_R[:, None]
    if f"{rows.name}.bias" in folded:
        folded[f"{rows.name}.bias"][part] /= s_R
