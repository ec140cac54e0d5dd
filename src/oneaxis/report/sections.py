"""The sections of the page below its head: each from the tables of a stage to plots, tables and a line of text.

A section whose stage did not run says so; a plot whose table is missing is left out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from oneaxis.judge.validity import differences
from oneaxis.report import (
    displaced,
    diverged,
    extracted,
    filtering,
    plots,
    quantisation,
    sampled,
    scores,
    served,
    text,
)
from oneaxis.report.facts import SCORERS, cells
from oneaxis.report.plots import Plot
from oneaxis.report.results import STAGES, Results
from oneaxis.report.tables import Table
from oneaxis.serve.realised import realised_table


@dataclass
class Section:
    """A part of the page. `lead` says what to look at; `absent` says why there is nothing to see."""

    id: str
    title: str
    lead: str = ""
    absent: str = ""
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def all_sections(results: Results) -> list[Section]:
    """In the order of the page."""
    asked = [
        section
        for stage, section in (("diverge", divergence), ("extract", extraction))
        if results.section(stage).get("kind", "none") != "none"
    ]
    parts = (quality, preference, latency, scoring, *asked, guards, realised, provenance)
    return [part(results) for part in parts]


def quality(results: Results) -> Section:
    """Perplexity paired by sequence, outliers, rounding error and alpha per layer, what the model says otherwise."""
    section = Section("quality", "Quality", lead="What quantisation did to the model's predictions, and where.")
    m = results.metrics
    before = results.table("calibrate", "heldout_nll.parquet")
    after = results.table("quantize", "heldout_nll.parquet")
    if before is not None and after is not None and "quantize/delta_nll" in m:
        both = before.join(after, on=["sequence", "position"], suffix="_after", validate="1:1")
        change = both.group_by("sequence").agg((pl.col("nll_after") - pl.col("nll")).mean().alias("change"))
        effect, low, high = (m.get(f"quantize/delta_nll{end}") for end in ("", "_ci_low", "_ci_high"))
        section.plots.append(plots.paired_change(change["change"].to_list(), effect, low, high))
    outliers = results.table("calibrate", "outliers.parquet")
    if outliers is not None:
        section.plots.append(plots.by_layer(
            "outliers", _per_site(outliers, "ratio"), ylabel="absmax / 99.9th percentile",
            label="Outlier ratio of the activations that each kind of linear layer reads, over the layers.",
            caption="Above about 10, one INT8 scale for the whole tensor fails; smoothing moves this range to the "
            "weights.", bound=(10.0, "10"),
        ))  # fmt: skip
    layers = results.table("quantize", "layers.parquet")
    if layers is not None and {"layer", "site", "output_error"} <= set(layers.columns):
        section.plots.append(plots.by_layer(
            "errors", _per_site(layers, "output_error"), ylabel="relative output error",
            label="Relative error of each linear layer's output after quantisation, over the layers.",
            caption="The error of a linear layer's output on held-out text, against the same layer before rounding.",
        ))  # fmt: skip
    smooth = results.section("quantize").get("smooth", {})
    if layers is not None and "alpha" in layers.columns and smooth.get("alpha") == "auto" and smooth["sites"]:
        section.plots.append(plots.by_layer(
            "alpha", _per_site(layers, "alpha"), ylabel="α", log=False,
            label="The smoothing alpha of each tensor that linear layers read, over the layers.",
            caption="Chosen per tensor, for the least output error on the activation sample; larger moves more range "
            "from the activations to the weights.",
        ))  # fmt: skip
    section.tables += filter(None, (quantisation.measures(results), quantisation.copies(results),
                                    quantisation.changed(results)))  # fmt: skip
    rows = [
        ["The fold alone changes float32 logits by up to", text.number(m.get("quantize/fold_error_max")),
         "of their absmax"],
        ["Largest outlier ratio", text.number(m.get("calibrate/outlier_ratio_max")), "absmax / p99.9"],
        ["Channels beyond their calibrated range on held-out text",
         text.percent(m.get("calibrate/channels_exceeded_share"), 2), "of channels"],
        ["Held-out activations that would be clipped", _small_percent(m.get("calibrate/clip_rate")), "of values"],
    ]  # fmt: skip
    rows = [row for row in rows if row[1] != text.NONE]
    if rows:
        section.tables.append(Table(("Check", "value", "unit"), rows, "lrl", caption="Checks of the numbers"))
    if not section.plots and not section.tables:
        section.absent = "calibrate and quantize did not run."
    elif not quantisation.short(results.section("quantize")) and results.section("quantize"):
        section.lead = "Not quantised: the policy is served as it is. Its activations, for a later choice of scheme:"
    return section


def _small_percent(share: float | None) -> str:
    return text.NONE if share is None else f"{text.number(100 * share, 2)}%"


def _per_site(table: pl.DataFrame, column: str) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Per kind of site the layers and the layer's largest value; rows of a whole layer, and undefined values, are left
    out. A site of an expert (`experts.3.down`) counts as its kind."""
    table = table.drop_nulls(["site", column]).with_columns(pl.col("site").str.split(".").list.last())
    grouped = table.group_by("site", "layer", maintain_order=True).agg(pl.col(column).max()).sort("layer")
    sites = list(dict.fromkeys(table["site"].to_list()))
    return {
        str(site): (part["layer"].to_list(), part[column].to_list())
        for site in sites
        if (part := grouped.filter(pl.col("site") == site)).height
    }


def preference(results: Results) -> Section:
    """CHES of the pairs, training curves in absolute log-probabilities, the displacement verdict."""
    section = Section("preference", "Preference training",
                      lead="Whether the chosen answers became likelier, and not only the margin wider.")  # fmt: skip
    section.tables += sampled.tables(results)
    pairs = results.table("filter_pairs", "pairs.parquet")
    if pairs is not None:
        section.plots += filtering.distributions(results, pairs)
        section.tables += filtering.tables(results, pairs)
    section.plots += displaced.plots(results)
    told = displaced.tables(results)
    section.tables = [*told, *section.tables]
    if not told and results.section("train").get("kind") == "none":
        section.lead = "Training was not run (train=none): the fetched model is served."
    if not section.plots and not section.tables:
        section.absent = "filter_pairs and train_dpo did not run."
    return section


def latency(results: Results) -> Section:
    """Distribution of TTFT, the capacity curve, the timeline over the server's counters, percentiles."""
    section = Section("latency", "Latency", lead="All requests that were sent; one that failed counts as a miss.")
    if not cells(results) and results.table("sweep", "requests.parquet") is None:
        section.absent = "sweep did not run."
        return section
    evidence = served.Evidence(results)
    section.plots += served.plots_of(evidence)
    section.tables += served.tables(evidence)
    section.lead = " ".join(filter(None, (section.lead, served.words(evidence))))
    return section


def scoring(results: Results) -> Section:
    """Accuracy per task and scorer, and what `scores` makes of the items."""
    section = Section("scoring", "Scoring", lead="One table of log-probabilities; every scorer is computed from it.")
    summary = results.document("score", "summary.json")
    if not summary or not summary.get("tasks"):
        section.absent = "score did not run."
        return section
    tasks = summary["tasks"]
    rows = [
        (task, name, found["accuracy"], found["stderr"] or 0.0)
        for task, facts in tasks.items()
        for name in SCORERS
        if (found := facts["scorers"].get(name))
    ]
    section.plots.append(plots.accuracies(rows, _chance(results)))
    evidence = scores.Evidence(results)
    section.tables += scores.tables(evidence)
    section.lead = " ".join(filter(None, (section.lead, scores.words(evidence))))
    return section


def divergence(results: Results) -> Section:
    """What the same prompts gave at temperature 0, alone and under load."""
    section = Section("divergence", "Divergence", lead="The same prompts at temperature 0, one at a time and many.")
    return _asked(section, "diverge", diverged.tables(results), diverged.words, results)


def extraction(results: Results) -> Section:
    """Answers in JSON about documents whose truth is known, and what the grammar kept of the model's probability."""
    section = Section("extraction", "Structured output", lead="Fields of documents that are legible, and that are not.")
    return _asked(section, "extract", extracted.tables(results), extracted.words, results)


def _asked(
    section: Section, stage: str, tables: list[Table], words: Callable[[Results], str], results: Results
) -> Section:
    """The section with a stage's tables and its words; without tables, that it did not run."""
    if not tables:
        section.absent = f"{stage} did not run."
        return section
    section.tables += tables
    section.lead = " ".join(filter(None, (section.lead, words(results))))
    return section
    section.lead = " ".join(filter(None, (section.lead, extracted.words(results))))
    return section


def _chance(results: Results) -> dict[str, float]:
    """Accuracy of guessing per task: the mean of 1 / options."""
    table = results.table("score", "table.parquet")
    if table is None:
        return {}
    options = (
        table.filter(pl.col("context") == "question")
        .group_by("task", "item_id")
        .agg(pl.col("option").n_unique().alias("options"))
    )
    means = options.group_by("task").agg((1 / pl.col("options")).mean().alias("chance")).sort("task")
    return dict(zip(means["task"].to_list(), means["chance"].to_list(), strict=True))


def guards(results: Results) -> Section:
    """Each guard with its evidence."""
    section = Section(
        "guards", "Guards", lead="Each of these makes the run INVALID when it fails. Here is what each saw."
    )
    found = results.document("sweep", "guards.json")
    if not found:
        section.absent = "sweep did not run: nothing vouches for the load."
        return section
    rows = [
        [
            f"{guard['guard']} {guard['name']}",
            "valid" if guard["valid"] else "INVALID",
            text.evidence(guard.get("evidence") or {}),
            ". ".join(filter(None, (guard.get("reason"), guard.get("recommendation")))),
        ]
        for guard in found
    ]
    section.tables.append(Table(("Guard", "", "evidence", "reason, and what to do"), rows, "lsww",
                                tones=["good" if guard["valid"] else "bad" for guard in found]))  # fmt: skip
    return section


def realised(results: Results) -> Section:
    """What the engine was asked, what it runs, what the checkpoint wants."""
    section = Section("realised", "Realised config", lead="The engine's own word against what was asked.")
    document = results.document("serve", "realised.json")
    if not document:
        section.absent = "serve did not run."
        return section
    table = realised_table(document)
    found = differences(results)
    section.lead += f" {len(found)} differ." if found else " Nothing differs."
    if found:
        section.tables.append(Table(("Difference",), [[line] for line in found], "l", tones=["bad"] * len(found)))
    unverified = table.filter(pl.col("verdict") == "unverified")["setting"].to_list()
    if unverified:
        section.lead += f" The engine does not tell {', '.join(unverified)}: unverified."
    rows = [
        [setting, *(text.NONE if value is None else text.value_text(json.loads(value)) for value in values), verdict]
        for setting, *values, verdict in table.iter_rows()
    ]
    tones = ["bad" if row[-1].startswith("differs") else "" for row in rows]
    section.tables.append(Table(("Setting", "asked", "runs", "the checkpoint wishes", ""), rows, "llllw", tones=tones,
                                caption="Asked, realised, wished", folded=len(rows) > 14))  # fmt: skip
    observed = results.observed("serve")
    cold = observed.get("cold_start") or {}
    if cold:
        section.tables.append(Table(("Phase", "value"), _cold_start(cold), "lr", caption="Cold start", folded=True))
    section.tables += _starts(results)
    return section


def _starts(results: Results) -> list[Table]:
    """How each stage came to its engine, where that was not one start in a process of its own."""
    rows = []
    for stage in ("serve", "diverge", "sweep", "score", "extract"):
        observed = results.observed(stage)
        how, restarts = observed.get("start"), observed.get("restarts") or []
        if restarts or how not in (None, "cold"):
            waited = (observed.get("cold_start") or {}).get("total_s", observed.get("waited_s"))
            seconds = text.NONE if waited is None else text.seconds(float(waited))
            rows.append([stage, STARTS.get(str(how), str(how)), seconds, "; ".join(restarts) or "none"])
    if not rows:
        return []
    return [Table(("Stage", "its engine", "ready after", "restarts"), rows, "llrw", caption="Engine starts",
                  tones=["bad" if row[-1] != "none" else "" for row in rows])]  # fmt: skip


STARTS = {
    "cold": "a process of its own",
    "forked": "forked from a preloaded process",
    "attached": "ran already",
}


def _cold_start(cold: Any, prefix: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for key, value in cold.items() if isinstance(cold, Mapping) else []:
        name = f"{prefix}{str(key).removesuffix('_s').replace('_', ' ')}"
        if isinstance(value, Mapping):
            rows += _cold_start(value, f"{name}: ")
        elif isinstance(value, int | float) and str(key).endswith("_s"):
            rows.append([name, text.seconds(float(value))])
        else:
            rows.append([name, text.value_text(value)])
    return rows


def provenance(results: Results) -> Section:
    """Where, when and from which code each stage's artifact came."""
    section = Section("provenance", "Provenance", lead="Where each number comes from.")
    if not results.provenance:
        section.absent = "no stage left a provenance."
        return section
    rows = []
    for stage in STAGES:
        facts = results.provenance.get(stage)
        if facts is None:
            rows.append([stage, "not run", "", "", "", "", ""])
            continue
        git = facts.get("git") or {}
        load = facts.get("load_before") or [None]
        rows.append([stage, str(facts["started_at"])[:19].replace("T", " "), text.seconds(facts["duration_s"]),
                     f"{text.count(facts.get('peak_rss_mib'))} MiB", text.number(load[0], 2),
                     str(git.get("commit", ""))[:10] + (" + changes" if git.get("dirty") else ""),
                     _manifest_hash(results, stage)])  # fmt: skip
    total = sum(facts["duration_s"] for facts in results.provenance.values())
    section.lead = f"Where each number comes from. All stages together took {text.seconds(total)}."
    section.tables.append(Table(
        ("Stage", "started (UTC)", "took", "peak memory", "load before", "commit", "manifest sha256"), rows, "llrrrll",
        caption="Stages",
        note="Memory: the stage or its largest child. Load: processes that want a CPU, one-minute mean.",
    ))  # fmt: skip
    last = results.provenance.get("sweep") or next(iter(results.provenance.values()))
    hardware = [[key.replace("_", " "), text.value_text(value)] for key, value in last.get("hardware", {}).items()]
    measure = results.section("measure")
    if measure:
        hardware.append(["session", f"{measure['session']}, repetition {measure['repetition']}"])
    source = results.notes("fetch_model")
    hardware += [[f"model {key.replace('_', ' ')}", text.value_text(source[key])]
                 for key in ("source", "licence", "source_hash", "dtype") if key in source]  # fmt: skip
    section.tables.append(Table(("Machine and source", ""), hardware, "ll", caption="Machine and source", folded=True))
    versions: dict[str, set[str]] = {}
    for facts in results.provenance.values():
        for package, version in facts.get("versions", {}).items():
            versions.setdefault(package, set()).add(version)
    section.tables.append(Table(("Package", "version"), [[name, ", ".join(sorted(versions[name]))]
                                                         for name in sorted(versions)], "ll", caption="Versions",
                                folded=True))  # fmt: skip
    return section


def _manifest_hash(results: Results, stage: str) -> str:
    from oneaxis.artifacts import MANIFEST, sha256_file

    path = results.folder / stage / MANIFEST
    return sha256_file(path)[:12] if path.is_file() else ""
