"""A layer whose every linear is an `nn.Linear` of its own, so that scales, roundings and errors are the same for all.

transformers keeps the experts of a layer in two 3-D tensors (`gate_up_proj` [E, 2 I, D], `down_proj` [E, D, I]), while
checkpoints and engines hold them one by one. GPT-2's Conv1D is a linear with its weight the other way round.

Dims: E experts, D hidden channels, I inner channels, N tokens, K experts of a token.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)), with the slices of the fused weights, not copies."""

    def __init__(self, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, act_fn: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = _linear(gate_ID), _linear(up_ID), _linear(down_DI)
        self.act_fn = act_fn

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        output: Tensor = self.down_proj(self.act_fn(self.gate_proj(x_ND)) * self.up_proj(x_ND))
        return output


class Experts(nn.ModuleList):
    """The experts of one layer; one that no token is routed to is not run."""

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum over each token's experts, [N, D]."""
        sum_ND = torch.zeros_like(x_ND)
        for index, expert in enumerate(self):
            token, choice = torch.where(experts_NK == index)
            if len(token):
                output = expert(x_ND[token]) * weights_NK[token, choice, None]
                sum_ND.index_add_(0, token, output.to(sum_ND.dtype))
        return sum_ND


def split_experts(layer: nn.Module) -> nn.Module:
    """Replace, in place, fused experts by `Experts` and each Conv1D by an `nn.Linear`; the same maths, on meta too.

    Names inside the layer become `mlp.experts.3.gate_proj`, and so on. The router stays as it is.
    """
    for name, module in list(layer.named_modules()):
        if isinstance(module, Conv1D):
            layer.set_submodule(name, _linear(module.weight.t(), module.bias))
        elif _is_fused(module):
            layer.set_submodule(name, _split(module))
    return layer


def _is_fused(module: Any) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights)


def _split(fused: Any) -> Experts:
    width = fused.down_proj.shape[2]
    assert fused.gate_up_proj.shape[1] == 2 * width, "gate and up lie one after the other, [out, in]"
    return Experts(
        Expert(gate_up[:width], gate_up[width:], down, fused.act_fn)
        for gate_up, down in zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True)
    )


def _linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(*weight_OI.shape[::-1], bias=bias_O is not None, device="meta", dtype=weight_OI.dtype)
    linear.weight = nn.Parameter(weight_OI.detach(), requires_grad=False)
    if bias_O is not None:
        linear.bias = nn.Parameter(bias_O.detach(), requires_grad=False)
    return linear
