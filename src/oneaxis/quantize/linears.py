"""Every weight scheme behind one interface: a grid for a weight, levels on it, and the linear layer they make.

`weight_grid` chooses scales (and zero points) once; rounding to nearest (`round_weight`) and GPTQ, column by column
(`Grid.round_column`), then choose levels on the same grid. `linear_from` makes the layer that computes what an engine
computes, and that knows the tensors it is stored as.

Dims: O output channels, I input channels, G groups of input channels (one of all of them for INT8 and FP8).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from oneaxis.config.schema import QuantizeInt4, QuantizeInt8, QuantizeScheme
from oneaxis.errors import UserError
from oneaxis.quantize import int4, int8
from oneaxis.quantize.fp8 import FP8_MAX, Fp8Linear, to_fp8
from oneaxis.quantize.int4 import Int4Linear
from oneaxis.quantize.int8 import Int8Linear, static_scale

QuantizedLinear = Int8Linear | Int4Linear | Fp8Linear
"""`.in_features`, `.out_features`, `.bias`, `.forward(x)`, `.weight_values() -> [O, I] float32`, `.stored()`."""

Levels = Literal["int8", "int4", "fp8"]

SHRINKS = {"int8": (0.8, 11), "int4": (0.5, 26), "fp8": (0.8, 11)}
"""`weight_range: mse` tries so many ranges, from the whole one down to this share of it."""

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Grid:
    """The values that a weight [O, I] may take: `(level - zero) * scale`."""

    kind: Levels
    scale_OG: Tensor
    """Float32, exactly as stored."""
    zero_OG: Tensor | None
    """Float32 integers -8..7; None: symmetric."""
    group_size: int

    def levels(self, weight_OI: Tensor) -> Tensor:
        """The nearest levels, float32 [O, I]: integers, or E4M3 numbers."""
        groups_OGg = weight_OI.float().unflatten(1, (-1, self.group_size))
        zero_OG1 = None if self.zero_OG is None else self.zero_OG[..., None]
        return _nearest(self.kind, groups_OGg, self.scale_OG[..., None], zero_OG1).flatten(1)

    def values(self, levels_OI: Tensor) -> Tensor:
        """The weights that levels stand for, float32 [O, I]."""
        groups_OGg = levels_OI.float().unflatten(1, (-1, self.group_size))
        if self.zero_OG is not None:
            groups_OGg = groups_OGg - self.zero_OG[..., None]
        return (groups_OGg * self.scale_OG[..., None]).flatten(1)

    def round_column(self, weight_O: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """The nearest levels [O] and their values [O] for weights of one input channel (its place in the weight)."""
        group = column // self.group_size
        scale_O = self.scale_OG[:, group]
        zero_O = None if self.zero_OG is None else self.zero_OG[:, group]
        level_O = _nearest(self.kind, weight_O.float(), scale_O, zero_O)
        return level_O, (level_O if zero_O is None else level_O - zero_O) * scale_O


def _nearest(kind: Levels, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    level = weight / scale
    if kind == "fp8":
        return to_fp8(level).float()
    level = level.round()
    if kind == "int8":
        return level.clamp_(-int8.INT8_MAX, int8.INT8_MAX)
    return (level if zero is None else level.add_(zero)).clamp_(int4.LOWEST, int4.HIGHEST)


def weight_grid(
    weight_OI: Tensor,
    settings: QuantizeScheme,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    importance_I: Tensor | None = None,
) -> Grid:
    """Scales and zero points for a weight, from its range per row, or per row and group (w4a16).

    Symmetric: absmax / 127, absmax / 7.5 (levels -8..7; as compressed-tensors), absmax / 448. Asymmetric: the range
    that holds every weight and 0. A range of zeros gets the scale 1. `weight_range: mse` takes, of a range shrunk step
    by step, the one with the least squared rounding error. Levels -8..7 reach one step further down than up: for w4a16
    `mse` also tries scales whose level -8 is the group's largest weight, negative ones if that is positive.

    Args:
        scale_dtype: that the scales of w4a16 are stored in; those of the others are float32.
        importance_I: weights of the squared errors (the Hessian's diagonal), for `mse`; None: all the same.

    Raises:
        UserError: `group_size` does not divide the input width.
    """
    kind = levels_of(settings)
    group_size = settings.group_size if isinstance(settings, QuantizeInt4) else weight_OI.shape[1]
    symmetric = not isinstance(settings, QuantizeInt4) or settings.symmetric
    if weight_OI.shape[1] % group_size:
        check_groups({"a weight": weight_OI.shape[1]}, settings)
    groups_OGg = weight_OI.float().unflatten(1, (-1, group_size))
    low_OG, high_OG = groups_OGg.amin(dim=2).clamp_max(0), groups_OGg.amax(dim=2).clamp_min(0)

    def shrunk(share: float) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Scales and zero points of ranges shrunk to `share`."""
        if not symmetric:
            scale_OG = _storable((high_OG - low_OG) * share / (int4.HIGHEST - int4.LOWEST), kind, scale_dtype)
            yield scale_OG, (int4.LOWEST - low_OG * share / scale_OG).round().clamp(int4.LOWEST, int4.HIGHEST)
            return
        most = {"int8": int8.INT8_MAX, "int4": 7.5, "fp8": FP8_MAX}[kind]
        yield _storable(torch.maximum(-low_OG, high_OG) * share / most, kind, scale_dtype), None
        if kind == "int4":
            largest_OG = torch.where(high_OG > -low_OG, high_OG, low_OG)
            yield _storable(largest_OG * share / int4.LOWEST, kind, scale_dtype), None

    scale_OG, zero_OG = next(shrunk(1.0))
    if settings.weight_range == "mse":
        importance_Gg = None if importance_I is None else importance_I.float().unflatten(0, (-1, group_size))

        def error(scale_OG: Tensor, zero_OG: Tensor | None) -> Tensor:
            grid = Grid(kind, scale_OG, zero_OG, group_size)
            squared_OGg = (grid.values(grid.levels(weight_OI)) - weight_OI).square().unflatten(1, (-1, group_size))
            return (squared_OGg if importance_Gg is None else squared_OGg * importance_Gg).sum(dim=2)

        least_OG = error(scale_OG, zero_OG)
        for other_OG, other_zero_OG in chain.from_iterable(map(shrunk, torch.linspace(1.0, *SHRINKS[kind]).tolist())):
            error_OG = error(other_OG, other_zero_OG)
            better_OG = error_OG < least_OG
            least_OG = torch.where(better_OG, error_OG, least_OG)
            scale_OG = torch.where(better_OG, other_OG, scale_OG)
            if zero_OG is not None and other_zero_OG is not None:
                zero_OG = torch.where(better_OG, other_zero_OG, zero_OG)
    return Grid(kind, scale_OG, zero_OG, group_size)


def _storable(scale_OG: Tensor, kind: Levels, dtype: torch.dtype) -> Tensor:
    """The scale as it will be read back, 1 where it is zero or too small to be stored."""
    if kind == "int4":
        scale_OG = scale_OG.to(dtype).float()
    return torch.where(scale_OG != 0, scale_OG, torch.ones_like(scale_OG))


def levels_of(settings: QuantizeScheme) -> Levels:
    """What the levels of a scheme's weights are."""
    if isinstance(settings, QuantizeInt8):
        return "int8"
    return "int4" if isinstance(settings, QuantizeInt4) else "fp8"


def round_weight(weight_OI: Tensor, grid: Grid) -> Tensor:
    """Levels [O, I] by rounding each weight to the nearest (RTN)."""
    return grid.levels(weight_OI)


def linear_from(
    levels_OI: Tensor,
    grid: Grid,
    bias_O: Tensor | None,
    settings: QuantizeScheme,
    input_absmax: float | None = None,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedLinear:
    """The linear layer with these weights.

    Args:
        levels_OI: on `grid`. bias_O: float32, or the dtype it is stored in.
        input_absmax: the calibrated largest |x| of its input, which only w8a8_int8_static uses.
        scale_dtype: as in `weight_grid`.
    """
    if isinstance(settings, QuantizeInt8):
        static = settings.kind == "w8a8_int8_static"
        assert not static or input_absmax is not None, "a static scheme needs the range of the input"
        input_scale = static_scale(input_absmax) if static and input_absmax is not None else None
        return Int8Linear(levels_OI.to(torch.int8), grid.scale_OG, bias_O, input_scale)
    if isinstance(settings, QuantizeInt4):
        zero_OG = None if grid.zero_OG is None else grid.zero_OG.to(torch.int8)
        return Int4Linear(levels_OI.to(torch.int8), grid.scale_OG.to(scale_dtype), zero_OG, bias_O)
    return Fp8Linear(to_fp8(levels_OI), grid.scale_OG, bias_O)


def check_groups(widths: Mapping[str, int], settings: QuantizeScheme) -> None:
    """Refuse a `group_size` that does not divide the input width of a linear that is to be quantised.

    Args:
        widths: input width by the linear's name.

    Raises:
        UserError: naming the linear and the sizes that divide every width.
    """
    if not isinstance(settings, QuantizeInt4):
        return
    for name, width in widths.items():
        if width % settings.group_size:
            fits = [size for size in GROUP_SIZES if all(other % size == 0 for other in widths.values())]
            allowed = ", ".join(map(str, fits)) or "another scheme, or the linear's name in quantize.ignore"
            raise UserError(f"quantize.group_size={settings.group_size}: does not divide {width}, "
                            f"the input width of {name}; allowed: {allowed}")  # fmt: skip
