"""Score every preference pair by CHES and keep the train pairs that a rule keeps.

From a checkpoint and `pairs.parquet` to the same table with scores and `kept`. The scored strings are the pairs' own
(prompt + response, no EOS appended), so the last token of a response counts as predicted and is not itself summed.
Held-out pairs are scored and always kept. Pairs that cannot be scored leave the table and are counted, by reason; none
is cut to fit.

Pairs are read, scored and written part by part. Of a part that is done its numbers alone stay in memory (some 100 bytes
a pair), and they lie on disk: a run that was killed goes on from the last part, to the same bytes.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from rapidfuzz.distance import Levenshtein
from scipy import stats
from tqdm import tqdm

from oneaxis.artifacts import sha256_file
from oneaxis.config.schema import PairFilter
from oneaxis.data.sample import drawn
from oneaxis.errors import RunError, UserError
from oneaxis.parts import folder_digest, found_or_made, open_parts
from oneaxis.preference.ches import ches_scores
from oneaxis.preference.forward import hidden_sums, load
from oneaxis.preference.pairs import Sequence, tokenize_pair

FEWEST_KEPT = 4
MORE = "more pairs (data.pairs.max_pairs, sample.max_prompts)"
NUM_BINS = 24
PAIRS_PER_PART = 256
IDS_LISTED = 1000
"""Of one kind, in the manifest."""

NUMBERS = {
    **dict.fromkeys(("ches", "ln_ches", "cosine", "edit_similarity"), pl.Float64),
    **dict.fromkeys(("chosen_tokens", "rejected_tokens", "prompt_tokens"), pl.Int64),
}
"""What is known of a scored pair. `cosine` is that of the mean hidden states of both responses (S+ and S-, whose length
a cosine does not see): the embedding similarity. `edit_similarity` is Levenshtein's, of the texts, 0 to 1."""
SCORES = {"pair_id": pl.String, "split": pl.String, **NUMBERS, "unusable": pl.String}
"""A part: one row a pair. `unusable` is the reason of a pair that has no scores."""
REASONS = ("no_prompt_token", "empty_response", "same_tokens", "prompt_too_long", "too_long")


def filter_pairs(
    checkpoint: Path,
    pairs: Path,
    config: PairFilter,
    out: Path,
    *,
    parts: Path | None = None,
    observed: dict[str, Any] | None = None,
    pairs_per_part: int = PAIRS_PER_PART,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write `pairs.parquet` and `distribution.csv` to `out`.

    Args:
        pairs: `pairs.parquet` of prepare_data.
        parts: where finished parts are kept until the run is done; None: a killed run starts anew.
        observed: filled with times and counts of the scoring.

    Returns:
        (metrics without prefix, notes).

    Raises:
        UserError: fewer than four train pairs are kept, or a pair cannot be rendered.
        RunError: a score is not finite.
    """
    folder = None
    if parts is not None:
        folder = parts / run_key(checkpoint, pairs, config, pairs_per_part)
        open_parts(folder)
    scores = score_pairs(checkpoint, pairs, config, folder, pairs_per_part, {} if observed is None else observed)
    usable = scores.filter(pl.col("unusable").is_null())
    unusable = {reason: scores.filter(pl.col("unusable") == reason)["pair_id"].sort().to_list() for reason in REASONS}
    train = usable.filter(pl.col("split") == "train")
    kept_ids = keep(dict(train.select("pair_id", config.score).iter_rows()), config.rule, config.value)
    if len(kept_ids) < FEWEST_KEPT:
        raise UserError(_too_few(len(kept_ids), train, unusable, config))
    if config.control_seed is not None:
        kept_ids = at_random(train["pair_id"].to_list(), len(kept_ids), config.control_seed)
    kept = pl.Series("pair_id", sorted(kept_ids), dtype=pl.String)
    scores = scores.with_columns(kept=pl.col("pair_id").is_in(kept.implode()) | (pl.col("split") != "train"))
    write_pairs(pairs, scores, out / "pairs.parquet", pairs_per_part)
    table = scores.filter(pl.col("unusable").is_null())
    distribution(table, config.score).write_csv(out / "distribution.csv")
    if folder:
        shutil.rmtree(folder)
    return _metrics(table, unusable, config), _notes(table, unusable, config)


def run_key(checkpoint: Path, pairs: Path, config: PairFilter, pairs_per_part: int) -> str:
    """What decides the parts, in one word: checkpoint, pairs, what bounds a batch, versions. The rule comes later."""
    decided = {
        "checkpoint": folder_digest(checkpoint),
        "pairs": sha256_file(pairs),
        "max_tokens": config.max_tokens,
        "batch_tokens": config.batch_tokens,
        "pairs_per_part": pairs_per_part,
        "columns": list(SCORES),
        "versions": [version("torch"), version("transformers"), version("rapidfuzz")],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def read_pairs(path: Path, pairs_per_part: int) -> Iterator[pl.DataFrame]:
    """The rows of a parquet file, so many at a time, in their order."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=pairs_per_part):
            yield pl.DataFrame(pl.from_arrow(batch))


def score_pairs(
    checkpoint: Path,
    pairs: Path,
    config: PairFilter,
    folder: Path | None,
    pairs_per_part: int,
    observed: dict[str, Any],
) -> pl.DataFrame:
    """`SCORES` of every pair, in the order of the file, from the parts that are there and those scored now."""
    model, tokenizer = load(checkpoint)
    tables: list[pl.DataFrame] = []
    found, pairs_found, computed, started = 0, 0, 0, time.monotonic()
    with pq.ParquetFile(pairs) as file:
        total = file.metadata.num_rows
    with tqdm(total=total, desc="scoring pairs", unit="pair") as bar:
        for number, rows in enumerate(read_pairs(pairs, pairs_per_part)):

            def make(rows: pl.DataFrame = rows) -> pl.DataFrame:
                nonlocal computed
                table, positions = score_part(model, tokenizer, rows, config)
                computed += positions
                return table

            table, there = found_or_made(folder, number, make)
            tables.append(table)
            found += there
            pairs_found += rows.height if there else 0
            bar.update(rows.height)
    seconds = time.monotonic() - started
    observed |= {
        "parts": len(tables), "parts_found": found, "score_s": round(seconds, 3), "positions_computed": computed,
        "pairs_per_s": round((total - pairs_found) / max(seconds, 1e-3), 2),
    }  # fmt: skip
    return pl.concat(tables) if tables else pl.DataFrame(schema=SCORES)


def score_part(model: Any, tokenizer: Any, pairs: pl.DataFrame, config: PairFilter) -> tuple[pl.DataFrame, int]:
    """`SCORES` of some pairs, and the positions computed.

    Raises:
        UserError: a pair cannot be rendered. RunError: a score is not finite.
    """
    tokens = [tokenize_pair(row, tokenizer, append_eos=False) for row in pairs.iter_rows(named=True)]
    reasons = [why_unusable(chosen, rejected, config.max_tokens) for chosen, rejected in tokens]
    places = [place for place, reason in enumerate(reasons) if reason is None]
    table = pairs.select("pair_id", "split").with_columns(pl.Series("unusable", reasons, dtype=pl.String))
    if not places:
        return table.select(pl.lit(None, dtype).alias(name) if name in NUMBERS else name
                            for name, dtype in SCORES.items()), 0  # fmt: skip
    usable = [tokens[place] for place in places]
    sums, computed = hidden_sums(model, usable, batch_tokens=config.batch_tokens)
    counts = np.array([[chosen.response_tokens, rejected.response_tokens] for chosen, rejected in usable])
    scores = ches_scores(sums[:, 0], sums[:, 1], counts[:, 0], counts[:, 1])
    texts = pairs[places].select("chosen", "rejected").iter_rows()
    numbers = pl.DataFrame({
        "place": places, "ches": scores.ches, "ln_ches": scores.ln_ches, "cosine": scores.cosine,
        "edit_similarity": [Levenshtein.normalized_similarity(a, b) for a, b in texts],
        "chosen_tokens": counts[:, 0], "rejected_tokens": counts[:, 1],
        "prompt_tokens": [chosen.start for chosen, _ in usable],
    })  # fmt: skip
    if not np.isfinite(scores.ches).all():
        wrong = table["pair_id"][places[int(np.argmin(np.isfinite(scores.ches)))]]
        raise RunError(f"the CHES of pair {wrong} is not finite: the model's hidden states are not, in float32")
    joined = table.with_row_index("place").join(numbers, on="place", how="left", maintain_order="left")
    return joined.select(pl.col(name).cast(dtype) for name, dtype in SCORES.items()), computed


def why_unusable(chosen: Sequence, rejected: Sequence, max_tokens: int) -> str | None:
    """Why a pair cannot be scored, or trained on; None where it can."""
    if chosen.start >= max_tokens:
        return "prompt_too_long"
    if chosen.start < 1:
        return "no_prompt_token"
    if chosen.degenerate or rejected.degenerate:
        return "empty_response"
    if max(len(chosen.ids), len(rejected.ids)) > max_tokens:
        return "too_long"
    return "same_tokens" if chosen.ids == rejected.ids else None


def write_pairs(pairs: Path, scores: pl.DataFrame, path: Path, pairs_per_part: int) -> None:
    """The rows of `pairs` that could be scored, with `scores` beside them, both read in the same order."""
    writer: pq.ParquetWriter | None = None
    begin = 0
    for rows in read_pairs(pairs, pairs_per_part):
        part = scores[begin : begin + rows.height]
        begin += rows.height
        assert rows["pair_id"].equals(part["pair_id"])
        both = rows.drop("kept", strict=False).hstack(part.select(*NUMBERS, "unusable", "kept"))
        arrow = (
            both.filter(pl.col("unusable").is_null()).drop("unusable").to_arrow(compat_level=pl.CompatLevel.oldest())
        )
        writer = writer or pq.ParquetWriter(path, arrow.schema, compression="zstd")
        writer.write_table(arrow)
    assert writer is not None, "no pairs"
    writer.close()


def keep(scores: dict[str, float], rule: str, value: float) -> set[str]:
    """The ids that a rule keeps. Lower scores are kept first; equal scores in the order of their ids.

    Args:
        scores: pair id to score.
        rule: all; quantile (the lowest share `value`, rounded down); count (the lowest `value`); threshold
            (scores <= `value`).
    """
    ordered = sorted(scores, key=lambda pair_id: (scores[pair_id], pair_id))
    if rule == "all":
        return set(ordered)
    if rule == "threshold":
        return {pair_id for pair_id in ordered if scores[pair_id] <= value}
    # Rounded first, or 0.29 of 100 would be 28.
    count = math.floor(round(value * len(ordered), 9)) if rule == "quantile" else int(value)
    return set(ordered[:count])


def at_random(pair_ids: Iterable[str], count: int, seed: int) -> set[str]:
    """`count` of the ids, drawn by the hash of seed and id: whatever their order or scores."""
    rows = [{"pair_id": pair_id} for pair_id in pair_ids]
    return {row["pair_id"] for row in drawn(rows, lambda row: row["pair_id"], seed=seed, table="control")[:count]}


def distribution(table: pl.DataFrame, score: str) -> pl.DataFrame:
    """Histogram of a score for `dvc plots` (bar, x = the bin's centre, y = count, one colour an outcome).

    Returns:
        columns <score> (centre), bin_low, bin_high, count, outcome in {kept, dropped, heldout}.
    """
    values = table[score].to_numpy()
    edges = np.histogram_bin_edges(values, bins=NUM_BINS)
    outcome = table.select(
        pl.when(pl.col("split") != "train").then(pl.lit("heldout"))
        .when("kept").then(pl.lit("kept")).otherwise(pl.lit("dropped"))
    ).to_series()  # fmt: skip
    parts = []
    for name in ("kept", "dropped", "heldout"):
        counts, _ = np.histogram(values[(outcome == name).to_numpy()], bins=edges)
        parts.append(pl.DataFrame({
            score: (edges[:-1] + edges[1:]) / 2, "bin_low": edges[:-1], "bin_high": edges[1:],
            "count": counts.astype(np.int64), "outcome": [name] * len(counts),
        }))  # fmt: skip
    return pl.concat(parts)


def correlation(first: np.ndarray, second: np.ndarray) -> dict[str, float | None]:
    """Spearman's and Pearson's correlation; None where one side is constant or fewer than three pairs remain."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"spearman": None, "pearson": None}
    return {
        "spearman": float(stats.spearmanr(first, second).statistic),
        "pearson": float(stats.pearsonr(first, second).statistic),
    }


def _other(score: str) -> str:
    return "ches" if score == "ln_ches" else "ln_ches"


def _correlations(table: pl.DataFrame, score: str) -> dict[str, dict[str, float | None]]:
    values = table[score].to_numpy()
    difference = (table["chosen_tokens"] - table["rejected_tokens"]).to_numpy()
    return {
        "edit_similarity": correlation(values, table["edit_similarity"].to_numpy()),
        "length_difference": correlation(values, difference),
        "cosine": correlation(values, table["cosine"].to_numpy()),
        _other(score): correlation(values, table[_other(score)].to_numpy()),
    }


def overlaps(train: pl.DataFrame, score: str) -> dict[str, dict[str, float]]:
    """Which of the dropped pairs another measure would have dropped, were as many dropped by it, the highest first.

    Args:
        train: the scored train pairs with `kept`. score: the one that the rule went by.

    Returns:
        per measure: dropped_too, its share of the dropped, and the share to be expected of a random choice.
    """
    dropped = set(train.filter(~pl.col("kept"))["pair_id"])
    if not dropped:
        return {}
    found = {}
    for other in ("edit_similarity", "cosine", _other(score)):
        highest = train.sort(other, "pair_id", descending=[True, False])["pair_id"].head(len(dropped))
        too = len(dropped & set(highest))
        found[other] = {"dropped_too": too, "share": too / len(dropped), "by_chance": len(dropped) / train.height}
    return found


def _metrics(table: pl.DataFrame, unusable: dict[str, list[str]], config: PairFilter) -> dict[str, float]:
    train = table.filter(pl.col("split") == "train")
    kept = train.filter("kept")
    metrics = {
        "pairs": float(table.height),
        "train_pairs": float(train.height),
        "kept": float(kept.height),
        "dropped": float(train.height - kept.height),
        "unusable": float(sum(map(len, unusable.values()))),
        "ln_ches_median": float(np.median(train["ln_ches"].to_numpy())),
        "ches_median": float(np.median(train["ches"].to_numpy())),
        "edit_similarity_kept": float(np.mean(kept["edit_similarity"].to_numpy())),
    }
    if config.control_seed is None:
        metrics[f"{config.score}_cutoff"] = float(np.max(kept[config.score].to_numpy()))
    if kept.height < train.height:
        left_out = train.filter(~pl.col("kept"))
        metrics["edit_similarity_dropped"] = float(np.mean(left_out["edit_similarity"].to_numpy()))
        found = overlaps(train, config.score)
        metrics["edit_overlap"] = found["edit_similarity"]["share"]
        metrics["embedding_overlap"] = found["cosine"]["share"]
    for name, other in (("ches_edit_correlation", "edit_similarity"), ("ches_length_correlation", "length_difference")):
        value = _correlations(table, config.score)[other]["spearman"]
        if value is not None:
            metrics[name] = value
    return metrics


def _notes(table: pl.DataFrame, unusable: dict[str, list[str]], config: PairFilter) -> dict[str, Any]:
    train = table.filter(pl.col("split") == "train")
    dropped = train.filter(~pl.col("kept"))
    return {
        "score": config.score,
        "rule": config.rule,
        "value": config.value,
        "control_seed": config.control_seed,
        "cutoff": float(np.max(train.filter("kept")[config.score].to_numpy())) if config.control_seed is None else None,
        "train": train.height,
        "kept": train.height - dropped.height,
        "dropped": dropped.height,
        "dropped_ids": sorted(dropped["pair_id"])[:IDS_LISTED],
        "overlap": overlaps(train, config.score),
        "heldout": table.height - train.height,
        "unusable": {reason: len(ids) for reason, ids in unusable.items()},
        "unusable_ids": {reason: ids[:IDS_LISTED] for reason, ids in unusable.items() if ids},
        "unusable_policy": f"left out, never cut: prompt + response longer than {config.max_tokens} tokens, responses "
        "without a token of their own or equal in tokens",
        "correlations": {score: _correlations(table, score) for score in ("ches", "ln_ches")},
        "scored_text": "prompt + response as given, no EOS appended; hidden states after the final norm, float32",
    }


def _too_few(kept: int, train: pl.DataFrame, unusable: dict[str, list[str]], config: PairFilter) -> str:
    lost = ", ".join(f"{len(ids)} {reason.replace('_', ' ')}" for reason, ids in unusable.items() if ids)
    remedy = {
        "all": MORE,
        "quantile": f"a larger pairs.value (now {config.value:g}) or {MORE}",
        "count": f"a larger pairs.value (now {config.value:g}) or {MORE}",
        "threshold": f"a higher pairs.value (now {config.value:g})",
    }[config.rule]
    longer = "" if not (unusable["too_long"] or unusable["prompt_too_long"]) else (
        f", or a larger pairs.max_tokens (now {config.max_tokens})"
    )  # fmt: skip
    scores = train[config.score].sort()
    spread = f"; their {config.score} goes from {scores[0]:.4g} to {scores[-1]:.4g}" if train.height else ""
    return (
        f"pairs.rule={config.rule} keeps {kept} of {train.height} train pairs{f' ({lost})' if lost else ''}{spread}; "
        f"allowed: at least {FEWEST_KEPT}: {remedy}{longer}"
    )
