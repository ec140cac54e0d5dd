"""Activation statistics of the tensors that linears read, gathered in one float32 pass; any alpha follows from them.

Per tensor (a site of a decoder layer) and channel: min, max, absmax, with the first token of a sequence apart (it is
where massive activations sit), and the absmax of the weights that read the channel. Per tensor: the 99.9th percentile
of |x|, from a histogram over all values whose bins are the values of |x| cut to 8 significant bits, so it is within
0.8% of the exact one. None of these depends on how sequences are batched.

Dims: B sequences of a batch, T tokens, C channels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from tqdm import tqdm

from oneaxis.quantize.decoder import SITES, decoder_layers

NUM_BINS = 1 << 15
"""float32 without its sign and its lowest 16 bits: exponent and 7 bits of mantissa."""
PERCENTILE = 0.999


@dataclass
class InputStatistics:
    """Running statistics of one tensor."""

    num_channels: int
    min_C: Tensor = field(init=False)
    max_C: Tensor = field(init=False)
    first_absmax_C: Tensor = field(init=False)
    rest_absmax_C: Tensor = field(init=False)
    histogram: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.min_C = torch.full((self.num_channels,), float("inf"))
        self.max_C = torch.full((self.num_channels,), float("-inf"))
        self.first_absmax_C = torch.zeros(self.num_channels)
        self.rest_absmax_C = torch.zeros(self.num_channels)
        self.histogram = torch.zeros(NUM_BINS, dtype=torch.int64)

    def update(self, x_BTC: Tensor) -> None:
        """Take in a batch of whole sequences."""
        x_BTC = x_BTC.detach().float()
        self.first_absmax_C = torch.maximum(self.first_absmax_C, self._take_range(x_BTC[:, 0]))
        if x_BTC.shape[1] > 1:
            self.rest_absmax_C = torch.maximum(self.rest_absmax_C, self._take_range(x_BTC[:, 1:].flatten(0, 1)))
        self.histogram += magnitude_histogram(x_BTC.abs())

    def _take_range(self, x_NC: Tensor) -> Tensor:
        """Take in the range of some tokens, and return their absmax [C]."""
        low_C, high_C = torch.aminmax(x_NC, dim=0)
        self.min_C, self.max_C = torch.minimum(self.min_C, low_C), torch.maximum(self.max_C, high_C)
        return torch.maximum(low_C.abs(), high_C.abs())

    @property
    def absmax_C(self) -> Tensor:
        """Over all tokens."""
        return torch.maximum(self.first_absmax_C, self.rest_absmax_C)


def magnitude_histogram(magnitude: Tensor) -> Tensor:
    """Counts [NUM_BINS] of non-negative float32 values by exponent and 7 bits of mantissa."""
    bins = magnitude.contiguous().view(torch.int32) >> 16
    return torch.bincount(bins.flatten(), minlength=NUM_BINS)


def histogram_percentile(histogram: Tensor, fraction: float) -> float:
    """The value below which `fraction` of the counted values lie, interpolated inside its bin (error under 0.8%)."""
    total = histogram.cumsum(0)
    rank = fraction * (int(total[-1]) - 1)
    index = int(torch.searchsorted(total, torch.tensor(int(rank)), right=True))
    before = int(total[index]) - int(histogram[index])
    edges = torch.tensor([index << 16, (index + 1) << 16], dtype=torch.int32).view(torch.float32).double()
    inside = (rank - before + 0.5) / int(histogram[index])
    return float(edges[0] + (edges[1] - edges[0]) * min(max(inside, 0.0), 1.0))


def tensor_name(layer: int, site: str) -> str:
    """`layers.3.down`: how a tensor is called in artifacts."""
    return f"layers.{layer}.{site}"


@contextmanager
def watching(model: nn.Module, see: Any) -> Iterator[None]:
    """Call `see(name, x_BTC)` for every site's tensor while the model runs."""
    handles = []
    try:
        for index, layer in enumerate(decoder_layers(model)):
            for site, linears in SITES.items():
                name = tensor_name(index, site)

                def hook(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                    see(name, args[0])

                handles.append(layer.get_submodule(linears[0]).register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def gather(model: nn.Module, token_ids_ST: Tensor, batch_size: int) -> dict[str, InputStatistics]:
    """Run the sequences through the decoder (not its lm_head) and return the statistics of every tensor, by name."""
    statistics: dict[str, InputStatistics] = {}

    def see(name: str, x_BTC: Tensor) -> None:
        if name not in statistics:
            statistics[name] = InputStatistics(x_BTC.shape[-1])
        statistics[name].update(x_BTC)

    with watching(model, see), tqdm(total=token_ids_ST.numel(), unit="tok", desc="calibrate", delay=3) as bar:
        for batch in token_ids_ST.split(batch_size):
            model.model(input_ids=batch, use_cache=False)
            bar.update(batch.numel())
    return statistics


def weight_absmax(model: nn.Module) -> dict[str, Tensor]:
    """Per tensor and channel, the largest |weight| over all rows of all linears that read it: name -> [C]."""
    found = {}
    for index, layer in enumerate(decoder_layers(model)):
        for site, linears in SITES.items():
            columns = [layer.get_submodule(linear).weight.detach().float().abs().amax(dim=0) for linear in linears]
            found[tensor_name(index, site)] = torch.stack(columns).amax(dim=0)
    return found


def to_tensors(statistics: dict[str, InputStatistics], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The content of stats.safetensors: `layers.<n>.<site>.<statistic>` -> float32 [C]."""
    tensors: dict[str, Tensor] = {}
    for name, seen in statistics.items():
        tensors |= {
            f"{name}.absmax": seen.absmax_C,
            f"{name}.min": seen.min_C,
            f"{name}.max": seen.max_C,
            f"{name}.first_absmax": seen.first_absmax_C,
            f"{name}.rest_absmax": seen.rest_absmax_C,
            f"{name}.weight_absmax": weights[name],
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def outliers(statistics: dict[str, InputStatistics]) -> pl.DataFrame:
    """One row per tensor: layer i64, site str, absmax, p999, ratio = absmax / p999, and first, rest absmax.

    Above a ratio of about 10, one INT8 scale for the whole tensor leaves most values too few levels. A tensor whose
    99.9th percentile is 0 has no ratio (null).
    """
    rows = []
    for name, seen in statistics.items():
        _, layer, site = name.split(".")
        absmax, p999 = float(seen.absmax_C.max()), histogram_percentile(seen.histogram, PERCENTILE)
        rows.append(
            {
                "layer": int(layer),
                "site": site,
                "absmax": absmax,
                "p999": p999,
                "ratio": absmax / p999 if p999 > 1e-30 else None,
                "first_absmax": float(seen.first_absmax_C.max()),
                "rest_absmax": float(seen.rest_absmax_C.max()),
            }
        )
    return pl.DataFrame(rows, schema_overrides={"ratio": pl.Float64})


@dataclass
class Coverage:
    """How far new text goes beyond the calibrated range of one tensor."""

    calibrated_C: Tensor
    seen_C: Tensor = field(init=False)
    num_values: int = 0
    num_clipped: int = 0
    """Values beyond the calibrated absmax of the tensor: what one static scale without smoothing would clip."""
    num_beyond_channel: int = 0
    """Values beyond the calibrated absmax of their own channel."""

    def __post_init__(self) -> None:
        self.seen_C = torch.zeros_like(self.calibrated_C)

    def update(self, x_BTC: Tensor) -> None:
        """Take in a batch."""
        x_NC = x_BTC.detach().float().flatten(0, 1)
        low_C, high_C = torch.aminmax(x_NC, dim=0)
        absmax_C = torch.maximum(low_C.abs(), high_C.abs())
        self.seen_C = torch.maximum(self.seen_C, absmax_C)
        self.num_values += x_NC.numel()
        # Only channels that went beyond their range can hold a value that did.
        beyond = absmax_C > self.calibrated_C
        magnitude_NC = x_NC[:, beyond].abs()
        self.num_clipped += int((magnitude_NC > self.calibrated_C.max()).sum())
        self.num_beyond_channel += int((magnitude_NC > self.calibrated_C[beyond]).sum())

    @property
    def num_exceeded(self) -> int:
        """Channels whose absmax exceeds the calibrated one."""
        return int((self.seen_C > self.calibrated_C).sum())


def coverage_summary(coverages: dict[str, Coverage]) -> dict[str, Any]:
    """coverage.json: over all tensors, and by tensor, the share of channels exceeded and of values clipped."""

    def shares(some: list[Coverage]) -> dict[str, float]:
        channels, values = sum(len(one.calibrated_C) for one in some), sum(one.num_values for one in some)
        return {
            "channels_exceeded_share": sum(one.num_exceeded for one in some) / channels,
            "clip_rate": sum(one.num_clipped for one in some) / values,
            "beyond_channel_rate": sum(one.num_beyond_channel for one in some) / values,
        }

    return {
        **shares(list(coverages.values())),
        "num_channels": sum(len(one.calibrated_C) for one in coverages.values()),
        "num_values": sum(one.num_values for one in coverages.values()),
        "tensors": {name: shares([one]) for name, one in coverages.items()},
    }
