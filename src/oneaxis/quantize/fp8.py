"""FP8 (E4M3): weights per output channel, activations per token at run time, and keys and values of the cache.

E4M3 (`torch.float8_e4m3fn`) has 3 bits of mantissa and reaches 448; what lies beyond is clipped to it. As in vLLM, a
token is multiplied with the reciprocal of its scale `absmax / 448`, which is never less than 1 / (448 * 512).

Dims: B any batch dims, O output channels, I input channels.
"""

import torch
from torch import Tensor, nn

FP8_MAX = 448.0
SMALLEST_SCALE = 1.0 / (FP8_MAX * 512.0)


def to_fp8(x: Tensor) -> Tensor:
    """The nearest E4M3 numbers (ties to even), at most 448 in size."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize_activation(x_BI: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 levels (as float32) [B, I] of activations and the scale per token [B, 1] that undoes them."""
    x_BI = x_BI.float()
    scale_B1 = (x_BI.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE)
    return to_fp8(x_BI * scale_B1.reciprocal()).float(), scale_B1


class Fp8Linear(nn.Module):
    """A linear layer with FP8 weights and activations rounded to FP8 per token, summed in float32."""

    def __init__(self, levels_OI: Tensor, scale_O1: Tensor, bias_O: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = levels_OI.shape
        self.register_buffer("weight", levels_OI)
        self.register_buffer("weight_scale", scale_O1.float())
        self.register_buffer("bias", bias_O)

    def weight_values(self) -> Tensor:
        """The float32 weights that are multiplied with, [O, I]."""
        return self.weight.float() * self.weight_scale

    def forward(self, x_BI: Tensor) -> Tensor:
        """[B, I] -> [B, O], in the dtype of the input."""
        levels_BI, scale_B1 = quantize_activation(x_BI)
        y_BO = nn.functional.linear(levels_BI, self.weight.float()) * (scale_B1 * self.weight_scale.squeeze(1))
        if self.bias is not None:
            y_BO = y_BO + self.bias.float()
        return y_BO.to(x_BI.dtype)

    def stored(self) -> dict[str, Tensor]:
        """The tensors that stand beside the module's name in a checkpoint."""
        return {"weight": self.weight, "weight_scale": self.weight_scale}

    def extra_repr(self) -> str:
        """Shown in `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
