"""calibrate: activation statistics of the policy, and everything that a quantised checkpoint is later held against.

Everything is in float32, whatever the checkpoint's dtype: the statistics and the measurements "before" are then free of
rounding. With calibrate.dtype=bfloat16 statistics are gathered from layers that compute in BF16, as an engine does; the
measurements stay. Nothing here depends on alpha or the scheme, so that no change of these runs it again. Layers are
loaded one after another, by each of four passes: the calibration text, the held-out text, the copy tasks, and the copy
tasks through a baseline that is known to be weak (static INT8 without smoothing): does the suite tell the two apart?

Files (S sequences, T tokens of each, C channels of a tensor, N tokens that passed it, D hidden, K KV heads, H head_dim;
`<tensor>` is `layers.<n>.<site>`, `<site>` as the family's `Site.name`: qkv, o, gate_up, down, experts.<e>.down):

    stats.safetensors       <tensor>.{absmax, min, max, first_absmax, rest_absmax, weight_absmax}  float32 [C]; first is
                            the first token of a sequence, rest all others (all tokens, of an expert's tensor);
                            weight_absmax is over all rows of all readers. Of an expert that no token reached: zeros.
                            <tensor>.token_norm  float32 [N]: L2 norm of each token, N = s * T + t (of an expert: in the
                            order of its tokens).
                            layers.<n>.{k_absmax, v_absmax}  float32 [K * H]: of keys as cached (rotated) and values.
    samples.safetensors     <tensor>  BF16 [n, C]: the same n = calibrate.sample_tokens tokens of every tensor, in their
                            order (of an expert: n of its own tokens, or as many as there were).
    stats.json              model_type, counts of tokens, readers of each site, absmax and p999 of each tensor, and
                            the tensors that no token reached (`unseen`).
    outliers.parquet        a row per tensor (`statistics.Gathered.outliers`).
    coverage.json           how far held-out text goes beyond the ranges (`statistics.coverage_summary`).
    calibration_tokens.parquet, heldout_tokens.parquet
                            a row per token: sequence i64, position i64, source str, token_id i64, predicted bool
                            (`text.Sequences.frame`; back by `text.sequences_from_frame`).
    heldout_nll.parquet     a row per predicted token: sequence i64, position i64 (of the token), source str, nll f64.
    heldout_hidden.safetensors  `hidden`  float32 [S, T, D] of the held-out text after the final norm: with the head of
                            the checkpoint it gives every distribution of the unquantised model.
    copy_tokens.parquet     the exact-copy suite, a row per token (`copying.CopyTasks.tokens`).
    copy.parquet, copy_weak.parquet  a row per task, of the policy and of the weak baseline (`copying.score_copies`);
                            the weak one runs on half the sequences of each kind, since it is so much worse.
    copying.json            whether the suite tells them apart (`copying.discriminates`).

The copy files are left out with calibrate.copying.sequences=0. Of a family whose layers are not known there are only
heldout_tokens.parquet and heldout_nll.parquet: it can still be served as it is, and `quantize` refuses it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from oneaxis.artifacts import write_json
from oneaxis.checkpoint.layerwise import Layerwise
from oneaxis.checkpoint.load import load_for_measuring, load_tokenizer, read_config
from oneaxis.config.schema import Calibrate, Gptq, QuantizeInt8, SiteAlpha, Smooth
from oneaxis.errors import UserError
from oneaxis.quantize import statistics as stats
from oneaxis.quantize.copying import discriminates, make_copy_tasks, score_copies
from oneaxis.quantize.families import decoder
from oneaxis.quantize.linears import linear_from, round_weight, weight_grid
from oneaxis.quantize.nll import hidden_nll, perplexity, whole_model_nll
from oneaxis.quantize.text import Sequences, pack

COPY_SEED = 20260502
WEAK = QuantizeInt8(
    kind="w8a8_int8_static",
    smooth=Smooth(
        alpha=0.5,
        site_alpha=SiteAlpha(qkv=None, o=None, gate_up=None, down=None),
        grid=[0.5],
        formula="absmax",
        sites=[],
        refine_steps=0,
    ),
    rounding="rtn",
    weight_range="absmax",
    gptq=Gptq(num_sequences=1, damping=0.01, act_order=True),
    kv="none",
    ignore=["lm_head"],
)
"""Known to lose much where activations have outliers (SmolLM2-135M: perplexity 15.5 to 34.9)."""


def calibrate(policy: Path, calibration: Path, heldout: Path, settings: Calibrate, out: Path) -> dict[str, float]:
    """Write the files above to `out`; return the metrics.

    Args:
        policy: a checkpoint folder. calibration, heldout: parquet with columns source, text.

    Raises:
        UserError: there is too little text, sequences are longer than the model's context, or a tensor holds NaN.
    """
    tokenizer, config = load_tokenizer(policy), read_config(policy)[0]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and settings.sequence_tokens > longest:
        raise UserError(f"calibrate.sequence_tokens={settings.sequence_tokens}: longer than the model's context; "
                        f"allowed: up to {longest}")  # fmt: skip
    text = pack(pl.read_parquet(calibration), tokenizer, settings.num_sequences, settings.sequence_tokens,
                origin=f"{calibration}: calibrate.num_sequences")  # fmt: skip
    unseen = pack(pl.read_parquet(heldout), tokenizer, settings.heldout_sequences, settings.sequence_tokens,
                  origin=f"{heldout}: calibrate.heldout_sequences")  # fmt: skip
    unseen.frame().write_parquet(out / "heldout_tokens.parquet")
    try:
        decoder(config)
    except UserError as error:
        _say(f"perplexity only; {error}")
        nll = whole_model_nll(load_for_measuring(policy, torch.float32)[0], unseen)
        nll.write_parquet(out / "heldout_nll.parquet")
        return _named(_nll_metrics(nll))
    text.frame().write_parquet(out / "calibration_tokens.parquet")

    model = Layerwise.open(policy)
    gathered = stats.gather(model, text.token_ids_ST, settings.batch_size, settings.sample_tokens,
                            getattr(torch, settings.dtype))  # fmt: skip
    if gathered.unseen:
        _say(f"no token reached {len(gathered.unseen)} of {len(gathered.rows)} tensors ({gathered.unseen[0]}): these "
             "experts are rounded unsmoothed; more or other text (calibrate.num_sequences) reaches them")  # fmt: skip
    coverages, nll = _measure_heldout(model, unseen, gathered.tensors, settings.batch_size, out)
    copying = _measure_copying(model, gathered.tensors, settings, longest, out)

    table = gathered.outliers()
    coverage = stats.coverage_summary(coverages)
    _save(gathered.tensors, out / "stats.safetensors")
    _save(gathered.samples, out / "samples.safetensors")
    write_json(out / "stats.json", _facts(model, text, gathered, table, settings))
    table.write_parquet(out / "outliers.parquet")
    write_json(out / "coverage.json", coverage)
    nll.write_parquet(out / "heldout_nll.parquet")
    metrics = _nll_metrics(nll) | {
        "outlier_ratio_max": table["ratio"].max(),
        "tensors_above_ratio_10": int((table["ratio"] > 10).sum()),
        "absmax_max": table["absmax"].max(),
        "channels_exceeded_share": coverage["channels_exceeded_share"],
        "clip_rate": coverage["clip_rate"],
        "beyond_channel_rate": coverage["beyond_channel_rate"],
        "tokens": text.token_ids_ST.numel(),
    }
    return _named(metrics | copying)


def _say(line: str) -> None:
    tqdm.write(f"oneaxis: calibrate: {line}", file=sys.stderr)


def _named(metrics: dict[str, Any]) -> dict[str, float]:
    return {f"calibrate/{name}": float(value) for name, value in metrics.items() if value is not None}


def _nll_metrics(nll: pl.DataFrame) -> dict[str, Any]:
    return {"perplexity": perplexity(nll), "nll": nll["nll"].mean(), "heldout_tokens": nll.height}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(0o644)


def _facts(
    model: Layerwise, text: Sequences, gathered: stats.Gathered, table: pl.DataFrame, settings: Calibrate
) -> dict[str, Any]:
    """stats.json."""
    description = model.decoder
    sites = {site.name: list(site.readers) for index in range(description.num_layers)
             for site in description.sites(index)}  # fmt: skip
    return {
        "model_type": description.model_type,
        "num_layers": description.num_layers,
        "num_kv_heads": description.heads.num_kv_heads,
        "head_dim": description.heads.head_dim,
        "num_tokens": text.token_ids_ST.numel(),
        "num_sequences": len(text.token_ids_ST),
        "sample_tokens": settings.sample_tokens,
        "dtype": settings.dtype,
        "tokens_by_source": dict(text.frame().group_by("source").len().sort("source").rows()),
        "sites": sites,
        "statistics": [*stats.CHANNEL_STATISTICS, "token_norm"],
        "p999": {"of": "|x| over all tokens and channels of a tensor", "by": "histogram, 8 significant bits",
                 "relative_error_below": 2**-7},
        "tensors": {stats.tensor_name(row["layer"], row["site"]): {
            "absmax": row["absmax"], "p999": row["p999"], "first_absmax": row["first_absmax"],
            "rest_absmax": row["rest_absmax"]} for row in table.iter_rows(named=True)},
        "unseen": gathered.unseen,
    }  # fmt: skip


def _measure_heldout(
    model: Layerwise, unseen: Sequences, statistics: dict[str, Tensor], batch_size: int, out: Path
) -> tuple[dict[str, stats.Coverage], pl.DataFrame]:
    """Coverage of every tensor, and the NLL of held-out text; writes heldout_hidden.safetensors."""
    coverages = {name.removesuffix(".absmax"): stats.Coverage(absmax_C)
                 for name, absmax_C in statistics.items() if name.endswith(".absmax")}  # fmt: skip
    hidden_STD = model.run(
        unseen.token_ids_ST,
        batch_size,
        see=lambda name, x_BTC: coverages[name].update(x_BTC),
        desc="calibrate: held-out text",
    )
    _save({"hidden": hidden_STD}, out / "heldout_hidden.safetensors")
    return coverages, hidden_nll(model.logits, hidden_STD, unseen)


class WeakBaseline(Layerwise):
    """The model with every linear in static INT8, without smoothing: one scale for each tensor, outliers and all."""

    statistics: Mapping[str, Tensor]

    def layer(self, index: int) -> nn.Module:
        """One decoder layer, its linears quantised."""
        layer = super().layer(index)
        for site in self.decoder.sites(index):
            absmax = stats.static_absmax(self.statistics, stats.tensor_name(index, site.name))
            for name in site.readers:
                linear = layer.get_submodule(name)
                weight_OI, bias_O = stats.weight_of(linear), getattr(linear, "bias", None)
                grid = weight_grid(weight_OI, WEAK)
                layer.set_submodule(name, linear_from(round_weight(weight_OI, grid), grid, bias_O, WEAK, absmax))
        return layer


def _measure_copying(
    model: Layerwise, statistics: Mapping[str, Tensor], settings: Calibrate, longest: int | None, out: Path
) -> dict[str, Any]:
    """Score the exact-copy suite on the policy and on the weak baseline; metrics without their prefix."""
    if not settings.copying.sequences:
        return {}
    tasks = make_copy_tasks(model.tokenizer, settings.copying, longest, COPY_SEED)
    if tasks.tokens.is_empty():
        return {}
    weak = WeakBaseline.open(model.folder)
    weak.statistics = statistics
    base_scores, weak_scores = score_copies(model, tasks), score_copies(weak, tasks.half())
    told = discriminates(base_scores.join(weak_scores, on=["kind", "sequence", "task"], how="semi"), weak_scores)
    if not told["discriminates"]:
        _say(told["why"])
    tasks.tokens.write_parquet(out / "copy_tokens.parquet")
    base_scores.write_parquet(out / "copy.parquet")
    weak_scores.write_parquet(out / "copy_weak.parquet")
    write_json(out / "copying.json", told)
    return {
        "copy_exact": base_scores["exact"].mean(),
        "copy_exact_weak": weak_scores["exact"].mean(),
        "copy_nll": base_scores["nll"].mean(),
        "copy_nll_weak": weak_scores["nll"].mean(),
        "copy_tasks": base_scores.height,
        "copy_discriminates": told["discriminates"],
    }
