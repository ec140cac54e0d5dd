"""INT8 rounding on numbers worked by hand, and the linear layer against float64 arithmetic."""

import torch

from oneaxis.quantize.int8 import (
    Int8Linear,
    dequantize_weight,
    quantize_activation,
    quantize_weight,
    static_scale,
)


def test_weights_have_one_scale_per_output_channel() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.0149], [0.0, 0.0, 0.0], [-254.0, 3.0, 5.0]])
    levels, scale = quantize_weight(weight)
    # Row 0: 0.01 a level: 127, -63.4, 1.49. Row 2: 2 a level: -127, 1.5 and 2.5, whose ties go to the even level.
    assert levels.tolist() == [[127, -63, 1], [0, 0, 0], [-127, 2, 2]]
    torch.testing.assert_close(scale, torch.tensor([[0.01], [1.0], [2.0]]))
    assert levels.dtype == torch.int8
    torch.testing.assert_close(dequantize_weight(levels, scale)[2], torch.tensor([-254.0, 4.0, 4.0]))


def test_dynamic_activations_have_one_scale_per_token() -> None:
    levels, scale = quantize_activation(torch.tensor([[[12.7, -0.16], [0.0, 0.0]], [[-1.0, 1.27], [2.54, 0.03]]]))
    torch.testing.assert_close(scale, torch.tensor([[[0.1], [1e-12]], [[0.01], [0.02]]]))
    assert levels.tolist() == [[[127, -2], [0, 0]], [[-100, 127], [127, 2]]]


def test_static_activations_share_a_scale_and_are_clipped() -> None:
    scale = static_scale(2.54)
    levels, same = quantize_activation(torch.tensor([[0.05, 2.54, 2.6, -2.56, -9.0]]), scale)
    assert levels.tolist() == [[2, 127, 127, -128, -128]]
    assert same is scale
    assert scale.shape == (1,)


def test_a_tensor_that_was_always_zero_has_a_usable_static_scale() -> None:
    levels, scale = quantize_activation(torch.zeros(1, 3), static_scale(0.0))
    assert levels.tolist() == [[0, 0, 0]]
    assert scale > 0


def test_linear_is_integer_arithmetic_scaled_back() -> None:
    """Oracle: int64 sums and float64 scales in numpy."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(7, 300, generator=generator), torch.randn(7, generator=generator)
    x = torch.randn(2, 5, 300, generator=generator) * 4
    levels, scale = quantize_weight(weight)
    for input_scale in (None, static_scale(3.0)):
        y = Int8Linear(levels, scale, bias, input_scale)(x)
        x64 = x.double().numpy()
        x_scale = abs(x64).max(-1, keepdims=True) / 127 if input_scale is None else 3.0 / 127
        x_levels = (x64 / x_scale).round().clip(-128, 127).astype("int64")
        sums = x_levels @ levels.numpy().astype("int64").T
        expected = sums * x_scale * scale.double().numpy().T + bias.double().numpy()
        torch.testing.assert_close(y.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-4)


def test_linear_answers_in_the_dtype_it_is_asked_in() -> None:
    layer = Int8Linear(*quantize_weight(torch.eye(4)), None, None)
    assert layer(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
