"""The pair filter on the page: both scores, the rule, what it kept and dropped, and what other measures say of that."""

import json
from typing import Any

import polars as pl

from oneaxis.report import plots, text
from oneaxis.report.plots import Plot
from oneaxis.report.results import Results
from oneaxis.report.tables import Table

SHOWN = 20
"""Pairs of one kind on the page."""
NAMES = {"ches": "CHES", "ln_ches": "ln-CHES", "edit_similarity": "edit similarity", "cosine": "embedding similarity",
         "length_difference": "difference in tokens"}  # fmt: skip
MEASURES = (
    "Edit similarity: Levenshtein's, of the responses' texts, 0 to 1. Embedding similarity: cosine of the mean hidden "
    "states of both responses, from the same pass."
)


def distributions(results: Results, pairs: pl.DataFrame) -> list[Plot]:
    """Both scores over the train pairs; the one that the rule went by first, with its cutoff."""
    ruled = str(results.section("pairs").get("score", "ln_ches"))
    return [_distribution(pairs, score, score == ruled) for score in sorted(("ches", "ln_ches"), key=ruled.__ne__)]


def _distribution(pairs: pl.DataFrame, score: str, ruled: bool) -> Plot:
    train = pairs.filter(pl.col("split") == "train").drop_nulls(score)
    kept, dropped = train.filter(pl.col("kept"))[score], train.filter(~pl.col("kept"))[score]
    cutoff = None
    if ruled and len(kept) and len(dropped):
        # Pairs that were dropped at random lie on both sides; then there is no one cutoff to draw.
        highest, lowest = float(kept.max()), float(dropped.min())  # type: ignore[arg-type]
        cutoff = highest if lowest >= highest else None
    return plots.pair_scores(kept.to_list(), dropped.to_list(), score, NAMES[score], cutoff)


def tables(results: Results, pairs: pl.DataFrame) -> list[Table]:
    """The rule, the overlap with other measures, and the pairs themselves."""
    found = [_rule(results), _overlap(results)]
    score = str(results.section("pairs").get("score", "ln_ches"))
    train = pairs.filter(pl.col("split") == "train").drop_nulls(score)
    train = train.sort(score, "pair_id", descending=[True, False])
    found += [_listed(train.filter(~pl.col("kept")), "dropped", score), _listed(train.filter("kept"), "kept", score)]
    return [table for table in found if table.rows]


def _rule(results: Results) -> Table:
    settings, notes = results.section("pairs"), results.notes("filter_pairs")
    if not settings or "train" not in notes:
        return Table((), [], "")
    name, value = NAMES[settings["score"]], settings["value"]
    kept = {
        "all": "every pair is kept",
        "quantile": f"the {text.percent(value, 1)} with the lowest {name} are kept",
        "count": f"the {value:g} with the lowest {name} are kept",
        "threshold": f"pairs with {name} up to {value:g} are kept",
    }[settings["rule"]]
    control = notes.get("control_seed")
    if control is not None:
        kept += f"; this is the control: as many are dropped, but at random (seed {control})"
    lost = [f"{count} {reason.replace('_', ' ')}" for reason, count in notes["unusable"].items() if count]
    cutoff = text.NONE if notes["cutoff"] is None else f"{name} {text.number(notes['cutoff'], 4)}"
    rows = [
        ["Rule", kept],
        ["Train pairs", f"{notes['train']} scored, {notes['kept']} kept, {notes['dropped']} dropped"],
        ["Highest that was kept", cutoff],
        ["Held-out pairs", f"{notes['heldout']}, scored and never filtered"],
        ["Left out unscored", f"{', '.join(lost) or 'none'} ({notes['unusable_policy']})"],
        ["Scored text", notes["scored_text"]],
    ]
    return Table(("Filter", ""), rows, "lw", caption="Which pairs were kept")


def _overlap(results: Results) -> Table:
    notes = results.notes("filter_pairs")
    correlations = notes.get("correlations", {}).get(notes.get("score"), {})
    rows = [
        [NAMES[measure], f"{found['dropped_too']} of {notes['dropped']}", text.percent(found["share"], 0),
         text.percent(found["by_chance"], 0), text.number((correlations.get(measure) or {}).get("spearman"), 2)]
        for measure in ("edit_similarity", "cosine", "ches", "ln_ches")
        if (found := notes.get("overlap", {}).get(measure))
    ]  # fmt: skip
    length = (correlations.get("length_difference") or {}).get("spearman")
    spearman = text.number(length, 2)
    note = f"Of each measure the highest. {MEASURES} Spearman of the score with chosen − rejected tokens: {spearman}."
    return Table(
        ("Measure", "dropped too", "share", "by chance", "Spearman with the score"), rows, "lrrrr",
        caption="Had another measure dropped as many", note=note,
    )  # fmt: skip


def _listed(pairs: pl.DataFrame, outcome: str, score: str) -> Table:
    rows = [
        [row["pair_id"], text.number(row["ches"]), text.number(row["ln_ches"]), text.number(row["edit_similarity"], 2),
         text.number(row["cosine"], 3), *(_short(_words(row, key)) for key in ("prompt", "chosen", "rejected"))]
        for row in pairs.head(SHOWN).iter_rows(named=True)
    ]  # fmt: skip
    some = f"{SHOWN} of {pairs.height} are shown. " if pairs.height > SHOWN else ""
    return Table(
        ("Pair", "CHES", "ln-CHES", "edit", "embedding", "prompt", "chosen", "rejected"), rows, "lrrrrwww",
        caption=f"The pairs that were {outcome}, the highest {NAMES[score]} first",
        note=f"{some}Every pair with its text and scores: artifacts/filter_pairs/pairs.parquet.", folded=True,
    )  # fmt: skip


def _words(row: dict[str, Any], key: str) -> str:
    """The text of a prompt or response; of messages, their contents."""
    if not row["conversational"]:
        return str(row[key])
    return " / ".join(str(message["content"]) for message in json.loads(row[key]))


def _short(words: str, most: int = 90) -> str:
    line = " ".join(words.split())
    return line if len(line) <= most else line[: most - 1] + "…"
