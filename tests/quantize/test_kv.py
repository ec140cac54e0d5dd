"""The FP8 cache: numbers by hand, and every E4M3 number against torch's own conversion."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from oneaxis.quantize.kv import ATTENTION, QUERY_BLOCK, cut_to_fp8, kv_rounding, kv_scale, round_kv
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


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor, scaling: float, may_look: Tensor) -> Tensor:
    """float64, token by token: [B, T, heads, H]."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3], dtype=torch.float64)
    for head in range(query.shape[1]):
        for row in range(query.shape[2]):
            seen = may_look[row].nonzero().flatten()
            scores = (key[:, head // groups, seen] @ query[:, head, row, :, None]).squeeze(-1) * scaling
            weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
            out[:, row, head] = (weights[:, :, None] * value[:, head // groups, seen]).sum(dim=1)
    return out


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("length", [2, QUERY_BLOCK - 1, QUERY_BLOCK, QUERY_BLOCK + 1, 3 * QUERY_BLOCK + 5])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
@torch.no_grad()
def test_attention_of_whole_sequences(dtype: torch.dtype, off: float, length: int, heads: tuple[int, int]) -> None:
    """Scores of up to about 12; keys and values lie as a model gives them, [B, T, K, H] turned."""
    draw = torch.Generator().manual_seed(length)

    def given(count: int) -> Tensor:
        return torch.randn(3, length, count, 20, generator=draw).mul_(1.5).to(dtype).transpose(1, 2)

    query, key, value = given(heads[0]), given(heads[1]), given(heads[1])
    module = SimpleNamespace(is_causal=True, num_key_value_groups=heads[0] // heads[1])
    found, _ = AttentionInterface()[ATTENTION](module, query, key, value, None, scaling=20**-0.5)
    expected = attention_by_hand(query, key, value, 20**-0.5, torch.ones(length, length, dtype=torch.bool).tril())
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= off * expected.abs().max()


@pytest.mark.parametrize("other", ["mask", "not causal", "by argument", "longer cache", "gradients"])
def test_attention_that_is_no_plain_causal_one_is_left_to_torch(other: str) -> None:
    """A mask with a hole, a module that looks both ways, one query on a cache, and training: all as by hand."""
    draw = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, 2, 9, 8, generator=draw) for _ in range(3))
    may_look, mask = torch.ones(9, 9, dtype=torch.bool).tril(), None
    module, arguments = nn.Module(), {"scaling": 8**-0.5}
    module.is_causal = True  # type: ignore[assignment]
    if other == "mask":
        may_look = may_look.clone()
        may_look[4:, 2] = False
        mask = may_look.expand(2, 1, 9, 9)
    elif other == "not causal":
        module.is_causal = False  # type: ignore[assignment]
        may_look = torch.ones_like(may_look)
    elif other == "by argument":
        arguments["is_causal"] = False
        may_look = torch.ones_like(may_look)
    elif other == "longer cache":
        query, may_look = query[:, :, -1:], torch.ones(1, 9, dtype=torch.bool)
    query.requires_grad_(other == "gradients")
    with torch.set_grad_enabled(other == "gradients"):
        found, _ = AttentionInterface()[ATTENTION](module, query, key, value, mask, **arguments)
    assert found.requires_grad == (other == "gradients")
    expected = attention_by_hand(query.detach(), key, value, 8**-0.5, may_look)
    torch.testing.assert_close(found.detach().double(), expected, rtol=0, atol=1e-6)
