"""Smoothing scales channel by channel: from those of an alpha down the rounding error that they are expected to leave.

One alpha for a tensor ties every channel to its largest value. What rounding costs is another thing: with steps
`d_t = max_c |u_tc| / 127` of token t (u = x / s; static: one step of the calibrated range for all) and
`d_o = max_c |W_oc s_c| / 127` of output o, errors of independent roundings add up to

    sum_t w_t [ d_t^2 sum_c e(u_tc / d_t) s_c^2 ||W_c||^2  +  k sum_o d_o^2 / 12  sum_c u_tc^2 ]

where e(r) = r^2 below half a step, which is rounded to zero, and 1/12 above. w_t = 1 / (||y_t||^2 + median) makes the
errors relative to each token's output, as the norm that follows will; else a few tokens with massive activations are
all that counts. k is what GPTQ leaves of the weights' error. The gradient in log s is followed by Adam for a fixed
number of steps from the scales of alpha; the least found is kept where the real roundings of the sample agree that it
is better. As in OmniQuant (Shao et al., 2023) the scales are learnt, but in closed form: no model is run.

Dims: n sampled tokens, I input channels, O outputs, P parameters (I, or one for each KV head and dimension).
"""

from collections.abc import Collection, Mapping
from typing import Any

import polars as pl
import torch
from torch import Tensor

from oneaxis.config.schema import QuantizeScheme
from oneaxis.quantize.families import Decoder, Heads, Norm
from oneaxis.quantize.int8 import INT8_MAX
from oneaxis.quantize.search import output_mse, sample
from oneaxis.quantize.smooth import per_row, storable_scale
from oneaxis.quantize.statistics import static_absmax, tensor_name

LEARNING_RATE = 0.02
GPTQ_LEAVES = 0.4
"""Of the squared error of INT8 weights by rounding to nearest, as seen on SmolLM2-135M."""
REFINE_SCHEMA = {"layer": pl.Int64, "site": pl.String, "mse_before": pl.Float64, "mse_after": pl.Float64}
"""One row per tensor: mean squared error of its linears' outputs on the sample, all rounded to nearest."""


def refine_scales(
    decoder: Decoder,
    index: int,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    samples: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    settings: QuantizeScheme,
    high: Collection[str],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Better scales [I] for the smoothed tensors of one layer, and the rows (REFINE_SCHEMA) of what it was worth.

    Args:
        tensors: the layer's, by their names inside the layer. statistics, samples: what `calibrate` wrote.
        scales: by the name of the site; a tensor without a sample (an expert that no token reached) keeps its own.
        high: the layer's linears that stay in high precision. dtype: in which norm weights are stored.

    Raises:
        UserError: a sample is missing, or holds NaN or infinity.
    """
    refined, rows = dict(scales), []
    for site in decoder.sites(index):
        if site.name not in scales:
            continue
        name = tensor_name(index, site.name)
        x_nI = sample(samples, name, "quantize.smooth.refine_steps")
        readers = [reader for reader in site.readers if reader not in high]
        if not len(x_nI) or not readers:
            continue
        weight_OI = torch.cat([tensors[f"{reader}.weight"].float() for reader in readers])
        calibrated_I = statistics[f"{name}.absmax"] if settings.kind == "w8a8_int8_static" else None
        weights = GPTQ_LEAVES if settings.rounding == "gptq" else 1.0
        found_I = descend(x_nI, weight_OI, scales[site.name], settings.smooth.refine_steps, heads=site.heads,
                          calibrated_I=calibrated_I, weights=weights)  # fmt: skip
        if isinstance(site.producer, Norm):
            norm_I = tensors[f"{site.producer.name}.weight"]
            found_I = storable_scale(found_I, norm_I, site.producer.offset, dtype)
        before, after = (
            output_mse(x_nI, tensors, readers, scale_I, static_absmax(statistics, name, scale_I), settings, dtype)
            for scale_I in (scales[site.name], found_I)
        )
        if after < before:
            refined[site.name] = found_I
        rows.append(dict(zip(REFINE_SCHEMA, (index, site.name, before, min(before, after)), strict=True)))
    return refined, rows


def descend(
    x_nI: Tensor,
    weight_OI: Tensor,
    scale_I: Tensor,
    steps: int,
    *,
    heads: Heads | None = None,
    calibrated_I: Tensor | None = None,
    weights: float = 1.0,
) -> Tensor:
    """The scales [I] of the least expected error found on the way from `scale_I`.

    Args:
        x_nI: rows of the input, before smoothing. weight_OI: of all that read it.
        heads: scales stay equal in groups of query heads. calibrated_I: static steps, of these ranges; None: per token.
        weights: k of the module's formula.
    """
    # The stages run in inference mode, whose tensors have no gradient.
    with torch.inference_mode(False), torch.enable_grad():
        x_nI, weight_OI, start_I = x_nI.clone(), weight_OI.clone(), scale_I.clone()
        calibrated_I = None if calibrated_I is None else calibrated_I.clone()
        log_P = per_row(start_I, heads).log().clone().requires_grad_()
        adam = torch.optim.Adam([log_P], lr=LEARNING_RATE)
        falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)
        error = _ExpectedError(x_nI, weight_OI, calibrated_I, weights)
        least, best_I = float("inf"), start_I
        for _ in range(steps):
            s_I = _spread(log_P.exp(), heads, len(start_I))
            loss = error.of(s_I)
            if float(loss.detach()) < least:
                least, best_I = float(loss.detach()), s_I.detach()
            adam.zero_grad()
            loss.backward()
            adam.step()
            falling.step()
        return best_I


def _spread(s_P: Tensor, heads: Heads | None, size: int) -> Tensor:
    """One scale for each channel: those of a KV head and dimension for all query heads that it feeds."""
    if heads is None:
        return s_P
    s_K1D = s_P.view(heads.num_kv_heads, 1, heads.head_dim)
    return s_K1D.expand(-1, size // len(s_P), -1).reshape(-1)


class _ExpectedError:
    """The module's formula for one tensor, up to a constant factor."""

    def __init__(self, x_nI: Tensor, weight_OI: Tensor, calibrated_I: Tensor | None, weights: float) -> None:
        energy_n = (x_nI @ weight_OI.T).square().sum(1)
        self._x_nI, self._calibrated_I, self._weights = x_nI, calibrated_I, weights
        self._weight_n = 1 / (energy_n + energy_n.median()).clamp_min(1e-30)
        self._magnitude_OI, self._energy_I = weight_OI.abs(), weight_OI.square().sum(0)

    def of(self, s_I: Tensor) -> Tensor:
        """A scalar with a gradient."""
        u_nI = self._x_nI / s_I
        range_n1 = u_nI.abs().amax(1, keepdim=True) if self._calibrated_I is None else (self._calibrated_I / s_I).max()
        step_n1 = (range_n1 / INT8_MAX).clamp_min(1e-30)
        ratio_nI = u_nI / step_n1
        lost_nI = torch.where(ratio_nI.abs() < 0.5, ratio_nI.square(), 1 / 12)
        inputs_n = ((lost_nI * step_n1.square()) * (s_I.square() * self._energy_I)).sum(1)
        step_O = (self._magnitude_OI * s_I).amax(1) / INT8_MAX
        outputs_n = self._weights * step_O.square().sum() / 12 * u_nI.square().sum(1)
        return ((inputs_n + outputs_n) * self._weight_n).sum()
