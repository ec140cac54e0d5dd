"""Pairs from the model itself on the page: how often each rule was met, what came of the prompts, and what was paired.

Pure functions of `Results`; no rows where nothing was sampled.
"""

import json
from typing import Any

import polars as pl

from oneaxis.report import text
from oneaxis.report.results import Results
from oneaxis.report.tables import Table

RULES = {"number": "last number right", "json": "JSON with the keys", "regex": "pattern matched",
         "words": "within the word limit"}  # fmt: skip
LONGEST = 90
PAIRS_SHOWN = 6


def tables(results: Results) -> list[Table]:
    """Pass rates with the fates of the prompts, and a few pairs with what the rule read; empty where none."""
    summary = results.document("sample_pairs", "summary.json")
    if not summary:
        return []
    settings, whole = results.section("sample"), summary["all"]
    each = text.number(whole["pairs"] / whole["prompts"], 2)
    rows = [_row(RULES[kind], facts) for kind, facts in summary["rules"].items()]
    if len(rows) > 1:
        rows.append(_row("all", whole))
    counts = summary["pairs"]
    rates = Table(
        ("Rule", "prompts", "responses", "pass", "interval", "pairs", "all pass", "all fail", "repeated", "cut off"),
        rows, "lrrrrrrrrr", caption="Pairs from the model's own responses",
        note=f"{settings.get('num_samples')} responses a prompt, each with a seed of its own; "
        f"{text.percent(summary['confidence'], 0)} intervals by prompt, since responses to one are alike. A prompt "
        f"whose responses all pass or all fail gives no pair. {each} pairs a prompt: "
        f"{counts['train_pairs']} to train on, {counts['heldout_pairs']} held out by whole prompts.",
    )  # fmt: skip
    read, pairs = results.table("sample_pairs", "responses.parquet"), results.table("sample_pairs", "pairs.parquet")
    return [rates] if read is None or pairs is None else [rates, _pairs(read, pairs)]


def _row(name: str, facts: dict[str, Any]) -> list[str]:
    rate, fate, n = facts["pass_rate"], facts["fates"], facts["responses"]
    interval = f"[{text.percent(rate['low'])}, {text.percent(rate['high'])}]"
    return [name, text.count(facts["prompts"]), text.count(n), text.percent(rate["share"]), interval,
            text.count(facts["pairs"]), text.count(fate["all pass"]), text.count(fate["all fail"]),
            text.percent(facts["duplicates"] / n), text.percent(facts["cut"] / n)]  # fmt: skip


def _pairs(read: pl.DataFrame, pairs: pl.DataFrame) -> Table:
    """The first pairs by id, with the words of the rule beside each side."""
    used = read.drop_nulls("pair_id")
    said = {(row["pair_id"], row["side"]): row["said"] for row in used.iter_rows(named=True)}
    rows = [
        [_last(row["prompt"], row["conversational"]), *(
            cell for side in ("chosen", "rejected")
            for cell in (_last(row[side], row["conversational"]), said[row["pair_id"], side])
        )]
        for row in pairs.sort("pair_id").head(PAIRS_SHOWN).iter_rows(named=True)
    ]  # fmt: skip
    return Table(("Prompt", "chosen", "its rule says", "rejected", "its rule says"), rows, "lllll",
                 caption="Some of these pairs", folded=True)  # fmt: skip


def _last(words: str, conversational: bool) -> str:
    """The text, of a conversation that of the last message."""
    return text.shorten(str(json.loads(words)[-1]["content"]) if conversational else words, LONGEST)
