"""Grids, levels and layers of every scheme: numbers worked by hand, and compressed-tensors as the oracle."""

from typing import Any

import pytest
import torch

from oneaxis.errors import UserError
from oneaxis.quantize.int4 import pack, unpack
from oneaxis.quantize.linears import Grid, check_groups, linear_from, round_weight, weight_grid
from tests.quantize.checkpoints import scheme

SCHEMES = {
    "int8_dynamic": scheme("w8a8_int8_dynamic"),
    "int8_static": scheme("w8a8_int8_static"),
    "fp8": scheme("w8a8_fp8"),
    "w4_symmetric": scheme("w4a16"),
    "w4_asymmetric": scheme("w4a16", symmetric=False),
    "w4_group_64": scheme("w4a16", group_size=64),
}
LIBRARY = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def random_weight(rows: int = 24, columns: int = 128, seed: int = 0) -> torch.Tensor:
    """Rows of different scale; the first group of row 1 is zero, one of row 2 only positive."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight *= torch.logspace(-3, 1, rows)[:, None]
    weight[1, :64] = 0
    weight[2, 64:] = weight[2, 64:].abs() + 1
    return weight


def quantised(weight: torch.Tensor, settings: Any, bias: torch.Tensor | None = None) -> tuple[Grid, Any]:
    grid = weight_grid(weight, settings)
    return grid, linear_from(round_weight(weight, grid), grid, bias, settings, 3.0)


def test_symmetric_int4_by_hand() -> None:
    """absmax 15 in 7.5 steps: 2 a level; 15 / 2 = 7.5 -> 8, clipped to 7; -15 -> -8; 5 / 2 -> 2 (ties to even)."""
    weight = torch.zeros(1, 32)
    weight[0, :5] = torch.tensor([15.0, -15.0, 5.0, -3.1, 0.9])
    grid, linear = quantised(weight, SCHEMES["w4_symmetric"])
    assert grid.scale_OG.tolist() == [[2.0]]
    assert linear.levels[0, :5].tolist() == [7, -8, 2, -2, 0]
    assert linear.weight_values()[0, :5].tolist() == [14, -16, 4, -4, 0]


def test_asymmetric_int4_by_hand() -> None:
    """-1..14 in 15 steps: 1 a level, -1 is level -8, so 0 is level -7 and 14 level 7."""
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([-1.0, 14.0, 3.4, 0.6])
    grid, linear = quantised(weight, SCHEMES["w4_asymmetric"])
    assert grid.scale_OG.tolist() == [[1.0]]
    assert grid.zero_OG is not None
    assert grid.zero_OG.tolist() == [[-7.0]]
    assert linear.levels[0, :5].tolist() == [-8, 7, -4, -6, -7]
    assert linear.weight_values()[0, :5].tolist() == [-1, 14, 3, 1, 0]


def test_fp8_by_hand() -> None:
    """absmax 448 gives the scale 1; E4M3 has 8 steps between powers of two: 17 and 19 lie between 16, 18 and 20."""
    weight = torch.tensor([[448.0, 17.0, 19.0, -0.3, 100.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    grid, linear = quantised(weight, SCHEMES["fp8"])
    assert grid.scale_OG.tolist() == [[1.0], [1.0]]
    # 17 and 19 are ties: to the even mantissa, 16 and 20. 0.3 = 1.2 * 2^-2: 1.25 * 2^-2. 100 = 1.5625 * 2^6: 96 or 104.
    assert linear.weight_values()[0].tolist() == [448, 16, 20, -0.3125, 96]
    assert linear.weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("name", SCHEMES)
def test_levels_values_and_columns_agree(name: str) -> None:
    """A column at a time is the whole at once, and the layer holds the same values."""
    weight, settings = random_weight(), SCHEMES[name]
    grid, linear = quantised(weight, settings)
    levels = round_weight(weight, grid)
    columns = [grid.round_column(weight[:, column], column) for column in range(weight.shape[1])]
    assert torch.stack([level for level, _ in columns], 1).equal(levels)
    assert torch.stack([value for _, value in columns], 1).equal(grid.values(levels))
    assert linear.weight_values().equal(grid.values(levels))
    assert linear.weight_values()[1, :64].eq(0).all()
    assert not linear.weight_values().isnan().any()
    error = (grid.values(levels) - weight).abs() / weight.abs().amax(1, keepdim=True)
    assert error.max() < (0.005 if "int8" in name else 0.04 if name == "fp8" else 0.11)


@pytest.mark.parametrize("name", SCHEMES)
def test_mse_never_loses_more_than_absmax(name: str) -> None:
    weight = random_weight()
    weight[5, 7] *= 8  # An outlier that is worth clipping.
    ranges = [SCHEMES[name].model_copy(update={"weight_range": kind}) for kind in ("absmax", "mse")]
    importance = torch.linspace(0.1, 3, 128)
    for weights_I in (None, importance):
        errors = []
        for settings in ranges:
            grid = weight_grid(weight, settings, importance_I=weights_I)
            squared = (grid.values(grid.levels(weight)) - weight).square()
            squared = squared if weights_I is None else squared * weights_I
            errors.append(squared.unflatten(1, (-1, grid.group_size)).sum(2))
        assert (errors[1] <= errors[0]).all()
        if name.startswith("w4"):
            assert (errors[1] < 0.95 * errors[0]).float().mean() > 0.3


@pytest.mark.parametrize("name", SCHEMES)
def test_forward_is_the_product_with_rounded_weights_and_inputs(name: str) -> None:
    """Oracle: float64, with levels and scales of the inputs written out."""
    bias = torch.linspace(-1, 1, 24)
    _, linear = quantised(random_weight(), SCHEMES[name], bias)
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(3)).double() * 2
    rounded = x
    if name == "int8_dynamic":
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        rounded = (x.float() / scale).round().double() * scale.double()
    elif name == "int8_static":
        rounded = (x.float() / torch.tensor(3 / 127)).round().clamp(-128, 127).double() * 3 / 127
    elif name == "fp8":
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        rounded = (x.float() * (1 / scale)).to(torch.float8_e4m3fn).double() * scale.double()
    expected = rounded @ linear.weight_values().double().T + bias.double()
    torch.testing.assert_close(linear(x.float()).double(), expected, rtol=1e-5, atol=2e-5)
    assert linear(x.bfloat16()).dtype == torch.bfloat16
    assert (linear.in_features, linear.out_features) == (128, 24)


def library_reads(linear: Any, settings: Any) -> torch.Tensor:
    """The weights that compressed-tensors makes of the stored tensors of w4a16, float32."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=library_args(settings))
    return PackedQuantizationCompressor.decompress(linear.stored(), scheme)["weight"].float()


def library_args(settings: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=4, type="int", symmetric=settings.symmetric, strategy="group",
                            group_size=settings.group_size)  # fmt: skip


@LIBRARY
@pytest.mark.parametrize("name", ["w4_symmetric", "w4_asymmetric", "w4_group_64"])
def test_compressed_tensors_unpacks_the_same_weights(name: str) -> None:
    """Oracle: the library's decompression, and its scales from the same range."""
    from compressed_tensors.quantization.utils import calculate_qparams

    settings, weight = SCHEMES[name], random_weight()
    grid, linear = quantised(weight, settings)
    torch.testing.assert_close(library_reads(linear, settings), linear.weight_values(), rtol=2**-8, atol=0)
    assert linear.stored()["weight_shape"].tolist() == [24, 128]
    groups = weight.unflatten(1, (-1, settings.group_size))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), library_args(settings))
    used = groups.abs().amax(2) > 0
    torch.testing.assert_close(grid.scale_OG[used], scale[used], rtol=2**-8, atol=0)


@LIBRARY
def test_packing_is_the_librarys() -> None:
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    levels = torch.randint(-8, 8, (5, 20), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    assert pack(levels).equal(pack_to_int32(levels, 4))
    assert pack(levels.T).T.equal(pack_to_int32(levels, 4, packed_dim=0))
    assert unpack(pack(levels), 20).equal(levels)


def test_a_group_that_does_not_divide_names_what_does() -> None:
    widths = {"model.layers.0.self_attn.q_proj": 576, "model.layers.0.mlp.down_proj": 1536}
    check_groups(widths, SCHEMES["w4_group_64"])
    check_groups(widths, SCHEMES["fp8"])
    with pytest.raises(UserError, match=r"^quantize\.group_size=128: does not divide 576, the input width of "
                       r"model\.layers\.0\.self_attn\.q_proj; allowed: 32, 64$"):  # fmt: skip
        check_groups(widths, scheme("w4a16", group_size=128))
    with pytest.raises(UserError, match=r"allowed: another scheme, or the linear's name in quantize\.ignore"):
        check_groups({"a": 48}, SCHEMES["w4_symmetric"])


@LIBRARY
def test_mse_turns_the_range_of_a_group_whose_largest_weight_is_positive() -> None:
    """Levels reach -8 but only 7: a group on -7..8 steps of 0.5 needs the scale -0.5."""
    weight = torch.arange(-7, 9).repeat(2, 2) * 0.5
    settings = SCHEMES["w4_symmetric"].model_copy(update={"weight_range": "mse"})
    grid = weight_grid(weight, settings)
    assert grid.scale_OG.tolist() == [[-0.5], [-0.5]]
    levels = round_weight(weight, grid)
    assert grid.values(levels).equal(weight)
    linear = linear_from(levels, grid, None, settings)
    assert linear.weight_values().equal(weight)
    assert library_reads(linear, settings).equal(weight)
    assert grid.round_column(weight[:, 15], 15)[1].tolist() == [4.0, 4.0]
