"""alpha of every smoothed tensor: the fixed one, that of its site, or (`auto`) the one with the least output error.

    mse(alpha) = mean |linear_q(x / s) - x W^T|^2 over the sampled tokens and all outputs of the linears that read x,
    s = s(alpha) as folded and stored, linear_q with weights and activations rounded as the scheme says

x are the rows that `calibrate` kept of the tensor, a static scale is that of the calibrated range: nothing is run
through the model. Weights are rounded to nearest here, whatever `quantize.rounding` is: GPTQ would need a Hessian for
every alpha. The search is local, as in AWQ (Lin et al., 2023): the input is the unquantised model's.

Dims: n sampled tokens, I input channels, O outputs.
"""

from collections.abc import Collection, Mapping
from typing import Any

import polars as pl
import torch
from torch import Tensor

from oneaxis.config.schema import QuantizeScheme
from oneaxis.errors import UserError
from oneaxis.quantize.families import Decoder
from oneaxis.quantize.linears import linear_from, round_weight, weight_grid
from oneaxis.quantize.smooth import site_scales
from oneaxis.quantize.statistics import require_finite, static_absmax, tensor_name

SEARCH_SCHEMA = {
    "layer": pl.Int64,
    "site": pl.String,
    "alpha": pl.Float64,
    "mse": pl.Float64,
    "chosen": pl.Boolean,
}
"""One row per tensor and alpha that was tried; mse in squared units of the linears' output, null without a sample."""


@torch.inference_mode()
def layer_alphas(
    decoder: Decoder,
    index: int,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    samples: Mapping[str, Tensor],
    settings: QuantizeScheme,
    high: Collection[str],
    dtype: torch.dtype,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """alpha of each tensor of one layer that is smoothed, and the rows (SEARCH_SCHEMA) of what was tried.

    A tensor is smoothed when its kind is among `smooth.sites`, something can be divided by its scales, and a linear
    that reads it is quantised: where nothing is rounded, nothing is gained.

    Args:
        tensors: the layer's, by their names inside the layer. statistics, samples: what `calibrate` wrote.
        high: the layer's linears that stay in high precision. dtype: in which norm weights are stored.

    Raises:
        UserError: the statistics hold NaN or infinity; or, with `auto`, so does a sample, or it is missing.
    """
    require_finite(statistics, "artifacts/calibrate/stats.safetensors")
    smooth = settings.smooth
    alphas: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for site in decoder.sites(index):
        quantized = [name for name in site.readers if name not in high and name not in site.high]
        if site.kind not in smooth.sites or site.producer is None or not quantized:
            continue
        fixed = getattr(smooth.site_alpha, site.kind)
        fixed = smooth.alpha if fixed is None else fixed
        if fixed != "auto":
            alphas[site.name] = float(fixed)
            continue
        name = tensor_name(index, site.name)
        x_nI = sample(samples, name, "quantize.smooth.alpha=auto")
        tried = []
        for alpha in smooth.grid:
            scales = site_scales(decoder, index, tensors, statistics, {site.name: alpha}, smooth.formula, dtype)
            scale_I = scales[site.name]
            absmax = static_absmax(statistics, name, scale_I)
            tried.append(output_mse(x_nI, tensors, quantized, scale_I, absmax, settings, dtype) if len(x_nI) else None)
        # The first of equals: a tensor without a sample takes the first of the grid.
        best = min(range(len(tried)), key=lambda each: tried[each] or 0.0)
        alphas[site.name] = smooth.grid[best]
        rows += [
            dict(zip(SEARCH_SCHEMA, (index, site.name, alpha, mse, each == best), strict=True))
            for each, (alpha, mse) in enumerate(zip(smooth.grid, tried, strict=True))
        ]
    return alphas, rows


def output_mse(
    x_nI: Tensor,
    tensors: Mapping[str, Tensor],
    readers: Collection[str],
    scale_I: Tensor,
    input_absmax: float,
    settings: QuantizeScheme,
    dtype: torch.dtype,
) -> float:
    """Mean squared error of the outputs of all `readers` when they are smoothed by `scale_I` and rounded.

    Args:
        x_nI: rows of their input, before smoothing. input_absmax: of all calibrated tokens, after smoothing.
        dtype: in which the scales of w4a16 are stored.
    """
    smoothed_nI = x_nI / scale_I
    error, count = 0.0, 0
    for name in readers:
        weight_OI = tensors[f"{name}.weight"].float()
        scaled_OI = weight_OI * scale_I
        grid = weight_grid(scaled_OI, settings, scale_dtype=dtype)
        levels_OI = round_weight(scaled_OI, grid)
        rounded = linear_from(levels_OI, grid, None, settings, input_absmax, scale_dtype=dtype)
        change_nO = rounded(smoothed_nI) - x_nI @ weight_OI.T
        error += float(change_nO.double().square().sum())
        count += change_nO.numel()
    return error / count


def sample(samples: Mapping[str, Tensor], name: str, wanted_by: str) -> Tensor:
    """The sampled rows [n, I] of a tensor, float32.

    Raises:
        UserError: there is none, which the setting `wanted_by` needs; or it holds NaN or infinity.
    """
    if name not in samples:
        raise UserError(f"artifacts/calibrate/samples.safetensors: no {name}, which {wanted_by} needs; "
                        "allowed: the samples of the policy, which `dvc repro` makes")  # fmt: skip
    require_finite({name: samples[name]}, "artifacts/calibrate/samples.safetensors")
    return samples[name].float()
