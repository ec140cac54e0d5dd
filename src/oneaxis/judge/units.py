"""What a metric is paired by: from the recorded tables of two arms to the same units measured in both.

    metric                                  unit                          taken as
    quantize/perplexity_after,              held-out sequence             mean NLL per sequence; the effect through
    calibrate/perplexity                                                  the ratio of the perplexities
    quantize/delta_nll, calibrate/nll,      held-out sequence             difference of the means over tokens
    quantize/kl, quantize/top1_agreement
    quantize/copy_exact_after               copy sequence                 difference of the share of exact copies
    score/<task>/<scorer>                   item                          right or wrong
    train_dpo/{chosen,rejected,margin}_*    held-out pair                 difference of log-probability
    train_dpo/escape_<text>_*               benign prompt                 difference of log-probability
    train_dpo/{refusal,empty}_rate_*        benign prompt                 refused (or left empty) or not
    diverge/{alone,loaded}/several_share,   prompt                        several outputs (or another commonest one),
    diverge/modal_differs_share                                           or not
    extract/<part>/<measure>                document                      the measure: right or wrong, failed or not,
                                                                          a mass, a number of tokens
    serve/cold_start_s, sweep/<cell>/*,     repetition (alternating runs  difference
    sweep/<shape>/capacity_tok_s,           of one session)
    sweep/<shape>/step_*
    split/*_ms
    serve/kv_cache_tokens, split/*,         none: the settings decide     difference, without an interval: equal in
    quantize/checkpoint_bytes               it, and nothing is drawn      all runs of an arm, or not to be trusted

Any other metric has no unit: its difference has no interval, and no claim can rest on it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from oneaxis.diverge.measure import per_prompt
from oneaxis.errors import UserError
from oneaxis.judge.records import Record
from oneaxis.load.levels import LABEL, level_name
from oneaxis.load.metrics import requests_needed
from oneaxis.score.metrics import SCORERS
from oneaxis.structured.measures import MEASURES, of_part

Kind = Literal["perplexity", "nll", "copies", "items", "pairs", "escapes", "answers", "prompts", "documents",
               "repetitions", "requests", "exact", "none"]  # fmt: skip
Better = Literal["lower", "higher"]

CELL_LATENCY = re.compile(rf"^sweep/(?P<shape>[^/]+)/(?P<level>{LABEL})/(?P<name>[^/]+)$")
TRAINED = re.compile(r"^train_dpo/(chosen|rejected|margin)_(logp_before|logp_after|delta)$")
ESCAPE = re.compile(r"^train_dpo/escape_(?P<text>.+)_(?P<what>logp_before|logp_after|delta)$")
ANSWERED = re.compile(r"^train_dpo/(?P<share>refusal|empty)_rate_(?P<when>before|after)$")
TIMED_IN_CELL = re.compile(
    r"^((ttft|itl|itl_max|tpot|e2e)_p\d+_ms|attainment|goodput_tok_s|output_tok_s|achieved_rate_rps|failed"
    r"|tokens_per_step|accepted_per_draft|tokens_per_verification|accepted_at_\d+)$"
)

OF_A_SHAPE = re.compile(r"^sweep/[^/]+/(capacity_tok_s|step_base_ms|step_per_request_ms)$")

DIVERGED = re.compile(r"^diverge/(?P<metric>(alone|loaded)/several_share|modal_differs_share)$")
EXTRACTED = re.compile(rf"^extract/(?P<part>[^/]+)/(?P<measure>{'|'.join(MEASURES)})$")

OF_SPLIT = re.compile(r"^split/(prefill|transfer|first_token|decode|client|tpot)_ms$")

EXACT = ("serve/kv_cache_tokens", "quantize/checkpoint_bytes", "split/transferred_share", "split/answers_equal")
"""Metrics that follow from the settings and the checkpoint alone."""

MOVED = {"quantize/kl": ("kl", 0.0), "quantize/top1_agreement": ("same_top1", 1.0)}
"""Metric -> its column of quality.parquet, and what that is where nothing was changed."""


@dataclass(frozen=True)
class Problem:
    """Why a comparison is not to be trusted, or cannot decide, or what to keep in mind."""

    kind: Literal["invalid", "unresolved", "reject", "warning"]
    reason: str
    recommendation: str = ""


@dataclass(frozen=True)
class Paired:
    """The same units in both arms, in one order."""

    baseline: np.ndarray
    """n numbers; of items 0 or 1."""
    candidate: np.ndarray
    baseline_value: float
    """The metric itself, as its definition says (of repetitions their mean)."""
    candidate_value: float
    num_tasks: int = 0
    """Of copies: the strings, several in a unit."""
    share: bool = False
    """The metric is a share by its definition (`is_share`)."""


def kind_of(metric: str) -> Kind:
    """By what a metric is paired."""
    if metric in ("quantize/perplexity_after", "calibrate/perplexity"):
        return "perplexity"
    if metric in ("quantize/delta_nll", "calibrate/nll", *MOVED):
        return "nll"
    if metric == "quantize/copy_exact_after":
        return "copies"
    scored = metric.split("/")
    if len(scored) == 3 and scored[0] == "score" and scored[2] in SCORERS:
        return "items"
    if TRAINED.match(metric):
        return "pairs"
    if ESCAPE.match(metric):
        return "escapes"
    if ANSWERED.match(metric):
        return "answers"
    if DIVERGED.match(metric):
        return "prompts"
    if EXTRACTED.match(metric):
        return "documents"
    if metric in EXACT:
        return "exact"
    cell = CELL_LATENCY.match(metric)
    if metric == "serve/cold_start_s" or OF_A_SHAPE.match(metric) or OF_SPLIT.match(metric):
        return "repetitions"
    if cell and TIMED_IN_CELL.match(cell["name"]):
        return "repetitions"
    return "none"


UNIT_NAMES: dict[Kind, str] = {
    "perplexity": "held-out sequence",
    "nll": "held-out sequence",
    "copies": "copy sequence",
    "items": "item",
    "pairs": "held-out pair",
    "escapes": "benign prompt",
    "answers": "benign prompt",
    "prompts": "prompt",
    "documents": "document",
    "repetitions": "repetition",
    "requests": "request",
    "exact": "run",
    "none": "",
}


def better_of(metric: str) -> Better | None:
    """Which way is better, where a name says it; None where it does not."""
    name = metric.rpartition("/")[2]
    if metric.startswith("diverge/"):
        lower = r"unique_(mean|max)|(several|diverged|modal_differs)_share|flip_rate|diverged_at_500"
        higher = r"modal_share|agree_with_alone|first_divergence_(min|median)"
        return "lower" if re.fullmatch(lower, name) else "higher" if re.fullmatch(higher, name) else None
    if EXTRACTED.match(metric):
        if name.endswith(("_unknown", "_kept", "_confidence")):
            return None
        return "higher" if name == "exact" or name.endswith("_right") else "lower"
    if re.search(
        r"perplexity|nll|^kl$|^step_|_ms$|ttft|itl|tpot|e2e|cold_start|failed|rejected|escape|refusal_rate|empty_rate|error",
        name,
    ):
        return "lower"
    higher = (
        r"kv_cache_tokens|goodput|attainment|capacity|tok_s|tokens_per|accepted|chosen|margin|achieved|agreement"
        r"|copy_exact|transferred_share|answers_equal"
    )
    if kind_of(metric) == "items" or re.search(higher, name):
        return "higher"
    return None


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 by its definition, so that no more than all of it can be gained or lost."""
    if kind_of(metric) in ("items", "answers", "prompts", "copies"):
        return True
    if extracted := EXTRACTED.match(metric):
        return extracted["measure"] != "tokens"
    name = metric.rpartition("/")[2]
    shares = r"attainment|accepted_at_\d+|top1_agreement|transferred_share|answers_equal"
    return re.fullmatch(shares, name) is not None


def share_problem(metric: str, bar: float, margin: float | None) -> str:
    """What is wrong with a bar or a margin on a share that no outcome could reach; empty where nothing is."""
    name, value = ("margin", margin) if margin is not None else ("bar", bar)
    if value < 1 or not is_share(metric):
        return ""
    return f"{name}={value:g}: {metric} is a share, between 0 and 1; allowed: 0 or more, and less than 1"


def unit_of_measure(metric: str) -> str:
    """The unit in which a metric's value stands."""
    for ending, unit in (("_tok_s", "tok/s"), ("_rps", "req/s"), ("_ms", "ms"), ("_s", "s")):
        if metric.endswith(ending):
            return unit
    if metric == "quantize/top1_agreement":
        return ""
    return {"nll": "nats/token", "pairs": "nats", "escapes": "nats"}.get(kind_of(metric), "")


def pair(metric: str, baseline: Sequence[Record], candidate: Sequence[Record]) -> Paired | Problem:
    """The units of a metric in both arms; a problem where they are missing or are not the same.

    Args:
        baseline, candidate: the repetitions of each arm in their order, at least one; only timings use more than the
            first.
    """
    kind = kind_of(metric)
    if kind == "none":
        return Problem(
            "unresolved",
            "no unit of pairing: a difference without an interval cannot be accepted",
            "claim a metric that is paired by sequence, item, pair or repetition (docs/verdicts.md lists them)",
        )
    if kind == "repetitions":
        return _repetitions(metric, baseline, candidate)
    if kind == "exact":
        return _exact(metric, baseline, candidate)
    first, second = baseline[0], candidate[0]
    if kind == "items":
        return _items(metric, first, second)
    if kind == "pairs":
        return _heldout_pairs(metric, first, second)
    if kind in ("escapes", "answers"):
        return _benign_prompts(metric, first, second)
    if kind == "copies":
        return _copies(first, second)
    if kind == "prompts":
        return _repeated_prompts(metric, first, second)
    if kind == "documents":
        return _documents(metric, first, second)
    return _sequences(metric, first, second)


def _missing(record: Record, file: str) -> Problem:
    return Problem(
        "invalid", f"{record.name}: artifacts/{file} is missing", "run the point to its end: `oneaxis run -m --resume`"
    )


def _other_units(what: str) -> Problem:
    return Problem(
        "unresolved", f"the arms were not measured on the same {what}: no unit is in both",
        "an axis that changes what is measured cannot be judged on it; choose a metric that the axis leaves as it is",
    )  # fmt: skip


def _changed(record: Record) -> bool:
    """Whether weights or the KV cache are quantised."""
    settings = record.settings.get("quantize", {})
    return any(settings.get(key, "none") != "none" for key in ("kind", "kv"))


# --- perplexity -----------------------------------------------------------------------------------------------------


def _nll(metric: str, record: Record) -> pl.DataFrame | Problem:
    """NLL per token of what the metric speaks of; an arm that is not quantised is measured as calibrated."""
    after, before = (
        _table(record, stage, "heldout_nll.parquet", ("sequence", "position", "nll"))
        for stage in ("quantize", "calibrate")
    )
    if metric.startswith("calibrate/") or not _changed(record):
        return _missing(record, "calibrate/heldout_nll.parquet") if before is None else before
    return _missing(record, "quantize/heldout_nll.parquet") if after is None else after


def _moved(metric: str, record: Record) -> pl.DataFrame | Problem:
    """How far each token moved from the policy's float32, as column nll; where nothing was changed, not at all."""
    column, same = MOVED[metric]
    if _changed(record):
        table = _table(record, "quantize", "quality.parquet", ("sequence", "position", column))
        if table is None:
            return _missing(record, "quantize/quality.parquet")
        return table.with_columns(nll=pl.col(column).cast(pl.Float64))
    before = _nll("calibrate/nll", record)
    return before if isinstance(before, Problem) else before.with_columns(nll=pl.lit(same))


def _table(
    record: Record, stage: str, name: str, numbers: Sequence[str] = (), others: Sequence[str] = ()
) -> pl.DataFrame | None:
    """A table of a stage that has these columns; None when it is absent or has no rows.

    Args:
        numbers: columns that are computed with (true and false are numbers too).

    Raises:
        UserError: when it is no table, or lacks one of them.
    """
    table = record.results.table(stage, name)
    if table is None:
        return None
    for column in (*numbers, *others):
        found = table.schema.get(column)
        if found is None or (column in numbers and not (found.is_numeric() or found in (pl.Boolean, pl.Null))):
            path, said = record.results.folder / stage / name, "no column" if found is None else f"{found} in column"
            raise UserError(f"{path}: {said} {column}; allowed: the table that {stage} writes (`oneaxis verify`)")
    return table


def _sequences(metric: str, baseline: Record, candidate: Record) -> Paired | Problem:
    tables = []
    for record in (baseline, candidate):
        table = _moved(metric, record) if metric in MOVED else _nll(metric, record)
        if isinstance(table, Problem):
            return table
        if metric == "quantize/delta_nll":
            before = _nll("calibrate/nll", record)
            if isinstance(before, Problem):
                return before
            joined = table.join(before, on=["sequence", "position"], how="inner", suffix="_before")
            if joined.height != table.height or joined.height != before.height:
                said = f"{record.name}: NLL before and after are not of the same tokens"
                return Problem("invalid", said, "run the point again")
            table = joined.with_columns(nll=pl.col("nll") - pl.col("nll_before"))
        tables.append(table.sort("sequence", "position"))
    one, other = tables
    # Another tokenizer packs another text into sequences of the same length: the tokens themselves are compared.
    tokens = [record.results.table("calibrate", "heldout_tokens.parquet") for record in (baseline, candidate)]
    same_tokens = tokens[0] is None or tokens[1] is None or tokens[0].equals(tokens[1])
    if not same_tokens or not one.select("sequence", "position").equals(other.select("sequence", "position")):
        return _other_units("tokens of the held-out text")
    sums = [_per_cluster(table, ["sequence"], "nll") for table in tables]
    values = [float(each.mean()) for each in sums]
    if kind_of(metric) == "perplexity":
        values = [math.exp(value) for value in values]
    return Paired(sums[0], sums[1], values[0], values[1])


def _per_cluster(table: pl.DataFrame, clusters: list[str], column: str) -> np.ndarray:
    """Sums per cluster over the mean size of one: their mean is that over all rows, whatever a cluster's size."""
    sums = table.group_by(clusters).agg(pl.col(column).cast(pl.Float64).sum()).sort(clusters)[column].to_numpy()
    return sums / (table.height / len(sums))


# --- copies ---------------------------------------------------------------------------------------------------------


def _copies(baseline: Record, candidate: Record) -> Paired | Problem:
    """Share of exact copies per sequence; an arm that is not quantised copies as calibrated."""
    tables = []
    for record in (baseline, candidate):
        told = record.results.document("calibrate", "copying.json")
        if told and not told["discriminates"]:
            return Problem("unresolved", "the exact-copy suite cannot tell this model from one known to be damaged: "
                           "equal scores prove nothing", "claim another metric, or set calibrate.copying.sequences "
                           "higher")  # fmt: skip
        stage = "quantize" if _changed(record) else "calibrate"
        table = _table(record, stage, "copy.parquet", ("sequence", "num_tokens", "exact"), ("kind", "task"))
        if table is None:
            return _missing(record, f"{stage}/copy.parquet")
        tables.append(table.sort("kind", "sequence", "task"))
    tokens = [record.results.table("calibrate", "copy_tokens.parquet") for record in (baseline, candidate)]
    same_tokens = tokens[0] is None or tokens[1] is None or tokens[0].equals(tokens[1])
    keys = ["kind", "sequence", "task", "num_tokens"]
    if not same_tokens or not tables[0].select(keys).equals(tables[1].select(keys)):
        return _other_units("strings to copy")
    first, second = (_per_cluster(table, ["kind", "sequence"], "exact") for table in tables)
    return Paired(first, second, float(first.mean()), float(second.mean()), num_tasks=tables[0].height)


# --- items ----------------------------------------------------------------------------------------------------------


def _items(metric: str, baseline: Record, candidate: Record) -> Paired | Problem:
    _, task, scorer = metric.split("/")
    columns = []
    for record in (baseline, candidate):
        table = _table(record, "score", "items_scored.parquet", (f"{scorer}_correct",), ("task", "item_id"))
        if table is None:
            return _missing(record, "score/items_scored.parquet")
        own = table.filter(pl.col("task") == task).select("item_id", right=pl.col(f"{scorer}_correct")).drop_nulls()
        columns.append(own.sort("item_id"))
    one, other = columns
    if one.is_empty() and other.is_empty():
        said = f"no item of {task} was scored by {scorer}"
        return Problem("unresolved", said, "see `score` in the settings, and artifacts/score")
    if one["item_id"].to_list() != other["item_id"].to_list():
        return _other_units(f"items of {task}")
    first, second = (column["right"].cast(pl.Float64).to_numpy() for column in columns)
    return Paired(first, second, float(first.mean()), float(second.mean()))


# --- preference pairs -----------------------------------------------------------------------------------------------


def _heldout_pairs(metric: str, baseline: Record, candidate: Record) -> Paired | Problem:
    """Log-probabilities per held-out pair. An untrained arm stands where the trained one began."""
    match = TRAINED.match(metric)
    assert match
    numbers = [f"{side}_{when}" for side in ("chosen", "rejected") for when in ("before", "after")]
    arms = _trained(baseline, candidate, "heldout.parquet", numbers, ["pair_id"])
    if isinstance(arms, Problem):
        return arms
    columns = []
    for read, none in arms:
        values = {}
        for when in ("before", "after"):
            # With SFT in between, the other arm's reference is no longer the fetched model that this arm is.
            began = "source" if "chosen_source" in read.columns else "before"
            taken = began if none else when
            chosen, rejected = (pl.col(f"{side}_{taken}") for side in ("chosen", "rejected"))
            values[when] = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected}[match[1]]
        wanted = {"logp_before": values["before"], "logp_after": values["after"],
                  "delta": values["after"] - values["before"]}[match[2]]  # fmt: skip
        columns.append(read.select("pair_id", value=wanted).sort("pair_id"))
    if columns[0]["pair_id"].to_list() != columns[1]["pair_id"].to_list():
        return _other_units("held-out pairs")
    first, second = (column["value"].to_numpy() for column in columns)
    return Paired(first, second, float(first.mean()), float(second.mean()))


def _trained(
    baseline: Record, candidate: Record, file: str, numbers: Sequence[str], others: Sequence[str]
) -> list[tuple[pl.DataFrame, bool]] | Problem:
    """Of both arms the table of train_dpo to read, and whether the arm was not trained and it is the other's."""
    tables = [_table(record, "train_dpo", file, numbers, others) for record in (baseline, candidate)]
    untrained = [record.settings.get("train", {}).get("kind") == "none" for record in (baseline, candidate)]
    for record, table, none in zip((baseline, candidate), tables, untrained, strict=True):
        if table is None and not none:
            return _missing(record, f"train_dpo/{file}")
    if all(untrained):
        return Problem("unresolved", "neither arm was trained", "claim a metric of a stage that runs")
    known = next(table for table, none in zip(tables, untrained, strict=True) if table is not None and not none)
    return [(known if none or table is None else table, none) for table, none in zip(tables, untrained, strict=True)]


def _benign_prompts(metric: str, baseline: Record, candidate: Record) -> Paired | Problem:
    """An escape text's log-probability, or whether the greedy answer refuses, per benign prompt.

    An untrained arm stands where the trained one began.
    """
    escape, answered = ESCAPE.match(metric), ANSWERED.match(metric)
    if escape:
        arms = _trained(baseline, candidate, "escapes.parquet", ["logp"], ["escape", "moment", "probe_id"])
    else:
        assert answered
        numbers = [f"{answered['share']}_{when}" for when in ("before", answered["when"])]
        arms = _trained(baseline, candidate, "answers.parquet", numbers, ["probe_id"])
    if isinstance(arms, Problem):
        return arms
    columns = []
    for read, none in arms:
        if escape:
            wide = read.filter((pl.col("escape") == escape["text"]) & (pl.col("moment") != "during"))
            wide = wide.pivot("moment", index="probe_id", values="logp")
            if not wide.height:
                return Problem("unresolved", f"an arm did not score the text {escape['text']!r}",
                               "give both arms the same train.probes.texts")  # fmt: skip
            began = "source" if "source" in wide.columns else "before"
            before, after = (pl.col(began if none else when) for when in ("before", "after"))
            value = {"logp_before": before, "logp_after": after, "delta": after - before}[escape["what"]]
            columns.append(wide.select("probe_id", value=value).sort("probe_id"))
        else:
            assert answered
            column = f"{answered['share']}_{'before' if none else answered['when']}"
            columns.append(read.select("probe_id", value=pl.col(column).cast(pl.Float64)).sort("probe_id"))
    if columns[0]["probe_id"].to_list() != columns[1]["probe_id"].to_list():
        return _other_units("benign prompts")
    first, second = (column["value"].to_numpy() for column in columns)
    if not len(first):
        return Problem("unresolved", "no benign prompt was answered", "set train.probes.answers higher than 0")
    return Paired(first, second, float(first.mean()), float(second.mean()))


# --- repeated prompts -----------------------------------------------------------------------------------------------


def _repeated_prompts(metric: str, baseline: Record, candidate: Record) -> Paired | Problem:
    """Per prompt, whether its repeated greedy outputs were several, or their commonest another under load."""
    match = DIVERGED.match(metric)
    assert match
    asked, values, repeats = [], [], []
    for record in (baseline, candidate):
        outputs = _table(record, "diverge", "outputs.parquet", ("prompt", "repeat"), ("level", "token_ids"))
        prompts = _table(record, "diverge", "prompts.parquet", others=("prompt",))
        if outputs is None or prompts is None:
            return _missing(record, f"diverge/{'outputs' if outputs is None else 'prompts'}.parquet")
        asked.append(prompts.sort("prompt"))
        repeats.append(outputs["repeat"].n_unique())
        values.append(per_prompt(outputs, match["metric"])["value"].to_numpy())
    if not asked[0].equals(asked[1]):
        return _other_units("prompts")
    if repeats[0] != repeats[1]:
        said = f"a prompt had {repeats[0]} outputs in the baseline and {repeats[1]} in the candidate"
        return Problem("unresolved", f"{said}: more outputs show more divergence",
                       "give both arms the same diverge.repeats")  # fmt: skip
    return Paired(values[0], values[1], float(values[0].mean()), float(values[1].mean()))


# --- documents ------------------------------------------------------------------------------------------------------


def _documents(metric: str, baseline: Record, candidate: Record) -> Paired | Problem:
    """A measure of the answers to the same documents; two renderings of one document are one unit."""
    match = EXTRACTED.match(metric)
    assert match
    columns, asked = [], []
    for record in (baseline, candidate):
        table = _table(record, "extract", "answers.parquet", (match["measure"],), ("document_id", "condition", "kind"))
        if table is None:
            return _missing(record, "extract/answers.parquet")
        own = of_part(table, match["part"]).select("document_id", "condition", value=match["measure"])
        asked.append(own.height)
        columns.append(own.drop_nulls().sort("document_id", "condition"))
    one, other = columns
    if one.is_empty() and other.is_empty():
        return Problem("unresolved", f"{metric} is known of no answer", "see `extract` in the settings")
    ids = ["document_id", "condition"]
    if not one.select(ids).equals(other.select(ids)):
        if one.height == asked[0] and other.height == asked[1]:
            return _other_units("documents")
        return Problem(
            "unresolved", f"{metric} is known of {one.height} of {asked[0]} answers of the baseline and of "
            f"{other.height} of {asked[1]} of the candidate, not the same: those that are left are no fair sample",
            "claim a measure that every answer has, such as one of what is right, forced or failed",
        )  # fmt: skip
    first, second = (_per_cluster(column, ["document_id"], "value") for column in columns)
    return Paired(first, second, float(first.mean()), float(second.mean()))


# --- timings --------------------------------------------------------------------------------------------------------


def aligned(baseline: Sequence[Record], candidate: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The runs of both arms as pairs, by repetition (by order where repetitions have no numbers of their own)."""
    numbered = [{record.repetition: record for record in arm} for arm in (baseline, candidate)]
    if all(len(each) == len(arm) for each, arm in zip(numbered, (baseline, candidate), strict=True)) and (
        len(baseline) > 1 or numbered[0].keys() == numbered[1].keys()
    ):
        return [(numbered[0][key], numbered[1][key]) for key in sorted(numbered[0].keys() & numbered[1].keys())]
    return list(zip(baseline, candidate, strict=False))


def _repetitions(metric: str, baseline: Sequence[Record], candidate: Sequence[Record]) -> Paired | Problem:
    runs = aligned(baseline, candidate)
    values = [[record.results.metrics.get(metric) for record in arm] for arm in zip(*runs, strict=True)]
    absent = [sum(value is None for value in arm) for arm in values]
    if any(absent):
        return _not_there(metric, absent, len(runs))
    first, second = (np.asarray(arm, dtype=np.float64) for arm in values)
    return Paired(first, second, float(first.mean()), float(second.mean()), share=is_share(metric))


def _exact(metric: str, baseline: Sequence[Record], candidate: Sequence[Record]) -> Paired | Problem:
    """One value an arm. A run that has another shows that more than the settings decides it."""
    found = []
    for arm in (baseline, candidate):
        values = {record.results.metrics.get(metric) for record in arm}
        if None in values:
            return Problem("unresolved", f"{metric} is not recorded in every run", "run the stage again")
        if len(values) > 1:
            said = f"{metric} differs between runs of one arm ({', '.join(f'{value:g}' for value in sorted(values))})"  # type: ignore[type-var]
            return Problem("invalid", said, "find what else had a part in it (artifacts/serve/realised.json)")
        found.append(float(values.pop()))  # type: ignore[arg-type]
    return Paired(np.array(found[:1]), np.array(found[1:]), found[0], found[1], share=is_share(metric))


def _not_there(metric: str, absent: Sequence[int], n: int) -> Problem:
    name = metric.rpartition("/")[2]
    why = (
        "no level reached an attainment of 90%" if name == "capacity_tok_s"
        else "not reached: it falls on a request that failed" if re.search(r"_p\d+_ms$", name)
        else "not recorded"
    )  # fmt: skip
    where = f"{metric} is absent in {absent[0]} of {n} runs of the baseline and {absent[1]} of {n} of the candidate"
    if absent == [0, n] and name != "failed" and why != "not recorded":
        return Problem("reject", f"{where} ({why})", "the candidate does not hold this load: lower load.rates_rps")
    return Problem(
        "unresolved", f"{where} ({why})",
        "check the metric's name (artifacts/*.metrics.json); if it is right, add a lower rate to load.rates_rps",
    )  # fmt: skip


def percentile_problem(metric: str, records: Sequence[Record], confidence: float) -> Problem | None:
    """A percentile that so few requests cannot support is refused."""
    cell = CELL_LATENCY.match(metric)
    percent = re.search(r"_p(\d+)_ms$", metric)
    if not cell or not percent:
        return None
    needed = requests_needed(int(percent[1]), confidence)
    counts = [record.results.metrics.get(f"sweep/{cell['shape']}/{cell['level']}/n") for record in records]
    known = [int(count) for count in counts if count is not None]
    fewest = min(known, default=0)
    if len(known) == len(counts) and fewest >= needed:
        return None
    return Problem(
        "unresolved",
        f"a p{percent[1]} needs {needed} requests a run to be shown with {confidence:.0%} confidence; there are "
        f"{fewest}",
        f"raise load.duration_s until {cell['shape']} at {level_name(cell['level'])} has {needed} requests, "
        "or claim a lower percentile",
    )


def metric_names(records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Every metric of any run, sorted."""
    return sorted({name for arm in records.values() for record in arm for name in record.results.metrics})
