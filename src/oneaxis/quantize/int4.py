"""Weights of 4 bits with a scale (and a zero point) per group of input channels; activations stay as they are (W4A16).

Levels are -8..7, a weight is `(level - zero) * scale`. Stored as compressed-tensors' `pack-quantized`: eight levels,
each plus 8, in an int32, the first in its lowest bits; levels packed along the input, zero points along the output.
An engine keeps the scales in the dtype it computes in, so levels must be chosen with the scale as it is stored.

Dims: B any batch dims, O output channels, I input channels, G groups of input channels.
"""

import torch
from torch import Tensor, nn

LOWEST, HIGHEST = -8, 7
PER_INT32 = 8
_SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def pack(levels_RC: Tensor) -> Tensor:
    """Levels [R, C] of int8 -> int32 [R, ceil(C / 8)]; what is missing to a whole int32 is filled with zero bits."""
    levels_RC = nn.functional.pad(levels_RC.to(torch.int32) - LOWEST, (0, -levels_RC.shape[1] % PER_INT32))
    return (levels_RC.unflatten(1, (-1, PER_INT32)) << _SHIFTS).sum(dim=2, dtype=torch.int32)


def unpack(packed_RP: Tensor, num_columns: int) -> Tensor:
    """The reverse of `pack`: int8 [R, num_columns]."""
    levels_RC = ((packed_RP[..., None] >> _SHIFTS) & 15).flatten(1)[:, :num_columns] + LOWEST
    return levels_RC.to(torch.int8)


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights, multiplied in float32 with activations that are not rounded."""

    def __init__(self, levels_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, bias_O: Tensor | None):
        """`levels_OI` and `zero_OG` are int8; `scale_OG` has the dtype it is stored in."""
        super().__init__()
        self.out_features, self.in_features = levels_OI.shape
        self.register_buffer("levels", levels_OI)
        self.register_buffer("weight_scale", scale_OG)
        self.register_buffer("zero", zero_OG)
        self.register_buffer("bias", bias_O)

    def weight_values(self) -> Tensor:
        """The float32 weights that are multiplied with, [O, I]."""
        levels_OGg = self.levels.float().unflatten(1, (self.weight_scale.shape[1], -1))
        if self.zero is not None:
            levels_OGg = levels_OGg - self.zero.float()[..., None]
        return (levels_OGg * self.weight_scale.float()[..., None]).flatten(1)

    def forward(self, x_BI: Tensor) -> Tensor:
        """[B, I] -> [B, O], in the dtype of the input."""
        bias_O = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x_BI.float(), self.weight_values(), bias_O).to(x_BI.dtype)

    def stored(self) -> dict[str, Tensor]:
        """The tensors that stand beside the module's name in a checkpoint."""
        tensors = {
            "weight_packed": pack(self.levels),
            "weight_scale": self.weight_scale,
            "weight_shape": torch.tensor(self.levels.shape),
        }
        if self.zero is not None:
            tensors["weight_zero_point"] = pack(self.zero.T).T.contiguous()
        return tensors

    def extra_repr(self) -> str:
        """Shown in `print(model)`."""
        group_size = self.in_features // self.weight_scale.shape[1]
        kind = "symmetric" if self.zero is None else "asymmetric"
        return f"in_features={self.in_features}, out_features={self.out_features}, group_size={group_size}, {kind}"
