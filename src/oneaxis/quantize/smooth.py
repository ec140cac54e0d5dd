"""SmoothQuant (Xiao et al., 2023): range moves from activations to weights, without changing what the model computes.

    Y = X W = (X diag(s)^-1)(diag(s) W),   s_c = max|X_c|^alpha / max|W_c|^(1 - alpha)

`diag(s)^-1` is folded into what produces the tensor: the RMSNorm weight (qkv, gate_up), the rows of up_proj and its
bias (down; up feeds only the product with act(gate)), the rows of v_proj and its bias (o). With grouped-query attention
one KV head feeds several query heads: their scales are made equal, or the fold would not be exact.

Dims: C channels of a site's tensor, H query heads, K KV heads, D size of a head.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oneaxis.quantize.decoder import NORMS, SITES, Heads


def smoothing_scale(activation_absmax_C: Tensor, weight_absmax_C: Tensor, alpha: float) -> Tensor:
    """s_C as above; 1 for a channel whose activations or weights are all zero, where nothing needs to move."""
    x_C, w_C = activation_absmax_C.double(), weight_absmax_C.double()
    alive_C = (x_C > 0) & (w_C > 0)
    one_C = torch.ones_like(x_C)
    s_C = torch.where(alive_C, x_C, one_C) ** alpha / torch.where(alive_C, w_C, one_C) ** (1 - alpha)
    return torch.where(alive_C, s_C, one_C).float()


def equal_in_groups(s_C: Tensor, heads: Heads) -> Tensor:
    """Scales of o_proj's input with one scale per KV head and dimension: the maximum over the query heads it feeds."""
    s_KGD = s_C.view(heads.num_kv_heads, -1, heads.head_dim)
    return s_KGD.amax(dim=1, keepdim=True).expand_as(s_KGD).reshape(-1)


def storable_scale(s_C: Tensor, norm_C: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales nearest to `s_C` that divide a norm weight into values that `dtype` holds exactly.

    A checkpoint stores norm weights in BF16. Rounding `w / s` would change the model; taking `s = w / bf16(w / s)` as
    the scale instead puts the remainder into the (INT8) weights, whose scales are per channel of the other axis.
    """
    norm_C = norm_C.float()
    stored_C = (norm_C / s_C).to(dtype).float()
    usable_C = (stored_C != 0) & stored_C.isfinite() & (norm_C != 0)
    return torch.where(usable_C, norm_C / torch.where(usable_C, stored_C, torch.ones_like(stored_C)), s_C)


def layer_scales(
    statistics: Mapping[str, Tensor],
    layer: int,
    tensors: Mapping[str, Tensor],
    *,
    alpha: float,
    sites: Sequence[str],
    heads: Heads,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The scales [C] of each of `sites` of one layer.

    Args:
        statistics: what `calibrate` wrote. tensors: the layer's, by their names inside the layer.
        dtype: in which the norm weights will be stored.
    """
    scales = {}
    for site in sites:
        name = f"layers.{layer}.{site}"
        s_C = smoothing_scale(statistics[f"{name}.absmax"], statistics[f"{name}.weight_absmax"], alpha)
        if site == "o":
            s_C = equal_in_groups(s_C, heads)
        if site in NORMS:
            s_C = storable_scale(s_C, tensors[f"{NORMS[site]}.weight"], dtype)
        scales[site] = s_C
    return scales


def fold_layer(tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor], heads: Heads) -> dict[str, Tensor]:
    """The layer's tensors with the scales folded in, float32; what they compute together is unchanged.

    Args:
        tensors: float32, by their names inside the layer (`self_attn.q_proj.weight`, ...).
        scales: site -> s_C; for `o` equal within the groups.
    """
    folded = {name: tensor.float().clone() for name, tensor in tensors.items()}
    for site, s_C in scales.items():
        for linear in SITES[site]:
            folded[f"{linear}.weight"] *= s_C
        if site in NORMS:
            folded[f"{NORMS[site]}.weight"] /= s_C
            continue
        producer = "self_attn.v_proj" if site == "o" else "mlp.up_proj"
        rows = s_C.view(heads.num_kv_heads, -1, heads.head_dim)[:, 0].reshape(-1) if site == "o" else s_C
        folded[f"{producer}.weight"] /= rows[:, None]
        if f"{producer}.bias" in folded:
            folded[f"{producer}.bias"] /= rows
    return folded
