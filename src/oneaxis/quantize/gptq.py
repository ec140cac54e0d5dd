"""GPTQ (Frantar et al., 2022): weights are rounded so that the layer's output changes least, not the weights.

Over inputs X [n, I] a linear's output changes by (Q - W) X^T, whose squared norm is tr((Q - W) H (Q - W)^T) with the
Hessian H = X^T X. Columns are rounded one after another; what a column loses, the columns still to come take over as
well as H allows. Then each level in turn is set to its best value with all others held (coordinate descent, as in QuIP
and CDQuant), which can only lower the same error; a row that rounding to nearest would serve better keeps that.

The input that a linear gets once what comes before it is rounded (X; activations rounded as the scheme says) is not the
one that it had (F). Asking for Q X^T near W F^T instead of W X^T repairs what came before: completing the square, it is
the same problem with the target W* = W (F^T X) (X^T X)^-1. (GPTAQ, Li et al., 2025, has the same aim, and approaches it
column by column.) `Moments` gathers both matrices.

Grids (scales, zero points) are given and stay: with `act_order` the columns are taken by falling diagonal of H, while
each keeps the scale of the group that it stands in ("static groups"). A column that no input reached has no say in H
and is rounded to nearest.

Dims: O output channels, I input channels, N tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128
"""Columns whose updates to the rest are applied in one product."""
SWEEPS = 2
"""Passes of coordinate descent; further ones change almost nothing."""


class ColumnGrid(Protocol):
    """What GPTQ needs of a grid (`oneaxis.quantize.linears.Grid`)."""

    def round_column(self, w_O: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """Levels and the values that they stand for, of weights in one input column."""


@dataclass
class Moments:
    """Sums over tokens of what a linear reads: H = X^T X and (F - X)^T X, the drift; float32."""

    size: int
    hessian_II: Tensor = field(init=False)
    drift_II: Tensor | None = None
    """None: the inputs are the same."""
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.hessian_II = torch.zeros(self.size, self.size)

    def add(self, x_NI: Tensor, exact_NI: Tensor | None = None) -> None:
        """Take in inputs as they are after rounding, and those of the same tokens without it."""
        x_NI = x_NI.detach().float().flatten(0, -2)
        self.hessian_II += x_NI.T @ x_NI
        self.num_tokens += len(x_NI)
        if exact_NI is not None:
            if self.drift_II is None:
                self.drift_II = torch.zeros(self.size, self.size)
            self.drift_II += (exact_NI.detach().float().flatten(0, -2) - x_NI).T @ x_NI

    def shifted(self, weight_OI: Tensor, damping: float) -> Tensor:
        """W* [O, I]: the weights that bring the outputs without rounding out of the inputs after it.

        W + W (F - X)^T X (X^T X)^-1, damped as the Hessian is.
        """
        if self.drift_II is None:
            return weight_OI
        hessian_II = self.hessian_II.double()
        factor_II = torch.linalg.cholesky(hessian_II + torch.diag(_ridge(hessian_II, damping)))
        wanted_OI = (weight_OI.float() @ self.drift_II).double()
        return weight_OI + torch.cholesky_solve(wanted_OI.T, factor_II).T.float()


def gptq(weight_OI: Tensor, hessian_II: Tensor, grid: ColumnGrid, *, damping: float, act_order: bool) -> Tensor:
    """Levels [O, I] of `weight_OI` on `grid`, in the dtype that the grid gives levels in.

    Args:
        weight_OI: float32. hessian_II: X^T X, symmetric, positive semidefinite.
        damping: added to the Hessian's diagonal, as a share of its mean.

    The error under `hessian_II` of each row is at most that of rounding to nearest.
    """
    weight_OI, hessian_II = weight_OI.float(), hessian_II.double()
    nearest = _each_column(lambda column: grid.round_column(weight_OI[:, column], column), weight_OI.shape[1])
    damped_II = hessian_II + torch.diag(_ridge(hessian_II, damping))
    found = _descend(weight_OI, damped_II, grid, _rounded_in_turn(weight_OI, damped_II, grid, act_order))
    worse_O = row_errors(weight_OI, found[1], hessian_II) > row_errors(weight_OI, nearest[1], hessian_II)
    return torch.where(worse_O[:, None], nearest[0], found[0])


def row_errors(weight_OI: Tensor, value_OI: Tensor, hessian_II: Tensor) -> Tensor:
    """Squared change of each output [O] summed over the tokens of the Hessian, when `value` stands for `weight`."""
    change_OI = (value_OI - weight_OI).double()
    return ((change_OI @ hessian_II.double()) * change_OI).sum(1)


def _ridge(hessian_II: Tensor, damping: float) -> Tensor:
    """What is added to the diagonal [I]; a column without input gets 1, so that it stands alone."""
    diagonal_I = hessian_II.diagonal()
    alive_I = diagonal_I > 0
    mean = float(diagonal_I[alive_I].mean()) if alive_I.any() else 1.0
    return torch.where(alive_I, torch.full_like(diagonal_I, damping * mean), torch.ones_like(diagonal_I))


def _rounded_in_turn(weight_OI: Tensor, damped_II: Tensor, grid: ColumnGrid, act_order: bool) -> tuple[Tensor, Tensor]:
    """GPTQ's pass: levels and values [O, I].

    The rows of U, the upper Cholesky factor of H^-1, say how the columns to come take over a loss: by
    (w_j - q_j) U_jk / U_jj.
    """
    num_columns = len(damped_II)
    order_I = torch.argsort(damped_II.diagonal(), descending=True, stable=True) if act_order else None
    order = list(range(num_columns)) if order_I is None else order_I.tolist()
    rest_OI = weight_OI.clone() if order_I is None else weight_OI[:, order_I]
    ordered_II = damped_II if order_I is None else damped_II[order_I][:, order_I]
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(ordered_II))
    upper_II = torch.linalg.cholesky(inverse_II, upper=True).float()
    found: list[tuple[Tensor, Tensor]] = [(rest_OI, rest_OI)] * num_columns
    for start in range(0, num_columns, BLOCK):
        end = min(start + BLOCK, num_columns)
        block_BO, lost_BO = rest_OI[:, start:end].T.contiguous(), torch.zeros(end - start, len(weight_OI))
        for i in range(start, end):
            w_O = block_BO[i - start]
            found[order[i]] = grid.round_column(w_O, order[i])
            lost_BO[i - start] = (w_O - found[order[i]][1]) / upper_II[i, i]
            block_BO[i - start + 1 :] -= upper_II[i, i + 1 : end, None] * lost_BO[i - start]
        rest_OI[:, end:] -= lost_BO.T @ upper_II[start:end, end:]
    return _each_column(lambda column: found[column], num_columns)


def _descend(
    weight_OI: Tensor, damped_II: Tensor, grid: ColumnGrid, found: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Coordinate descent from levels and values: with all other columns held, each column's error is a parabola."""
    hessian_II = damped_II.float()
    levels_IO, values_IO = found[0].T.contiguous(), found[1].T.contiguous()
    for _ in range(SWEEPS):
        slope_IO = hessian_II @ (values_IO - weight_OI.T)
        for start in range(0, len(hessian_II), BLOCK):
            end = min(start + BLOCK, len(hessian_II))
            moved_BO = torch.zeros(end - start, len(weight_OI))
            slope_BO = slope_IO[start:end]
            for i in range(start, end):
                best_O = values_IO[i] - slope_BO[i - start] / hessian_II[i, i]
                level_O, value_O = grid.round_column(best_O, i)
                moved_BO[i - start] = value_O - values_IO[i]
                levels_IO[i], values_IO[i] = level_O, value_O
                slope_BO += hessian_II[start:end, i, None] * moved_BO[i - start]
            slope_IO[end:] += hessian_II[end:, start:end] @ moved_BO
    return levels_IO.T.contiguous(), values_IO.T.contiguous()


def _each_column(rounded: Callable[[int], tuple[Tensor, Tensor]], num_columns: int) -> tuple[Tensor, Tensor]:
    levels, values = zip(*(rounded(column) for column in range(num_columns)), strict=True)
    return torch.stack(levels, dim=1), torch.stack(values, dim=1)
