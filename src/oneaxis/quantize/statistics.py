"""Activation statistics of the tensors that linears read, gathered in one pass; any alpha follows from them.

Per tensor (a site of a decoder layer) and channel: min, max, absmax, with the first token of a sequence apart (it is
where massive activations sit), and the absmax of the weights that read the channel. Per token: its L2 norm. Per
tensor: the 99.9th percentile of |x|, from a histogram over all values whose bins are the values of |x| cut to 8
significant bits, so it is within 0.8% of the exact one; and a sample of whole rows. None of these depends on how
sequences are batched. Layers are taken one after another, so one layer and its histograms are all that is held.

Dims: S sequences, B of a batch, T tokens of each, N tokens, n sampled tokens, C channels.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from oneaxis.checkpoint.layerwise import Hidden, Layerwise
from oneaxis.errors import UserError
from oneaxis.quantize.families import Site

NUM_BINS = 1 << 15
"""float32 without its sign and its lowest 16 bits: exponent and 7 bits of mantissa."""
UPPER_HALF = 1 if sys.byteorder == "little" else 0
PERCENTILE = 0.999
SAMPLE_SEED = 20260501

CHANNEL_STATISTICS = ("absmax", "min", "max", "first_absmax", "rest_absmax", "weight_absmax")


def tensor_name(layer: int, site: str) -> str:
    """`layers.3.down`: how a tensor is called in artifacts."""
    return f"layers.{layer}.{site}"


def layer_and_site(name: str) -> tuple[int, str]:
    """The inverse of `tensor_name`: `layers.3.experts.1.down` -> (3, "experts.1.down")."""
    _, layer, site = name.split(".", 2)
    return int(layer), site


@dataclass
class Sample:
    """`size` of the tokens seen, each equally likely, whatever the batches.

    Each token draws a number, and those with the smallest are kept: a token need not be known to be one of how many.
    """

    size: int
    rows: Tensor = field(init=False)
    """BF16 [n, C], in the order of the tokens."""

    def __post_init__(self) -> None:
        self._draw = np.random.Generator(np.random.PCG64(SAMPLE_SEED))
        self._numbers = np.empty(0)
        self.rows = torch.empty(0)

    def update(self, x_NC: Tensor) -> None:
        """Take in the next N tokens."""
        drawn = self._draw.random(len(x_NC))
        held = len(self._numbers)
        # Of a full sample only smaller numbers can displace anything.
        low = np.flatnonzero(drawn < self._numbers.max()) if held == self.size else np.arange(len(drawn))
        if not len(low):
            return
        numbers = np.concatenate([self._numbers, drawn[low]])
        kept = np.sort(np.argsort(numbers, kind="stable")[: self.size])
        fresh = torch.from_numpy(low[kept[kept >= held] - held])
        older = torch.from_numpy(kept[kept < held])
        chosen_NC = x_NC[fresh].to(torch.bfloat16)
        self.rows = torch.cat([self.rows[older], chosen_NC]) if len(self._numbers) else chosen_NC
        self._numbers = numbers[kept]


@dataclass
class InputStatistics:
    """Running statistics of one tensor. One that was never seen (an expert to which no token went) has zeros."""

    num_channels: int
    whole_sequences: bool = True
    """False: tokens come without their place in a sequence (an expert's), so all of them count as not the first."""
    sample_tokens: int = 0
    num_tokens: int = field(init=False, default=0)
    first_absmax_C: Tensor = field(init=False)
    rest_absmax_C: Tensor = field(init=False)
    histogram: Tensor = field(init=False)
    sample: Sample = field(init=False)

    def __post_init__(self) -> None:
        self._min_C = torch.full((self.num_channels,), float("inf"))
        self._max_C = torch.full((self.num_channels,), float("-inf"))
        self.first_absmax_C = torch.zeros(self.num_channels)
        self.rest_absmax_C = torch.zeros(self.num_channels)
        self.histogram = torch.zeros(NUM_BINS, dtype=torch.int64)
        self.sample = Sample(self.sample_tokens)
        self._norms: list[Tensor] = []

    def update(self, x_BTC: Tensor) -> None:
        """Take in a batch of whole sequences, or [1, N, C] of tokens that are none."""
        x_BTC = x_BTC.detach()
        apart = int(self.whole_sequences)
        if apart:
            self.first_absmax_C = torch.maximum(self.first_absmax_C, self._take_range(x_BTC[:, 0].float()))
        # One sequence at a time, since a batch does not fit into the processor's cache.
        for x_TC in x_BTC:
            self.histogram += magnitude_histogram(x_TC)
            exact_TC = x_TC.float()
            if len(x_TC) > apart:
                self.rest_absmax_C = torch.maximum(self.rest_absmax_C, self._take_range(exact_TC[apart:]))
            self._norms.append(torch.linalg.vector_norm(exact_TC, dim=1))
        if self.sample_tokens:
            self.sample.update(x_BTC.flatten(0, 1))
        self.num_tokens += x_BTC.shape[0] * x_BTC.shape[1]

    def _take_range(self, x_NC: Tensor) -> Tensor:
        """Take in the range of some tokens, and return their absmax [C]."""
        low_C, high_C = x_NC.amin(dim=0), x_NC.amax(dim=0)  # Five times as fast as torch.aminmax.
        self._min_C, self._max_C = torch.minimum(self._min_C, low_C), torch.maximum(self._max_C, high_C)
        return torch.maximum(low_C.abs(), high_C.abs())

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no infinity was seen."""
        return bool(self.absmax_C.isfinite().all())

    @property
    def absmax_C(self) -> Tensor:
        """Over all tokens."""
        return torch.maximum(self.first_absmax_C, self.rest_absmax_C)

    @property
    def min_C(self) -> Tensor:
        """Over all tokens; 0 where none was seen."""
        return self._min_C if self.num_tokens else torch.zeros(self.num_channels)

    @property
    def max_C(self) -> Tensor:
        """Over all tokens; 0 where none was seen."""
        return self._max_C if self.num_tokens else torch.zeros(self.num_channels)

    @property
    def token_norm_N(self) -> Tensor:
        """L2 norm of every token, in order: token t of sequence s is N = s * T + t."""
        return torch.cat(self._norms) if self._norms else torch.zeros(0)


def magnitude_histogram(x_NC: Tensor) -> Tensor:
    """Counts [NUM_BINS] of |x| by exponent and 7 bits of mantissa: what a BF16 or the upper half of a float32 holds."""
    if x_NC.dtype == torch.bfloat16:
        upper_NC = x_NC.contiguous().view(torch.int16)
    else:
        upper_NC = x_NC.float().contiguous().view(torch.int16)[:, UPPER_HALF::2]
    return torch.bincount(upper_NC.bitwise_and(NUM_BINS - 1).flatten(), minlength=NUM_BINS)


def histogram_percentile(histogram: Tensor, fraction: float) -> float:
    """The value below which `fraction` of the counted values lie, interpolated inside its bin (error under 0.8%)."""
    total = histogram.cumsum(0)
    if not int(total[-1]):
        return 0.0
    rank = fraction * (int(total[-1]) - 1)
    index = int(torch.searchsorted(total, torch.tensor(int(rank)), right=True))
    before = int(total[index]) - int(histogram[index])
    edges = torch.tensor([index << 16, (index + 1) << 16], dtype=torch.int32).view(torch.float32).double()
    inside = (rank - before + 0.5) / int(histogram[index])
    return float(edges[0] + (edges[1] - edges[0]) * min(max(inside, 0.0), 1.0))


@dataclass
class Gathered:
    """What one pass over the calibration text leaves."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The content of stats.safetensors."""
    samples: dict[str, Tensor] = field(default_factory=dict)
    """The content of samples.safetensors: tensor name -> BF16 [n, C]."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Those of `outliers`."""
    unseen: list[str] = field(default_factory=list)
    """Tensors that no token reached: experts that the router never chose."""

    def take(self, name: str, seen: InputStatistics, weight_absmax_C: Tensor) -> None:
        """Keep what is left of one tensor when all text has passed it.

        Raises:
            UserError: it held NaN or infinity.
        """
        if not seen.is_finite:
            raise UserError(f"{name}: the activations hold NaN or infinity; allowed: finite ones; the weights of this "
                            "layer or of one before it, or the text, drive the model beyond float32")  # fmt: skip
        columns = (seen.absmax_C, seen.min_C, seen.max_C, seen.first_absmax_C, seen.rest_absmax_C, weight_absmax_C)
        self.tensors |= {f"{name}.{key}": value for key, value in zip(CHANNEL_STATISTICS, columns, strict=True)}
        self.tensors[f"{name}.token_norm"] = seen.token_norm_N
        if seen.sample_tokens:
            self.samples[name] = seen.sample.rows if seen.num_tokens else torch.zeros(
                (0, seen.num_channels), dtype=torch.bfloat16)  # fmt: skip
        self.rows.append(outlier_row(name, seen))
        if not seen.num_tokens:
            self.unseen.append(name)

    def outliers(self) -> pl.DataFrame:
        """One row per tensor: layer i64, site str, absmax, p999, ratio = absmax / p999, and first, rest absmax.

        Above a ratio of about 10, one INT8 scale for the whole tensor leaves most values too few levels. A tensor whose
        99.9th percentile is 0 has no ratio (null).
        """
        return pl.DataFrame(self.rows, schema_overrides={"ratio": pl.Float64})


def outlier_row(name: str, seen: InputStatistics) -> dict[str, Any]:
    """A row of `Gathered.outliers`."""
    layer, site = layer_and_site(name)
    absmax, p999 = float(seen.absmax_C.max()), histogram_percentile(seen.histogram, PERCENTILE)
    return {
        "layer": layer,
        "site": site,
        "absmax": absmax,
        "p999": p999,
        "ratio": absmax / p999 if p999 > 1e-30 else None,
        "first_absmax": float(seen.first_absmax_C.max()),
        "rest_absmax": float(seen.rest_absmax_C.max()),
    }


@torch.inference_mode()
def gather(
    model: Layerwise,
    token_ids_ST: Tensor,
    batch_size: int,
    sample_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Gathered:
    """Run the sequences through the decoder layers and return the statistics of every tensor that linears read.

    Args:
        sample_tokens: rows to keep of every tensor; 0: none.
        dtype: what the layers compute in.

    Raises:
        UserError: a tensor held NaN or infinity, naming it.
    """
    gathered = Gathered()
    hidden = model.start(token_ids_ST, batch_size, dtype)
    for index in tqdm(range(model.decoder.num_layers), desc="calibrate: statistics", unit="layer", delay=3):
        _gather_layer(model, hidden, index, sample_tokens, gathered)
    return gathered


def _gather_layer(model: Layerwise, hidden: Hidden, index: int, sample_tokens: int, gathered: Gathered) -> None:
    """Advance by one layer and keep the statistics of its tensors."""
    layer = model.layer(index)
    sites = model.decoder.sites(index)
    weights = {site.name: weight_absmax(layer, site) for site in sites}
    inputs = {name: InputStatistics(len(weight_C), not name.startswith("experts."), sample_tokens)
              for name, weight_C in weights.items()}  # fmt: skip
    cached: dict[str, Tensor] = {}
    layer.to(hidden.states_STD.dtype)

    def see(name: str, x_BTC: Tensor) -> None:
        if name in inputs:
            inputs[name].update(x_BTC)
        else:  # "k" and "v"
            absmax_C = torch.maximum(x_BTC.amin(dim=(0, 1)).abs(), x_BTC.amax(dim=(0, 1)).abs())
            cached[name] = torch.maximum(cached[name], absmax_C) if name in cached else absmax_C

    model.advance(hidden, index, layer, see, watch_kv=True)
    for name, seen in inputs.items():
        gathered.take(tensor_name(index, name), seen, weights[name])
    gathered.tensors |= {f"layers.{index}.{name}_absmax": absmax_C.float() for name, absmax_C in cached.items()}


def weight_absmax(layer: nn.Module, site: Site) -> Tensor:
    """[C]: per channel of a site, the largest |weight| over all rows of all linears that read it."""
    return torch.stack([weight_of(layer.get_submodule(name)).abs().amax(dim=0) for name in site.readers]).amax(dim=0)


def weight_of(module: nn.Module) -> Tensor:
    """The weights [O, I] of a linear, plain or quantised, float32."""
    weight = module.weight_values() if hasattr(module, "weight_values") else module.weight
    return weight.detach().float()


def read_statistics(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """What `gather` left in stats.safetensors or samples.safetensors.

    Args:
        prefix: of the names to read, such as `layers.3.`; all by default.

    Raises:
        UserError: the file is missing or broken, or a tensor holds NaN or infinity: names the file and the tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{path}: missing or not whole ({error}); `dvc repro` makes it") from error
    require_finite(tensors, str(path))
    return tensors


def require_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse, with a UserError, a tensor of an artifact of `calibrate` that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} holds NaN or infinity; allowed: finite values; `dvc repro -f -s "
                            "calibrate` makes them anew")  # fmt: skip


def static_absmax(statistics: Mapping[str, Tensor], name: str, scale_C: Tensor | None = None) -> float:
    """The largest |x| of a tensor after smoothing: what a static scale covers.

    Args:
        name: as in `tensor_name`. scale_C: what the tensor is divided by; None: it is not smoothed.

    An expert that no calibration token reached has no range of its own: it gets that of the widest of its siblings,
    unsmoothed (its scale is 1), since a token may reach it when served.
    """
    absmax_C = statistics[f"{name}.absmax"]
    smoothed = float((absmax_C if scale_C is None else absmax_C / scale_C).max())
    layer, site = layer_and_site(name)
    if smoothed > 0 or not site.startswith("experts."):
        return smoothed
    ending = site.rpartition(".")[2]
    siblings = [tensor for key, tensor in statistics.items()
                if key.startswith(f"layers.{layer}.experts.") and key.endswith(f".{ending}.absmax")]  # fmt: skip
    return max(float(tensor.max()) for tensor in siblings)


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
        absmax_C = torch.maximum(x_NC.amin(dim=0).abs(), x_NC.amax(dim=0).abs())
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
    """coverage.json: over all tensors, and by tensor, the share of channels exceeded and of values clipped.

    An expert that the new text never reached counts as covered.
    """

    def shares(some: list[Coverage]) -> dict[str, float]:
        channels, values = sum(len(one.calibrated_C) for one in some), sum(one.num_values for one in some)
        return {
            "channels_exceeded_share": sum(one.num_exceeded for one in some) / channels,
            "clip_rate": sum(one.num_clipped for one in some) / max(values, 1),
            "beyond_channel_rate": sum(one.num_beyond_channel for one in some) / max(values, 1),
        }

    return {
        **shares(list(coverages.values())),
        "num_channels": sum(len(one.calibrated_C) for one in coverages.values()),
        "num_values": sum(one.num_values for one in coverages.values()),
        "tensors": {name: shares([one]) for name, one in coverages.items()},
    }
