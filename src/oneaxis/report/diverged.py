"""Divergence on the page: what the same prompts gave at temperature 0, one at a time and many at a time.

Pure functions of `Results`; no rows where nothing was asked twice.
"""

from collections.abc import Callable, Mapping
from typing import Any

from oneaxis.diverge.measure import LEVELS, LONG_TOKENS, groups
from oneaxis.report import text
from oneaxis.report.results import Results
from oneaxis.report.tables import Table

PLACES_SHOWN = 8
NEVER = "never"


def tables(results: Results) -> list[Table]:
    """What each level gave, side by side, and the first places where outputs part; empty where nothing was asked."""
    found = results.document("diverge", "summary.json")
    if not found:
        return []
    levels = [found["levels"][level] for level in LEVELS]
    speeds = results.observed("diverge").get("tokens_per_s") or {}

    def row(name: str, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [name, *(cell(level) for level in levels)]

    rows = [
        row("Outputs", lambda own: text.count(own["outputs"])),
        row("Prompts with several outputs", lambda own: f"{own['prompts_several']} of {found['prompts']} "
            f"{_interval(own['several_share_ci_low'], own['several_share_ci_high'])}"),
        row("Different outputs a prompt", lambda own: f"{text.number(own['unique_mean'])} (most {own['unique_max']})"),
        row("Share of the commonest output", lambda own: text.percent(own["modal_share"])),
        row("Outputs that left the commonest one", lambda own: f"{own['diverged']} of {own['trials']}"),
        row("First divergence, token: least, median", _first),
        row("Flips a token", _rate),
        row(f"Outputs of {LONG_TOKENS} tokens that would differ", lambda own: text.percent(own["diverged_at_500"])),
        row("Positions with an exact tie of the top two", lambda own: text.percent(own["tie_share"], 2)),
        row("Divergences at an exact tie", lambda own: _of_gaps(own, f"{own['ties']} of {own['gaps']}")),
        row("Gap where they part, nats: median, largest", lambda own: _of_gaps(
            own, f"{text.number(own['divergence_gap_median'])}, {text.number(own['divergence_gap_max'])}")),
        row("Divergences to the second choice", lambda own: text.percent(own["runner_up_share"], 0)),
        row("Tokens generated a step", lambda own: text.number(own["tokens_per_step"])),
        row("Prompt tokens from the prefix cache", lambda own: text.percent(own["cached_share"])),
    ]  # fmt: skip
    if speeds:
        rows.append(["Tokens a second, while asked", *(text.number(speeds.get(level)) for level in LEVELS)])
    note = (
        f"{found['prompts']} prompts, {found['repeats']} outputs each; in brackets exact binomial "
        f"{text.percent(found['confidence'], 0)} intervals over prompts. A prompt whose {found['repeats']} outputs are "
        f"all equal may still give another one, up to {text.percent(found['unseen_at_most'], 0)} of the time. "
    )
    own = Table(("At temperature 0", "one at a time", f"{found['concurrency']} at a time"), rows, "lrr",
                caption="The same prompts, over and over", note=note + MEANING)  # fmt: skip
    return [own, *_places(results)]


MEANING = (
    "Flips: divergences by tokens that were still equal, as if every token had the same chance; the bound counts each "
    "prompt once. One copy of each commonest output is what the others are compared with, and is not counted."
)


def words(results: Results) -> str:
    """What it means for who compares texts."""
    found = results.document("diverge", "summary.json")
    assert found
    moved = (f"The commonest output is another one {found['concurrency']} at a time than alone for "
             f"{found['modal_differs']} of {found['prompts']} prompts "
             f"{_interval(found['modal_differs_share_ci_low'], found['modal_differs_share_ci_high'])}.")  # fmt: skip
    if found["modal_differs"]:
        moved += (f" It leaves it at token {text.number(found['modal_divergence_median'])} (median; at the earliest "
                  f"{found['modal_divergence_min']}){_ties(found)}.")  # fmt: skip
    agree = found["agree_with_alone"]
    if agree < 1:
        return (f"{moved} Of the outputs under load {text.percent(agree)} are those given alone: a test that compares "
                "text would fail on the others. Compare fields or meaning, or use serve=reproducible.")  # fmt: skip
    return f"{moved} Every output under load was also the one given alone."


def _ties(found: Mapping[str, Any]) -> str:
    share, widest = found["modal_divergence_tie_share"], found["modal_divergence_gap_max"]
    if share is None:
        return ""
    return f", {text.percent(share, 0)} at an exact tie of the top two, the widest gap {text.number(widest)} nats"


def _interval(low: float, high: float) -> str:
    return f"[{text.percent(low)}, {text.percent(high)}]"


def _first(own: Mapping[str, Any]) -> str:
    if own["first_divergence_min"] is None:
        return NEVER
    return f"{text.count(own['first_divergence_min'])}, {text.number(own['first_divergence_median'])}"


def _rate(own: Mapping[str, Any]) -> str:
    if own["flip_rate"] is None:
        return text.NONE
    return f"{text.percent(own['flip_rate'], 3)} (at most {text.percent(own['flip_rate_at_most'], 3)})"


def _of_gaps(own: Mapping[str, Any], said: str) -> str:
    return said if own["gaps"] else text.NONE


def _places(results: Results) -> list[Table]:
    """The earliest divergences, one a prompt and level."""
    table = results.table("diverge", "outputs.parquet")
    if table is None:
        return []
    found = []
    for level in LEVELS:
        for group in groups(table, level):
            if group.several:
                place = min(group.diverged, key=group.at_risk)
                first = group.at_risk(place) - 1
                told = group.gaps and first < len(group.gaps)
                gap = text.number(group.gaps[first]) if group.gaps and told else text.NONE
                tokens = [str(output[first]) if first < len(output) else "ended"
                          for output in (group.modals[0], group.outputs[place])]  # fmt: skip
                several = str(len(set(group.outputs)))
                found.append((first, [str(group.prompt), level, several, str(first), gap, *tokens]))
    if not found:
        return []
    rows = [row for _, row in sorted(found, key=lambda each: each[0])[:PLACES_SHOWN]]
    return [Table(("Prompt", "level", "outputs", "first token that differs", "gap, nats", "commonest", "other"), rows,
                  "rlrrrrr", caption="Where outputs part, the earliest", folded=True,
                  note="Tokens by their numbers; artifacts/diverge/outputs.parquet has every output.")]  # fmt: skip
