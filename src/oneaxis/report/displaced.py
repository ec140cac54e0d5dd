"""What preference training did to a policy, in tables and plots: the verdict, benign prompts, where probability went.

Pure functions of what train_dpo wrote; a file that is not there gives nothing.
"""

from collections.abc import Mapping
from typing import Any

import polars as pl
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from oneaxis.judge.paired import paired_difference
from oneaxis.report import text
from oneaxis.report.plots import INK, LINES, MARKERS, SERIES, Plot, curves, draw
from oneaxis.report.results import Results
from oneaxis.report.tables import Table

SHARES = {"refusal": "Refused, answered greedily", "empty": "Answered by nothing"}
PLACES = {"first": "after the prompt", "fork": "where they part"}
HELD = {"chosen": "chosen goes on", "rejected": "rejected goes on", "neither": "anything else"}
EXAMPLES = 5


def plots(results: Results) -> list[Plot]:
    """Log-probabilities over the steps: absolute of the pairs, and how far each escape text has moved."""
    log = results.table("train_dpo", "train_log.parquet")
    if log is None:
        return []
    named = {"chosen": "logps/chosen", "rejected": "logps/rejected", "chosen, held out": "heldout/chosen_logp"}
    series = {title: log[column].to_list() for title, column in named.items() if column in log.columns}
    found = []
    if series:
        found.append(curves(
            log["step"].to_list(), series, "curves", "nats per response",
            "Mean log-probability of chosen and rejected responses over the training steps.",
            "Absolute values on the batches trained on. Chosen falling with rejected is displacement.",
        ))  # fmt: skip
    escapes = results.table("train_dpo", "escapes.parquet")
    if escapes is not None:
        found.append(_escapes(escapes, _confidence(results)))
    return found


def _confidence(results: Results) -> float:
    return float((results.document("train_dpo", "displacement.json") or {}).get("confidence", 0.95))


def _escapes(escapes: pl.DataFrame, confidence: float) -> Plot:
    """Each escape text's change from before training, on the watched prompts, its interval shaded."""
    before = escapes.filter(pl.col("moment") == "before").select("probe_id", "escape", began="logp")
    during = escapes.filter(pl.col("moment") == "during").join(before, on=["probe_id", "escape"], validate="m:1")
    names = escapes["escape"].unique(maintain_order=True).to_list()

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.axhline(0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        for i, name in enumerate(names):
            steps, middle, low, high = [0], [0.0], [0.0], [0.0]
            for (step,), part in during.filter(pl.col("escape") == name).group_by("step", maintain_order=True):
                change = paired_difference(part["began"].to_numpy(), part["logp"].to_numpy(), confidence)
                steps.append(int(str(step)))
                middle.append(change.effect)
                low.append(change.ci_low)
                high.append(change.ci_high)
            color = SERIES[i % 6]
            axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
            axes.plot(steps, middle, color=color, marker=MARKERS[i % 6], linestyle=LINES[i % 6], label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("nats from before training")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(loc="outside upper left", ncols=min(5, len(names)))

    prompts = during["probe_id"].n_unique()
    return draw(
        "escape", "Change of the log-probability of each escape text on benign prompts over the training steps.",
        f"How much likelier than before an answer begins with each text (“empty”: ends at once), on {prompts} benign "
        f"prompts; shaded: paired {text.percent(confidence, 0)} intervals. Rising: belief moves there.", paint,
    )  # fmt: skip


def tables(results: Results) -> list[Table]:
    """The verdict, benign prompts, and where the probability went."""
    found = results.document("train_dpo", "displacement.json")
    if not found:
        return []
    said = [_verdict(found), _benign(results, found)]
    return [table for table in [*said, *_mass(results), _turned(results)] if table is not None and table.rows]


def _verdict(found: Mapping[str, Any]) -> Table:
    sides = ("chosen", "rejected", "margin")
    changes = {f"{side}, by SFT before": (found.get("sft") or {}).get(side) for side in sides}
    changes |= {side: found.get(side) for side in sides}
    rows = [
        [name, text.signed_nats(change["effect"]), text.signed_nats(change.get("ci_low")),
         text.signed_nats(change.get("ci_high"))]
        for name, change in changes.items()
        if change
    ]  # fmt: skip
    said = "; ".join(found.get("reasons") or [])
    return Table(
        ("Held-out change, nats per response", "mean", "low", "high"), rows, "lrrr",
        caption=f"Displacement: {found['verdict']}",
        note=f"{said}{'. ' if said else ''}n = {found['n']}, confidence {text.percent(found['confidence'], 0)}; "
        f"{text.evidence(found.get('thresholds') or {})}.",
    )  # fmt: skip


def _benign(results: Results, found: Mapping[str, Any]) -> Table:
    rows = []
    for share, title in SHARES.items():
        change = (found.get("answers") or {}).get(share)
        if change:
            before, after = (results.metrics.get(f"train_dpo/{share}_rate_{when}") for when in ("before", "after"))
            rows.append([title, "", text.percent(before), text.percent(after), text.points(change["effect"]),
                         _between(change, text.points), text.count(change["n"])])  # fmt: skip
    for name, change in (found.get("escapes") or {}).items():
        before, after = (
            results.metrics.get(f"train_dpo/escape_{name}_logp_{when}") for when in ("before", "after")
        )  # fmt: skip
        shown = f"“{change['text']}”" if change["text"] else "(ends at once)"
        rows.append([f"Escape text {name}", shown, text.nats(before), text.nats(after),
                     text.signed_nats(change["effect"]), _between(change, text.signed_nats),
                     text.count(change["n"])])  # fmt: skip
    return Table(
        ("On benign prompts", "", "before", "after", "change", f"{text.percent(found.get('confidence'), 0)} interval",
         "prompts"), rows, "llrrrrr", caption="Answers to prompts that deserve one",
        note=f"Escape texts: log-probability, in nats, that the answer begins so. {_detector(found)}",
    )  # fmt: skip


def _detector(found: Mapping[str, Any]) -> str:
    parts = [
        f"{text.percent(part['accuracy'])} right [{text.percent(part['accuracy_ci_low'])}, "
        f"{text.percent(part['accuracy_ci_high'])}], precision {text.percent(part['precision'])}, recall "
        f"{text.percent(part['recall'])} on {part['num_labelled']} {name} answers"
        for name, part in (found.get("detector") or {}).items()
    ]
    return f"Refusals are found by rules on the text: {'; '.join(parts)}." if parts else ""


def _between(change: Mapping[str, Any], shown: Any) -> str:
    low, high = shown(change["ci_low"]), shown(change["ci_high"])
    return f"{low.removesuffix(' points')} to {high}"


def _mass(results: Results) -> list[Table]:
    found = results.document("train_dpo", "mass.json")
    if not found:
        return []
    fork = found["fork"]
    held = [
        [f"{PLACES[place]}: {title}", text.percent(part["before"]), text.percent(part["after"]),
         text.points(part.get("effect")), _between(part, text.points) if "ci_low" in part else text.NONE]
        for place in PLACES
        for side, title in HELD.items()
        if (part := found[place].get("held_by", {}).get(side))
    ]  # fmt: skip
    return [
        Table(("Probability of the next token", "before", "after", "change",
               f"{text.percent(_confidence(results), 0)} interval"), held,
              "lrrrr", caption="Where the probability went",
              note=f"Mean over {found['num_prompts']} held-out pairs ({fork['num_prompts']} part before one ends): the "
              "token with which the chosen response goes on, the rejected one (the same, until they part), and all "
              "others."),
        _gained(fork, "Tokens that gained most where chosen and rejected part"),
        _gained(found["first"], "Tokens that gained most right after the prompt", folded=True),
        _gained(found["greedy"], "Greedy continuations that gained most", folded=True),
    ]  # fmt: skip


def _gained(look: Mapping[str, Any], caption: str, folded: bool = False) -> Table:
    rows = [
        [line["text"], text.signed(line["gain"]), text.percent(line["share"]), text.percent(line["before"]),
         text.percent(line["after"]), text.count(line["num_prompts"])]
        for line in look["gained"]
    ]  # fmt: skip
    changed = f" {look['num_changed']} prompts go on otherwise than before." if "num_changed" in look else ""
    return Table(
        ("Continuation", "gain", "share of what moved", "before", "after", "prompts"), rows, "lrrrrr", caption=caption,
        note=f"Gain: probability, summed over {look['num_prompts']} held-out prompts; in all "
        f"{text.number(look['moved'])} moved. Before and after: mean over the prompts.{changed}", folded=folded,
    )  # fmt: skip


def _turned(results: Results) -> Table | None:
    """Benign prompts that were answered before training, and are refused or left empty after it."""
    answers = results.table("train_dpo", "answers.parquet")
    if answers is None:
        return None
    lost = answers.filter(
        (pl.col("refusal_after") | pl.col("empty_after")) & ~pl.col("refusal_before") & ~pl.col("empty_before")
    )
    rows = [
        [text.shorten(row["prompt"], 90), text.shorten(row["answer_before"], 90), text.shorten(row["answer_after"], 90)]
        for row in lost.head(EXAMPLES).iter_rows(named=True)
    ]
    more = f"The first {EXAMPLES} of {lost.height}." if lost.height > EXAMPLES else ""
    return Table(("Prompt", "answer before", "answer after"), rows, "www",
                 caption="Benign prompts answered before, and not any more", note=more, folded=True)  # fmt: skip


def headline(results: Results) -> list[list[str]]:
    """The change of refusals, as a row of the page's headline table."""
    found = results.document("train_dpo", "displacement.json") or {}
    change = (found.get("answers") or {}).get("refusal")
    if not change:
        return []
    before, after = (results.metrics.get(f"train_dpo/refusal_rate_{when}") for when in ("before", "after"))
    return [["Refusals of benign prompts, by training", text.percent(before), text.percent(after),
             text.points(change["effect"]), _between(change, text.points),
             f"{text.count(change['n'])} prompts"]]  # fmt: skip


def refusals(results: Results) -> str:
    """The same in words, for a sentence; empty where it was not measured."""
    rates = [results.metrics.get(f"train_dpo/refusal_rate_{when}") for when in ("before", "after")]
    if any(rate is None for rate in rates):
        return ""
    return f"; refusals of benign prompts {text.percent(rates[0])} → {text.percent(rates[1])}"
