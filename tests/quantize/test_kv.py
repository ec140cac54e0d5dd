"""The FP8 cache: numbers by hand, and every E4M3 number against torch's own conversion."""

import torch

from oneaxis.quantize.kv import ATTENTION, cut_to_fp8, kv_rounding, kv_scale, round_kv
from tests.quantize.models import tiny, token_ids


def test_scale_and_clipping_by_hand() -> None:
    """absmax 896 = 448 levels of 2. 17 and 19 lie between the E4M3 numbers 16, 18 and 20."""
    scale = kv_scale(896.0)
    assert scale.tolist() == [2.0]
    x = torch.tensor([896.0, 2000.0, -2000.0, 34.0, 38.0, 0.0])
    assert round_kv(x, scale).tolist() == [896, 896, -896, 32, 40, 0]
    assert round_kv(x, scale, cut=True).tolist() == [896, 896, -896, 32, 36, 0]
    assert kv_scale(0.0).tolist() == [1.0]


def test_cutting_takes_the_next_number_towards_zero() -> None:
    """Oracle: the list of all finite E4M3 numbers, subnormal ones too."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    assert cut_to_fp8(numbers).equal(numbers)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 5000)
    size = numbers[numbers >= 0]
    below = size[torch.searchsorted(size, x.abs().clamp_max(448), right=True) - 1] * x.sign()
    assert cut_to_fp8(x).equal(below)
    lost = 1 - cut_to_fp8(x).abs()[x.abs() > 0.1] / x.abs()[x.abs() > 0.1].clamp_max(448)
    assert lost.max() < 1 / 9
    assert 0.03 < lost.mean() < 0.05


def test_keys_and_values_have_scales_of_their_own() -> None:
    function = kv_rounding({"k_scale": torch.tensor([1.0]), "v_scale": torch.tensor([2.0])}, cut=False)
    x = torch.full((1, 1, 1, 1), 34.5)
    assert function("k", x).item() == 36  # 34.5 between 32 and 36: 36
    assert function("v", x).item() == 36  # 17.25 between 16 and 18: 18


def test_scores_are_capped_where_the_family_caps_them() -> None:
    """Oracle: transformers' eager attention, sliding and full layers; its sdpa leaves the cap out."""
    model, ids = tiny("gemma2", attn_logit_softcapping=5.0), token_ids(2, 20)
    eager = model(ids).logits
    model.set_attn_implementation(ATTENTION)
    torch.testing.assert_close(model(ids).logits, eager, rtol=0, atol=1e-5 * float(eager.abs().max()))
    model.set_attn_implementation("sdpa")
    assert (model(ids).logits - eager).abs().max() > 1e-3 * eager.abs().max()
