"""Scales refined channel by channel: the expected error against real roundings, and what the descent makes of it."""

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from oneaxis.errors import UserError
from oneaxis.quantize.families import Heads
from oneaxis.quantize.refine import REFINE_SCHEMA, descend, refine_scales
from oneaxis.quantize.smooth import site_scales
from tests.quantize.checkpoints import scheme
from tests.quantize.test_search import Case


def heavy_tailed(n: int, channels: int, seed: int) -> Tensor:
    """Rows [n, channels] as a gated MLP gives them: products of normals, each channel with a size of its own."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(np.random.default_rng(1).normal(0, 1.2, channels))
    return torch.from_numpy(draw.normal(size=(n, channels)) * draw.normal(size=(n, channels)) * sizes).float()


def relative_error(x_nI: Tensor, weight_OI: Tensor, s_I: Tensor, calibrated_I: Tensor | None = None) -> float:
    """Float64, in numpy: INT8 in and out rounded for real; squared error of each token relative to its output's."""
    x, w, s = (tensor.double().numpy() for tensor in (x_nI, weight_OI, s_I))
    u, v = x / s, w * s
    step = (
        abs(u).max(1, keepdims=True) / 127 if calibrated_I is None else (calibrated_I.double().numpy() / s).max() / 127
    )
    step_w = abs(v).max(1, keepdims=True) / 127
    rounded = ((u / step).round().clip(-128, 127) * step) @ ((v / step_w).round() * step_w).T
    y = x @ w.T
    energy = (y**2).sum(1)
    return float((((rounded - y) ** 2).sum(1) / (energy + np.median(energy))).sum())


@pytest.mark.parametrize("static", [False, True])
def test_rounding_loses_less_on_rows_that_the_descent_has_not_seen(static: bool) -> None:
    """Against the best alpha of a fine grid: the descent has a scale for each channel to choose."""
    seed = int(np.random.default_rng().integers(1 << 31))
    torch.manual_seed(seed)
    seen_nI, fresh_nI = heavy_tailed(768, 96, seed), heavy_tailed(768, 96, seed + 1)
    weight_OI = torch.randn(64, 96) * torch.exp(0.5 * torch.randn(96)) * torch.exp(torch.randn(64, 1))
    absmax_I = torch.cat([seen_nI, fresh_nI]).abs().amax(0)
    calibrated_I = absmax_I if static else None
    grid = [absmax_I**alpha / weight_OI.abs().amax(0) ** (1 - alpha) for alpha in np.linspace(0.3, 0.95, 14)]
    start_I = min(grid, key=lambda s_I: relative_error(seen_nI, weight_OI, s_I, calibrated_I))
    found_I = descend(seen_nI, weight_OI, start_I, 60, calibrated_I=calibrated_I)
    before, after = (relative_error(fresh_nI, weight_OI, s_I, calibrated_I) for s_I in (start_I, found_I))
    assert after < 0.99 * before, f"seed {seed}: {before} -> {after}"


def test_expected_error_is_that_of_real_roundings() -> None:
    """The least found has the error that the formula says: descending 1 step only evaluates the start."""
    from oneaxis.quantize.refine import _ExpectedError

    seed = int(np.random.default_rng().integers(1 << 31))
    torch.manual_seed(seed)
    x_nI, weight_OI = heavy_tailed(400, 128, seed), torch.randn(96, 128)
    for s_I in (torch.ones(128), x_nI.abs().amax(0) ** 0.5, x_nI.abs().amax(0)):
        expected = float(_ExpectedError(x_nI, weight_OI, None, 1.0).of(s_I))
        assert expected == pytest.approx(relative_error(x_nI, weight_OI, s_I), rel=0.1), f"seed {seed}"


def test_query_heads_of_a_group_share_their_scales() -> None:
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
    torch.manual_seed(3)
    x_nI, weight_OI = heavy_tailed(64, 32, 3), torch.randn(16, 32)
    start_I = torch.rand(2, 1, 8).expand(2, 2, 8).reshape(-1) + 0.5
    found_K2D = descend(x_nI, weight_OI, start_I, 20, heads=heads).view(2, 2, 8)
    assert torch.equal(found_K2D[:, 0], found_K2D[:, 1])
    assert not torch.allclose(found_K2D.reshape(-1), start_I)


@torch.inference_mode()
def refined(case: Case, settings: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Any]]]:
    """As the stage does: in inference mode, with statistics that were read in it."""
    case.statistics = {name: tensor.clone() for name, tensor in case.statistics.items()}
    alphas, _ = case.search(settings)
    start = site_scales(case.decoder, 0, case.tensors, case.statistics, alphas, "absmax", case.dtype)
    return start, *refine_scales(case.decoder, 0, case.tensors, case.statistics, case.samples, start, settings, set(),
                                 case.dtype)  # fmt: skip


@pytest.mark.parametrize("kind", ["w8a8_int8_dynamic", "w8a8_int8_static"])
def test_a_layer_is_never_made_worse(kind: str) -> None:
    start, found, rows = refined(Case("llama"), scheme(kind, alpha=0.5, refine_steps=20))
    table = pl.DataFrame(rows, REFINE_SCHEMA)
    assert table["site"].to_list() == ["qkv", "o", "gate_up", "down"] == list(found)
    assert (table["mse_after"] <= table["mse_before"]).all()
    assert (table["mse_after"] < table["mse_before"]).any()
    for row in rows:
        unchanged = torch.equal(start[row["site"]], found[row["site"]])
        assert unchanged == (row["mse_after"] == row["mse_before"])


def test_scales_of_a_norm_leave_bfloat16_numbers() -> None:
    case = Case("llama", torch.bfloat16)
    _, found, _ = refined(case, scheme(alpha=0.5, refine_steps=20))
    norm_C = case.tensors["input_layernorm.weight"]
    divided_C = norm_C.double() / found["qkv"].double()
    np.testing.assert_allclose(divided_C, divided_C.bfloat16().double(), rtol=1e-6)


def test_an_expert_without_a_sample_keeps_its_scales_and_a_missing_sample_is_said() -> None:
    case = Case("mixtral")
    case.samples["layers.0.experts.2.down"] = case.samples["layers.0.experts.2.down"][:0]
    start, found, rows = refined(case, scheme(alpha=0.5, refine_steps=2))
    assert torch.equal(found["experts.2.down"], start["experts.2.down"])
    assert "experts.2.down" not in [row["site"] for row in rows]
    del case.samples["layers.0.qkv"]
    with pytest.raises(UserError, match=r"no layers\.0\.qkv, which quantize\.smooth\.refine_steps needs"):
        refined(case, scheme(alpha=0.5, refine_steps=2))


@pytest.mark.parametrize(("kind", "sites", "said"), [
    ("w4a16", None, "refine_steps is 5; allowed: 0"),
    ("w8a8_int8_dynamic", [], "sites is empty; allowed: 0"),
])  # fmt: skip
def test_refused_where_it_would_do_nothing(kind: str, sites: list[str] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scheme(kind, sites, refine_steps=5)
