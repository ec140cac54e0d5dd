"""Statistics against oracles over captured tensors, and coverage on literal numbers.

Oracle: transformers' own forward of the whole model in float64, one sequence at a time, with the tests' own hooks
(`site_inputs`) and its own cache of keys and values; numpy does the rest.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from oneaxis.checkpoint.layerwise import Layerwise
from oneaxis.errors import UserError
from oneaxis.quantize import statistics as stats
from oneaxis.quantize.smooth import site_scales
from tests.quantize.models import layers_of, site_inputs, split, tiny, token_ids

MANY = ["llama", "qwen2", "gemma2", "phi3", "mixtral", "qwen3_moe", "gpt2"]


def opened(folder: Path, family: str) -> Layerwise:
    tiny(family).save_pretrained(folder / family)
    return Layerwise.open(folder / family)


def captured(family: str, ids_ST: Tensor) -> dict[str, np.ndarray]:
    """What the linears of each site read: float64 [S, T, C], of experts [N, C]."""
    model = tiny(family).double()
    description = split(model)
    rows = [site_inputs(model, description, ids_T[None]) for ids_T in ids_ST]
    found = {}
    for name in rows[0]:
        x_NC = torch.cat([row[name] for row in rows])
        found[name] = x_NC.numpy() if "experts" in name else x_NC.view(*ids_ST.shape, -1).numpy()
    return found


@pytest.mark.parametrize("family", MANY)
def test_statistics_are_those_of_the_tensors_that_linears_read(family: str, tmp_path: Path) -> None:
    ids_ST = token_ids(8, 40)
    gathered = stats.gather(opened(tmp_path, family), ids_ST, 3, sample_tokens=16)
    oracle = captured(family, ids_ST)
    whole = tiny(family)
    description = split(whole)
    table = {f"layers.{row['layer']}.{row['site']}": row for row in gathered.outliers().iter_rows(named=True)}
    assert set(table) == set(gathered.samples) == set(oracle)
    for index, layer in enumerate(layers_of(whole, description)):
        for site in description.sites(index):
            name = f"layers.{index}.{site.name}"
            x = oracle[name]
            if not len(x):
                assert name in gathered.unseen
                continue
            x_NC = x.reshape(-1, x.shape[-1])
            first_NC, rest_NC = (x[:, 0], x[:, 1:].reshape(-1, x.shape[-1])) if x.ndim == 3 else (0 * x, x)
            weights = [layer.get_submodule(reader).weight.double().numpy() for reader in site.readers]
            expected = {
                "absmax": abs(x_NC).max(0),
                "min": x_NC.min(0),
                "max": x_NC.max(0),
                "first_absmax": abs(first_NC).max(0),
                "rest_absmax": abs(rest_NC).max(0),
                "weight_absmax": abs(np.concatenate(weights)).max(0),
                "token_norm": np.linalg.norm(x_NC, axis=1),
            }
            for statistic, values in expected.items():
                found = gathered.tensors[f"{name}.{statistic}"].double().numpy()
                np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-5, err_msg=f"{name} {statistic}")
            # The percentile lies between two of the sorted values, which may be far apart where there are few.
            values = np.sort(abs(x_NC).ravel())
            below, above = values[int(0.999 * (len(values) - 1))], values[int(0.999 * (len(values) - 1)) + 1]
            row = table[name]
            assert below * (1 - 2**-7) < row["p999"] < above * (1 + 2**-7)
            assert row["ratio"] == pytest.approx(values[-1] / row["p999"], rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt2"])
def test_in_bfloat16_the_statistics_are_close_and_those_of_weights_exact(family: str, tmp_path: Path) -> None:
    tiny(family).bfloat16().save_pretrained(tmp_path / family)
    ids_ST, model = token_ids(8, 40), Layerwise.open(tmp_path / family)
    exact = stats.gather(model, ids_ST, 3, sample_tokens=16).tensors
    narrow = stats.gather(model, ids_ST, 3, sample_tokens=16, dtype=torch.bfloat16).tensors
    moved = {name: float((narrow[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact}
    assert max(moved.values()) < 0.2
    assert np.median(list(moved.values())) < 0.02
    assert all(by == 0 for name, by in moved.items() if name.endswith("weight_absmax"))
    # The layers did compute in the narrow dtype: no value that they give has more bits.
    absmax = narrow["layers.1.down.absmax"]
    assert torch.equal(absmax, absmax.bfloat16().float())
    assert moved["layers.1.down.absmax"] > 0


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_samples_are_the_same_tokens_of_every_tensor(family: str, tmp_path: Path) -> None:
    """Rows of the oracle's; which, is read off one tensor in which no two tokens are alike, and holds for all."""
    ids_ST = token_ids(8, 40)
    samples = stats.gather(opened(tmp_path, family), ids_ST, 3, sample_tokens=16).samples
    captures = captured(family, ids_ST)
    oracle = {name: torch.from_numpy(x.reshape(-1, x.shape[-1])).float() for name, x in captures.items()}
    chosen_n = torch.cdist(samples["layers.1.qkv"].float(), oracle["layers.1.qkv"]).argmin(1)
    assert len(chosen_n) == 16
    assert chosen_n.unique().equal(chosen_n), "in the order of the tokens, none twice"
    for name, x_NC in oracle.items():
        rows_nC = samples[name]
        assert rows_nC.dtype == torch.bfloat16
        assert rows_nC.shape == (min(16, len(x_NC)), x_NC.shape[1])
        expected_nC = x_NC[chosen_n] if "experts" not in name else x_NC[torch.cdist(rows_nC.float(), x_NC).argmin(1)]
        torch.testing.assert_close(rows_nC.float(), expected_nC, rtol=2**-7, atol=1e-4)


def test_nothing_depends_on_the_batches(tmp_path: Path) -> None:
    """Up to the last bits of the forward pass, whose sums depend on them."""
    ids_ST = token_ids(7, 20)
    model = opened(tmp_path, "mixtral")
    one, other = (stats.gather(model, ids_ST, batch_size, sample_tokens=8) for batch_size in (2, 7))
    assert list(one.tensors) == list(other.tensors)
    for name in one.tensors:
        torch.testing.assert_close(one.tensors[name], other.tensors[name], rtol=1e-4, atol=1e-5)
    for name in one.samples:
        torch.testing.assert_close(one.samples[name].float(), other.samples[name].float(), rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_ranges_of_keys_and_values_are_those_of_the_cache(family: str, tmp_path: Path) -> None:
    """Oracle: what transformers itself puts into its cache."""
    ids_ST = token_ids(5, 30)
    tensors = stats.gather(opened(tmp_path, family), ids_ST, 2, 0).tensors
    cache = tiny(family)(ids_ST, use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        for name, x_BKTH in (("k", layer.keys), ("v", layer.values)):
            expected = x_BKTH.abs().amax(dim=(0, 2)).flatten()
            torch.testing.assert_close(tensors[f"layers.{index}.{name}_absmax"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("formula", ["absmax", "range"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "mixtral"])
def test_the_stored_file_is_enough_for_every_alpha_formula_and_static_scale(
    family: str, formula: str, tmp_path: Path
) -> None:
    """From stats.safetensors alone, against both published formulas over the captured tensors."""
    ids_ST = token_ids(6, 32)
    model = opened(tmp_path, family)
    path = tmp_path / "stats.safetensors"
    save_file(stats.gather(model, ids_ST, 4, 0).tensors, path)
    statistics = stats.read_statistics(path)
    oracle = captured(family, ids_ST)
    layer = split_layer(family)
    tensors = dict(layer.named_parameters())
    heads = model.decoder.heads
    for alpha in (0.0, 0.3, 0.5, 0.85, 1.0):
        for site in model.decoder.sites(0):
            name = f"layers.0.{site.name}"
            x_NC = oracle[name].reshape(-1, oracle[name].shape[-1])
            if not len(x_NC) or site.producer is None:
                continue
            w_C = np.concatenate([abs(tensors[f"{reader}.weight"].double().numpy()) for reader in site.readers]).max(0)
            if formula == "absmax":
                s_C = abs(x_NC).max(0) ** alpha / w_C ** (1 - alpha)
            else:
                s_C = (x_NC.max(0) - x_NC.min(0)) ** alpha / (2 * w_C) ** (1 - alpha)
            if site.heads:
                groups = s_C.reshape(heads.num_kv_heads, -1, heads.head_dim)
                s_C = np.broadcast_to(groups.max(1, keepdims=True), groups.shape).ravel()
            found = site_scales(model.decoder, 0, tensors, statistics, {site.name: alpha}, formula, torch.float32)
            np.testing.assert_allclose(found[site.name].double().numpy(), s_C, rtol=1e-4, err_msg=f"{name} {alpha}")
            static = stats.static_absmax(statistics, name, found[site.name])
            assert static == pytest.approx(abs(x_NC / s_C).max(), rel=1e-4)
            assert stats.static_absmax(statistics, name) == pytest.approx(abs(x_NC).max(), rel=1e-4)


def split_layer(family: str) -> torch.nn.Module:
    """Layer 0 of the whole model, its experts split."""
    whole = tiny(family)
    return layers_of(whole, split(whole))[0]


def test_percentile_of_a_histogram_is_within_its_stated_error() -> None:
    generator = np.random.default_rng(0)
    values = (generator.standard_t(2, 200_000) * np.exp(generator.normal(size=200_000))).astype(np.float32)
    histogram = stats.magnitude_histogram(torch.from_numpy(values).view(-1, 100))
    assert int(histogram.sum()) == 200_000
    for fraction in (0.1, 0.5, 0.9, 0.999):
        exact = np.quantile(abs(values).astype(np.float64), fraction)
        assert stats.histogram_percentile(histogram, fraction) == pytest.approx(exact, rel=2**-7)


def test_first_token_stays_apart() -> None:
    seen = stats.InputStatistics(2)
    seen.update(torch.tensor([[[50.0, 1.0], [2.0, -3.0]], [[-60.0, 0.5], [4.0, 1.0]]]))
    assert seen.first_absmax_C.tolist() == [60.0, 1.0]
    assert seen.rest_absmax_C.tolist() == [4.0, 3.0]
    assert seen.absmax_C.tolist() == [60.0, 3.0]
    assert (seen.min_C.tolist(), seen.max_C.tolist()) == ([-60.0, -3.0], [50.0, 1.0])
    # |(50, 1)|, |(2, -3)|, |(-60, 0.5)|, |(4, 1)|
    torch.testing.assert_close(seen.token_norm_N, torch.tensor([2501.0, 13.0, 3600.25, 17.0]).sqrt())


def test_a_sample_is_uniform_over_the_tokens() -> None:
    """Oracle: 20,000 tokens in batches of many sizes; the 1,000 kept come from all of them alike."""
    sample = stats.Sample(1000)
    numbers = torch.arange(20_000.0)[:, None]
    for part in numbers.split([1, 3, 996, 4000, 15_000]):
        sample.update(part)
    kept = sample.rows.float().squeeze(1)
    assert kept.shape == (1000,)
    assert (kept.diff() >= 0).all()
    # A uniform draw of 1,000: each tenth holds 100 give or take 9.5 (hypergeometric), and here 4 of these.
    counts = torch.histc(kept, 10, 0, 20_000)
    assert ((counts - 100).abs() < 38).all()


def test_a_tensor_of_zeros_has_no_outlier_ratio() -> None:
    seen = stats.InputStatistics(3)
    seen.update(torch.zeros(1, 4, 3))
    assert stats.outlier_row("layers.0.o", seen)["ratio"] is None


def test_an_expert_that_no_token_reached_has_zeros_and_its_widest_siblings_static_range() -> None:
    gathered = stats.Gathered()
    seen = stats.InputStatistics(2, whole_sequences=False, sample_tokens=4)
    seen.update(torch.tensor([[[3.0, -1.0], [0.5, 2.0]]]))
    gathered.take("layers.0.experts.0.down", seen, torch.ones(2))
    gathered.take("layers.0.experts.1.down", stats.InputStatistics(2, False, 4), torch.ones(2))
    assert gathered.unseen == ["layers.0.experts.1.down"]
    assert gathered.samples["layers.0.experts.1.down"].shape == (0, 2)
    zeros = [f"layers.0.experts.1.down.{name}" for name in stats.CHANNEL_STATISTICS[:-1]]
    assert all(gathered.tensors[name].tolist() == [0.0, 0.0] for name in zeros)
    assert gathered.tensors["layers.0.experts.0.down.first_absmax"].tolist() == [0.0, 0.0]
    halved = torch.tensor([2.0, 2.0])
    assert stats.static_absmax(gathered.tensors, "layers.0.experts.0.down", halved) == 1.5
    assert stats.static_absmax(gathered.tensors, "layers.0.experts.1.down") == 3.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_activations_or_in_the_file_names_the_tensor(bad: float, tmp_path: Path) -> None:
    seen = stats.InputStatistics(2)
    seen.update(torch.tensor([[[1.0, 1.0], [bad, 1.0]]]))
    with pytest.raises(UserError, match=r"layers\.7\.down: the activations hold NaN or infinity; allowed"):
        stats.Gathered().take("layers.7.down", seen, torch.ones(2))
    save_file({"layers.7.down.absmax": torch.tensor([1.0, bad])}, tmp_path / "stats.safetensors")
    with pytest.raises(UserError, match=r"stats\.safetensors: layers\.7\.down\.absmax holds NaN or infinity; allowed"):
        stats.read_statistics(tmp_path / "stats.safetensors")


def test_a_missing_or_cut_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stats\.safetensors: missing or not whole"):
        stats.read_statistics(tmp_path / "stats.safetensors")
    (tmp_path / "stats.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(UserError, match=r"stats\.safetensors: missing or not whole"):
        stats.read_statistics(tmp_path / "stats.safetensors")


def test_coverage_on_literal_numbers() -> None:
    one = stats.Coverage(torch.tensor([4.0, 1.0, 2.0]))
    one.update(torch.tensor([[[4.0, -1.5, 0.0], [-5.0, 0.5, 2.0]]]))
    one.update(torch.tensor([[[0.0, 3.0, 1.0], [0.0, 0.0, 0.0]]]))
    # Channels 0 (5 > 4) and 1 (3 > 1) are exceeded, channel 2 (2) just not. Of 12 values one (-5) lies beyond the
    # tensor's absmax of 4, and three (-1.5, -5, 3) beyond their own channel's.
    other = stats.Coverage(torch.tensor([1.0]))
    other.update(torch.zeros(1, 4, 1))
    summary = stats.coverage_summary({"layers.0.qkv": one, "layers.0.o": other})
    assert summary["tensors"]["layers.0.qkv"] == {
        "channels_exceeded_share": 2 / 3, "clip_rate": 1 / 12, "beyond_channel_rate": 3 / 12}  # fmt: skip
    assert (summary["channels_exceeded_share"], summary["clip_rate"]) == (2 / 4, 1 / 16)
    assert (summary["num_channels"], summary["num_values"]) == (4, 16)
