"""calibrate: activation statistics of the policy, and everything that a quantised checkpoint is later held against.

Everything is in float32, whatever the checkpoint's dtype: the statistics and the measurements "before" are then free of
rounding. Nothing here depends on alpha or the scheme, so that no change of these runs it again. Layers are loaded one
after another, by each of four passes: the calibration text, the held-out text, the copy tasks, and the copy tasks
through a baseline that is known to be weak (static INT8 without smoothing): does the suite tell the two apart?

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
    copy.parquet, copy_weak.parquet  a row per task, of the policy and of the weak baseline (`copying.score_copies`).
    copying.json            whether the suite tells them apart (`copying.discriminates`).

The copy files are left out with calibrate.copying.sequences=0. Of a family whose layers are not known there are only
heldout_tokens.parquet and heldout_nll.parquet: it can still be served as it is, and `quantize` refuses it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from oneaxis.artifacts import write_json
from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.config.schema import Calibrate
from oneaxis.errors import UserError
from oneaxis.quantize import statistics as stats
from oneaxis.quantize.decoder import SITES, decoder_layers
from oneaxis.quantize.nll import heldout_nll, perplexity
from oneaxis.quantize.text import pack


def calibrate(policy: Path, calibration: Path, heldout: Path, settings: Calibrate, out: Path) -> dict[str, float]:
    """Write stats.safetensors, stats.json, outliers, coverage, held-out tokens and NLL to `out`; return the metrics.

    Args:
        policy: a checkpoint folder. calibration, heldout: parquet with columns source, text.

    A family that cannot be smoothed has no statistics, only its perplexity: it can still be served as it is, and
    `quantize` refuses it.

    Raises:
        UserError: there is too little text, or sequences are longer than the model's context.
    """
    model, tokenizer = load_for_measuring(policy, torch.float32)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and settings.sequence_tokens > longest:
        raise UserError(f"calibrate.sequence_tokens={settings.sequence_tokens}: longer than the model's context; "
                        f"allowed: up to {longest}")  # fmt: skip
    text = pack(pl.read_parquet(calibration), tokenizer, settings.num_sequences, settings.sequence_tokens,
                origin=f"{calibration}: calibrate.num_sequences")  # fmt: skip
    unseen = pack(pl.read_parquet(heldout), tokenizer, settings.heldout_sequences, settings.sequence_tokens,
                  origin=f"{heldout}: calibrate.heldout_sequences")  # fmt: skip

    unseen.frame().write_parquet(out / "heldout_tokens.parquet")
    try:
        layers = decoder_layers(model)
    except UserError as error:
        tqdm.write(f"oneaxis: calibrate: perplexity only; {error}", file=sys.stderr)
        nll = heldout_nll(model, unseen, settings.batch_size)
        nll.write_parquet(out / "heldout_nll.parquet")
        return _named({"perplexity": perplexity(nll), "nll": nll["nll"].mean(), "heldout_tokens": nll.height})

    gathered = stats.gather(model, text.token_ids_ST, settings.batch_size)
    weights = stats.weight_absmax(model)
    coverages = {name: stats.Coverage(seen.absmax_C) for name, seen in gathered.items()}
    nll = heldout_nll(model, unseen, settings.batch_size, watch=_covering(model, coverages))

    table = stats.outliers(gathered)
    coverage = stats.coverage_summary(coverages)
    save_file(stats.to_tensors(gathered, weights), out / "stats.safetensors")
    (out / "stats.safetensors").chmod(0o644)
    write_json(out / "stats.json", {
        "model_type": model.config.model_type,
        "num_layers": len(layers),
        "num_tokens": text.token_ids_ST.numel(),
        "num_sequences": len(text.token_ids_ST),
        "tokens_by_source": _tokens_by_source(text.frame()),
        "sites": {site: list(linears) for site, linears in SITES.items()},
        "statistics": ["absmax", "min", "max", "first_absmax", "rest_absmax", "weight_absmax"],
        "p999": {"of": "|x| over all tokens and channels of a tensor", "by": "histogram, 8 significant bits",
                 "relative_error_below": 2**-7},
        "tensors": {stats.tensor_name(row["layer"], row["site"]): {
            "absmax": row["absmax"], "p999": row["p999"], "first_absmax": row["first_absmax"],
            "rest_absmax": row["rest_absmax"]} for row in table.iter_rows(named=True)},
    })  # fmt: skip
    table.write_parquet(out / "outliers.parquet")
    write_json(out / "coverage.json", coverage)
    nll.write_parquet(out / "heldout_nll.parquet")
    metrics = {
        "perplexity": perplexity(nll),
        "nll": nll["nll"].mean(),
        "outlier_ratio_max": table["ratio"].max(),
        "tensors_above_ratio_10": int((table["ratio"] > 10).sum()),
        "absmax_max": table["absmax"].max(),
        "channels_exceeded_share": coverage["channels_exceeded_share"],
        "clip_rate": coverage["clip_rate"],
        "beyond_channel_rate": coverage["beyond_channel_rate"],
        "tokens": text.token_ids_ST.numel(),
        "heldout_tokens": nll.height,
    }
    return _named(metrics)


def _named(metrics: dict[str, Any]) -> dict[str, float]:
    return {f"calibrate/{name}": float(value) for name, value in metrics.items() if value is not None}


def _tokens_by_source(tokens: pl.DataFrame) -> dict[str, int]:
    return dict(tokens.group_by("source").len().sort("source").rows())


@contextmanager
def _covering(model: torch.nn.Module, coverages: dict[str, stats.Coverage]) -> Iterator[None]:
    with stats.watching(model, lambda name, x_BTC: coverages[name].update(x_BTC)):
        yield
