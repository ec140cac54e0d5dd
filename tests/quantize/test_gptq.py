"""GPTQ on problems small enough for brute force, with a grid of the test's own (nothing shared with the schemes)."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from oneaxis.quantize.gptq import Moments, gptq, row_errors


@dataclass
class Steps:
    """Whole multiples of `scale`, one for each row and group of columns, from `low` to `high`."""

    scale_OG: Tensor
    low: int
    high: int

    def round_column(self, w_O: Tensor, column: int) -> tuple[Tensor, Tensor]:
        scale_O = self.scale_OG[:, column * self.scale_OG.shape[1] // self.num_columns]
        level_O = (w_O / scale_O).round().clamp(self.low, self.high)
        return level_O.to(torch.int8), level_O * scale_O

    num_columns: int = 1


def problem(num_tokens: int, num_columns: int, num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights [O, I] and inputs [N, I] whose channels depend on each other, as a decoder's do."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.randn(num_columns, num_columns, generator=draw)
    scales = torch.exp(torch.randn(num_columns, generator=draw))
    x_NI = torch.randn(num_tokens, num_columns, generator=draw) @ mixing * scales
    return torch.randn(num_rows, num_columns, generator=draw), x_NI


def steps(weight_OI: Tensor, bits: int, group: int) -> Steps:
    high = 2 ** (bits - 1) - 1
    absmax = weight_OI.unflatten(1, (-1, group)).abs().amax(2)
    return Steps(absmax / high, -high - 1, high, weight_OI.shape[1])


def values(levels: Tensor, grid: Steps) -> Tensor:
    return levels.float() * grid.scale_OG.repeat_interleave(levels.shape[1] // grid.scale_OG.shape[1], dim=1)


def nearest(weight_OI: Tensor, grid: Steps) -> Tensor:
    return torch.stack([grid.round_column(weight_OI[:, c], c)[1] for c in range(weight_OI.shape[1])], 1)


@pytest.mark.parametrize("act_order", [False, True])
def test_close_to_the_best_of_all_roundings(act_order: bool) -> None:
    """Oracle: all 7^5 roundings of each row. Their best is the least there is; plain rounding is far above it."""
    weight, x = problem(40, 5, 24)
    grid = Steps(torch.full((24, 1), 0.9), -3, 3, 5)
    hessian = x.double().T @ x.double()
    levels = gptq(weight, hessian, grid, damping=1e-6, act_order=act_order)
    candidates = torch.tensor(list(product(range(-3, 4), repeat=5))).double() * 0.9
    change = candidates[None] - weight.double()[:, None]
    best = ((change @ x.double().T) ** 2).sum(-1).amin(1)
    found = ((values(levels, grid) - weight).double() @ x.double().T).square().sum(1)
    plain = ((nearest(weight, grid) - weight).double() @ x.double().T).square().sum(1)
    assert (found >= best * (1 - 1e-5)).all()  # Values are float32.
    assert (found <= plain * (1 + 1e-5)).all()
    assert found.sum() < 1.2 * best.sum()
    assert plain.sum() > 1.8 * best.sum()


def test_first_pass_is_least_squares_of_the_rest() -> None:
    """Oracle: when a column is fixed, the best others (unrounded) are those of least squares; a fine grid shows it.

    Only the first column is coarse. What it loses must be taken over by the rest up to their fine steps: the error left
    is the part of the first column that the others cannot express.
    """
    weight, x = problem(60, 6, 16)
    scale = torch.full((16, 6), 1e-4)
    scale[:, 0] = 1.0
    grid = Steps(scale, -(10**6), 10**6, 6)

    class Fine(Steps):
        def round_column(self, w_O: Tensor, column: int) -> tuple[Tensor, Tensor]:
            level_O = (w_O / self.scale_OG[:, column]).round()
            return level_O, level_O * self.scale_OG[:, column]

    fine = Fine(grid.scale_OG, grid.low, grid.high, 6)
    levels = gptq(weight, x.double().T @ x.double(), fine, damping=1e-9, act_order=False)
    lost = (weight[:, 0] - levels[:, 0]).double()
    solution = torch.linalg.lstsq(x[:, 1:].double(), x[:, :1].double()).solution
    unreachable = (x[:, :1].double() - x[:, 1:].double() @ solution).square().sum()
    error = ((values(levels, grid) - weight).double() @ x.double().T).square().sum(1)
    torch.testing.assert_close(error, lost.square() * unreachable, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("num_tokens", [500, 60])
def test_beats_rounding_to_nearest_in_total_and_never_loses_in_a_row(
    bits: int, act_order: bool, num_tokens: int
) -> None:
    """Also with fewer tokens than channels (a singular Hessian), and over more than one block of columns."""
    weight, x = problem(num_tokens, 192, 24, seed=1)
    grid, hessian = steps(weight, bits, 32), x.double().T @ x.double()
    found = values(gptq(weight, hessian, grid, damping=0.01, act_order=act_order), grid)
    rtn = row_errors(weight, nearest(weight, grid), hessian)
    ours = row_errors(weight, found, hessian)
    assert (ours <= rtn * (1 + 1e-9)).all()
    assert ours.sum() < 0.5 * rtn.sum()


def test_independent_channels_are_rounded_to_nearest() -> None:
    """With a diagonal Hessian no column can make up for another: GPTQ is RTN."""
    weight, _ = problem(1, 64, 8)
    grid = steps(weight, 4, 32)
    diagonal = torch.diag(torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(2)).double()))
    levels = gptq(weight, diagonal, grid, damping=0.01, act_order=True)
    torch.testing.assert_close(values(levels, grid), nearest(weight, grid))


def test_channels_without_input_are_rounded_to_nearest() -> None:
    weight, x = problem(200, 64, 8)
    x[:, 5] = x[:, 40] = 0
    grid = steps(weight, 4, 32)
    found = values(gptq(weight, x.double().T @ x.double(), grid, damping=0.01, act_order=True), grid)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, [5, 40]], nearest(weight, grid)[:, [5, 40]])
    silent = values(gptq(weight, torch.zeros(64, 64), grid, damping=0.01, act_order=True), grid)
    torch.testing.assert_close(silent, nearest(weight, grid))


def test_is_the_same_again() -> None:
    weight, x = problem(300, 160, 16)
    hessian = x.double().T @ x.double()
    first, second = (gptq(weight, hessian, steps(weight, 4, 32), damping=0.01, act_order=True) for _ in range(2))
    assert first.equal(second)


def test_shifted_weights_bring_back_the_outputs() -> None:
    """Oracle: least squares of F W^T by X. With X = F they are W, whatever the damping."""
    weight, exact = problem(300, 24, 8)
    seen = exact + 0.1 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(3))
    moments = Moments(24)
    for x, f in zip(seen.split(100), exact.split(100), strict=True):
        moments.add(x[None], f[None])
    assert moments.num_tokens == 300
    torch.testing.assert_close(moments.hessian_II, seen.T @ seen, rtol=1e-5, atol=1e-3)
    wanted = torch.linalg.lstsq(seen.double(), exact.double() @ weight.double().T).solution.T.float()
    torch.testing.assert_close(moments.shifted(weight, 1e-9), wanted, rtol=1e-3, atol=1e-3)
    assert not wanted.allclose(weight, atol=1e-2)
    same = Moments(24)
    same.add(seen)
    torch.testing.assert_close(same.shifted(weight, 0.01), weight, rtol=1e-4, atol=1e-4)
