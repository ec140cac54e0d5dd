"""Symmetric INT8 of weights and activations, and a linear layer that computes what an INT8 engine computes.

Weights: one scale per output channel, `absmax / 127`, rounded to nearest (RTN, ties to even). Activations: one scale
per token, `absmax / 127`, taken at run time (dynamic), or one calibrated scale for the whole tensor (static), in which
case values beyond it are clipped. The product of the integers is scaled back by both: `y = (x_q W_q^T) * s_x * s_w`.

Dims: B any batch dims, O output channels, I input channels.
"""

import torch
from torch import Tensor, nn

INT8_MAX = 127
INT8_MIN = -128
"""Weights use -127..127 only; a static activation beyond the calibrated range is clipped to -128..127, as in vLLM."""

SMALLEST_SCALE = 1e-12
"""A channel or tensor that was zero throughout has no range; any positive scale reproduces its zeros."""


def quantize_weight(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 weights [O, I] and their float32 scales [O, 1]; a row of zeros gets the scale 1."""
    weight_OI = weight_OI.float()
    absmax_O1 = weight_OI.abs().amax(dim=1, keepdim=True)
    scale_O1 = torch.where(absmax_O1 > 0, absmax_O1 / INT8_MAX, torch.ones_like(absmax_O1))
    levels_OI = (weight_OI / scale_O1).round().clamp(-INT8_MAX, INT8_MAX)
    return levels_OI.to(torch.int8), scale_O1


def dequantize_weight(levels_OI: Tensor, scale_O1: Tensor) -> Tensor:
    """The float32 weights that the integers stand for, [O, I]."""
    return levels_OI.float() * scale_O1.float()


def static_scale(absmax: float) -> Tensor:
    """The per-tensor activation scale [1] whose level 127 is `absmax`."""
    return torch.tensor([max(absmax / INT8_MAX, SMALLEST_SCALE)], dtype=torch.float32)


def quantize_activation(x_BI: Tensor, scale_1: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Integer levels (as float32) of activations and the scale that undoes them.

    Args:
        x_BI: activations.
        scale_1: the static scale [1]; None takes one per token from the data.

    Returns:
        levels [B, I] and scales, [B, 1] or [1].
    """
    x_BI = x_BI.float()
    if scale_1 is None:
        scale = (x_BI.abs().amax(dim=-1, keepdim=True) / INT8_MAX).clamp_min(SMALLEST_SCALE)
        return (x_BI / scale).round(), scale
    return (x_BI / scale_1).round().clamp(INT8_MIN, INT8_MAX), scale_1


class Int8Linear(nn.Module):
    """A linear layer with INT8 weights and activations that are rounded to INT8 levels, summed in float32.

    An engine sums in int32, exactly; float32 is exact up to sums of 2^24 and off by at most 1e-7 relative beyond.
    """

    def __init__(self, levels_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None, input_scale_1: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = levels_OI.shape
        self.register_buffer("weight", levels_OI)
        self.register_buffer("weight_scale", scale_O1.float())
        self.register_buffer("bias", bias_O)
        self.register_buffer("input_scale", None if input_scale_1 is None else input_scale_1.float())

    def forward(self, x_BI: Tensor) -> Tensor:
        """[B, I] -> [B, O], in the dtype of the input."""
        levels_BI, scale = quantize_activation(x_BI, self.input_scale)
        y_BO = nn.functional.linear(levels_BI, self.weight.float()) * (scale * self.weight_scale.squeeze(1))
        if self.bias is not None:
            y_BO = y_BO + self.bias.float()
        return y_BO.to(x_BI.dtype)

    def weight_values(self) -> Tensor:
        """The float32 weights that are multiplied with, [O, I]."""
        return dequantize_weight(self.weight, self.weight_scale)

    def stored(self) -> dict[str, Tensor]:
        """The tensors that stand beside the module's name in a checkpoint."""
        tensors = {"weight": self.weight, "weight_scale": self.weight_scale}
        return tensors if self.input_scale is None else {**tensors, "input_scale": self.input_scale}

    def extra_repr(self) -> str:
        """Shown in `print(model)`."""
        kind = "per token" if self.input_scale is None else "static"
        return f"in_features={self.in_features}, out_features={self.out_features}, activations={kind}"
