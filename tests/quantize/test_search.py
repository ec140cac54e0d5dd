"""The search for alpha on samples that the tests make, against the same search written out in numpy (float64)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oneaxis.errors import UserError
from oneaxis.quantize.search import SEARCH_SCHEMA, layer_alphas
from tests.quantize.checkpoints import scheme
from tests.quantize.models import layers_of, site_inputs, split, statistics_of, tiny, token_ids

GRID = [0.2, 0.5, 0.8]


class Case:
    """Layer 0 of a tiny model, its statistics over 6 sequences, and a sample of 40 rows of each tensor."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32) -> None:
        model = tiny(family)
        self.decoder, self.dtype = split(model), dtype
        inputs = site_inputs(model, self.decoder, token_ids(6, 32))
        self.statistics = statistics_of(model, self.decoder, inputs)
        self.samples = {name: x_NC[::5][:40].bfloat16() for name, x_NC in inputs.items()}
        self.tensors: dict[str, Tensor] = dict(layers_of(model, self.decoder)[0].state_dict())

    def search(self, settings: Any, high: tuple[str, ...] = ()) -> tuple[dict[str, float], list[dict[str, Any]]]:
        return layer_alphas(self.decoder, 0, self.tensors, self.statistics, self.samples, settings, high, self.dtype)

    def oracle(self, site: str, alpha: float, static: bool) -> float:
        """Mean squared output error of a site's readers, INT8 weights per row, activations per token or per tensor."""
        found = next(each for each in self.decoder.sites(0) if each.name == site)
        name = f"layers.0.{site}"
        x_nI = self.samples[name].double().numpy()
        absmax_I, w_I = (self.statistics[f"{name}.{key}"].double().numpy() for key in ("absmax", "weight_absmax"))
        s_I = absmax_I**alpha / w_I ** (1 - alpha)
        if found.heads:
            groups = s_I.reshape(found.heads.num_kv_heads, -1, found.heads.head_dim)
            s_I = np.broadcast_to(groups.max(1, keepdims=True), groups.shape).ravel()
        smoothed_nI = x_nI / s_I
        step = (absmax_I / s_I).max() / 127 if static else abs(smoothed_nI).max(1, keepdims=True) / 127
        rounded_nI = (smoothed_nI / step).round().clip(-128, 127) * step
        errors = []
        for reader in found.readers:
            weight_OI = self.tensors[f"{reader}.weight"].double().numpy()
            scaled_OI = weight_OI * s_I
            step_O1 = abs(scaled_OI).max(1, keepdims=True) / 127
            errors.append(rounded_nI @ ((scaled_OI / step_O1).round() * step_O1).T - x_nI @ weight_OI.T)
        return float((np.concatenate(errors, axis=1) ** 2).mean())


@pytest.mark.parametrize("kind", ["w8a8_int8_dynamic", "w8a8_int8_static"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "mixtral"])
def test_takes_the_alpha_of_least_output_error(family: str, kind: str) -> None:
    case = Case(family)
    alphas, rows = case.search(scheme(kind, alpha="auto", grid=GRID))
    expected = [site.name for site in case.decoder.sites(0) if site.producer is not None]
    assert list(alphas) == expected
    assert [(row["site"], row["alpha"]) for row in rows] == [(site, alpha) for site in expected for alpha in GRID]
    assert {tuple(row) for row in rows} == {tuple(SEARCH_SCHEMA)}
    for site in expected:
        if not len(case.samples[f"layers.0.{site}"]):
            continue
        errors = [case.oracle(site, alpha, kind.endswith("static")) for alpha in GRID]
        found = [row for row in rows if row["site"] == site]
        # A value that lies between two levels may be rounded to the other one in float32.
        np.testing.assert_allclose([row["mse"] for row in found], errors, rtol=0.02, err_msg=site)
        assert [row["chosen"] for row in found].count(True) == 1
        assert next(row["mse"] for row in found if row["chosen"]) == min(row["mse"] for row in found)
        assert alphas[site] == next(row["alpha"] for row in found if row["chosen"])


def test_fixed_alphas_and_those_of_a_site_need_no_search_and_no_sample() -> None:
    case = Case("llama")
    case.samples = {}
    own = {"qkv": None, "o": None, "gate_up": None, "down": 0.8}
    alphas, rows = case.search(scheme(alpha=0.5, site_alpha=own))
    assert (alphas, rows) == ({"qkv": 0.5, "o": 0.5, "gate_up": 0.5, "down": 0.8}, [])
    own = dict.fromkeys(own, 0.3)
    assert case.search(scheme(alpha="auto", site_alpha=own))[0] == dict.fromkeys(own, 0.3)
    with pytest.raises(UserError, match=r"samples\.safetensors: no layers\.0\.qkv, which quantize\.smooth\.alpha=auto"):
        case.search(scheme(alpha="auto"))


def test_only_what_is_asked_for_and_rounded_is_smoothed() -> None:
    case = Case("llama")
    assert list(case.search(scheme(sites=["o", "down"], alpha=0.5))[0]) == ["o", "down"]
    # Of k, q and v none is rounded: nothing to gain. One rounded linear of two is searched for alone.
    high = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    alphas, rows = case.search(scheme(alpha="auto", grid=[0.5]), high)
    assert list(alphas) == ["o", "gate_up", "down"]
    one = next(row["mse"] for row in rows if row["site"] == "gate_up")
    both = next(row["mse"] for row in case.search(scheme(alpha="auto", grid=[0.5]))[1] if row["site"] == "gate_up")
    assert one != both


def test_a_tensor_that_nothing_produces_is_left_out() -> None:
    """OLMo 2 norms after the attention: its q, k and v read the residual stream."""
    assert list(Case("olmo2").search(scheme(sites=["o", "down"], alpha="auto", grid=GRID))[0]) == ["o", "down"]


@pytest.mark.parametrize("kind", ["w4a16", "w8a8_fp8"])
def test_every_scheme_can_be_searched(kind: str) -> None:
    case = Case("llama", torch.bfloat16)
    more = {"group_size": 32, "ignore": ("re:.*down_proj",)} if kind == "w4a16" else {}
    alphas, rows = case.search(scheme(kind, ["qkv", "gate_up"], alpha="auto", grid=GRID, **more))
    assert list(alphas) == ["qkv", "gate_up"]
    assert all(0 < row["mse"] < 1e4 for row in rows)


def test_an_expert_without_a_sample_takes_the_first_of_the_grid() -> None:
    case = Case("mixtral")
    name = "layers.0.experts.2.down"
    case.samples[name] = case.samples[name][:0]
    alphas, rows = case.search(scheme(alpha="auto", grid=[0.7, 0.5]))
    assert alphas["experts.2.down"] == 0.7
    assert [row["mse"] for row in rows if row["site"] == "experts.2.down"] == [None, None]


def test_channels_without_range_do_not_disturb() -> None:
    case = Case("llama")
    case.samples["layers.0.down"][:, 3] = 0
    for key in ("absmax", "min", "max"):
        case.statistics[f"layers.0.down.{key}"][3] = 0
    rows = case.search(scheme(alpha="auto", grid=GRID))[1]
    assert all(np.isfinite(row["mse"]) for row in rows)


def test_nan_in_a_sample_or_in_the_statistics_names_the_tensor() -> None:
    case = Case("llama")
    case.samples["layers.0.o"][1, 2] = float("nan")
    with pytest.raises(UserError, match=r"samples\.safetensors: layers\.0\.o holds NaN or infinity; allowed"):
        case.search(scheme(alpha="auto"))
    case.statistics["layers.0.qkv.absmax"][0] = float("inf")
    with pytest.raises(UserError, match=r"stats\.safetensors: layers\.0\.qkv\.absmax holds NaN or infinity; allowed"):
        case.search(scheme(alpha=0.5))
