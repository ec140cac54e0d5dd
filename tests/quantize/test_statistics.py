"""Statistics against float64 oracles over captured tensors, and coverage on literal numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from oneaxis.quantize import statistics as stats
from oneaxis.quantize.decoder import SITES
from tests.quantize.models import tiny, token_ids


def captured(model: torch.nn.Module, ids: Tensor) -> dict[str, np.ndarray]:
    """Oracle: the inputs of every linear, one sequence at a time in float64, by hooks of the test's own."""
    model = model.double()
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _module, args, _output: seen.setdefault(name, []).append(args[0])

    for index, layer in enumerate(model.model.layers):
        for site, linears in SITES.items():
            for linear in linears:
                layer.get_submodule(linear).register_forward_hook(keep(f"layers.{index}.{site}/{linear}"))
    for row in ids:
        model(row[None])
    return {name: torch.cat(tensors).numpy() for name, tensors in seen.items()}


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_statistics_are_those_of_the_tensors_that_linears_read(family: str, batch_size: int) -> None:
    ids = token_ids(8, 40)
    gathered = stats.gather(tiny(family), ids, batch_size)
    tensors = stats.to_tensors(gathered, stats.weight_absmax(tiny(family)))
    table = {f"layers.{row['layer']}.{row['site']}": row for row in stats.outliers(gathered).iter_rows(named=True)}
    model = tiny(family)
    oracle = captured(tiny(family), ids)
    assert len(gathered) == 2 * len(SITES)
    for full_name, x_STC in oracle.items():
        name, linear = full_name.split("/")
        expected = {
            "absmax": abs(x_STC).max((0, 1)),
            "min": x_STC.min((0, 1)),
            "max": x_STC.max((0, 1)),
            "first_absmax": abs(x_STC[:, 0]).max(0),
            "rest_absmax": abs(x_STC[:, 1:]).max((0, 1)),
        }
        for statistic, values in expected.items():
            found = tensors[f"{name}.{statistic}"].double().numpy()
            np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-5, err_msg=f"{full_name} {statistic}")
        layer, site = int(name.split(".")[1]), name.split(".")[2]
        rows = [model.model.layers[layer].get_submodule(each).weight.double().numpy() for each in SITES[site]]
        assert linear in SITES[site]
        np.testing.assert_allclose(
            tensors[f"{name}.weight_absmax"].numpy(), abs(np.concatenate(rows)).max(0), rtol=1e-6
        )
        # The percentile lies between two of the sorted values, which may be far apart where there are few.
        values = np.sort(abs(x_STC).ravel())
        below, above = values[int(0.999 * (len(values) - 1))], values[int(0.999 * (len(values) - 1)) + 1]
        row = table[name]
        assert below * (1 - 2**-7) < row["p999"] < above * (1 + 2**-7)
        assert row["ratio"] == pytest.approx(values[-1] / row["p999"], rel=1e-4)


def test_percentile_of_a_histogram_is_within_its_stated_error() -> None:
    generator = np.random.default_rng(0)
    values = (generator.standard_t(2, 200_000) * np.exp(generator.normal(size=200_000))).astype(np.float32)
    histogram = stats.magnitude_histogram(torch.from_numpy(abs(values)))
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


def test_a_tensor_of_zeros_has_no_outlier_ratio() -> None:
    seen = stats.InputStatistics(3)
    seen.update(torch.zeros(1, 4, 3))
    assert stats.outliers({"layers.0.o": seen})["ratio"].to_list() == [None]


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
