"""Verdicts as a person reads them in a terminal: one block a candidate, one paragraph a metric, under 100 columns."""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence

from oneaxis.judge.compare import Verdict
from oneaxis.judge.conditions import say
from oneaxis.report.text import guards_tally, number, signed_percent

WIDTH = 98
LABEL = 12
COLOURS = {"accept": "32", "better": "32", "reject": "31", "worse": "31", "invalid": "31;1", "tie": "33",
           "unresolved": "33"}  # fmt: skip
DESCRIBED = {"accept": "better", "reject": "worse"}
"""Without a claim nothing is accepted: the same finding, in words that decide nothing."""


def verdict_text(verdicts: Sequence[Verdict], colour: bool | None = None) -> str:
    """The printed block.

    Args:
        colour: None: only on a terminal, and not when NO_COLOR is set.
    """
    if colour is None:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    blocks = []
    for candidate in dict.fromkeys((verdict.baseline, verdict.candidate) for verdict in verdicts):
        own = [verdict for verdict in verdicts if (verdict.baseline, verdict.candidate) == candidate]
        # What is to be kept in mind for every metric is said once.
        common = [note for note in own[0].warnings if all(note in verdict.warnings for verdict in own)]
        unproven = [said for said in own[0].unproven if all(said in verdict.unproven for verdict in own)]
        lines = _head(own[0])
        for verdict in own:
            notes = [note for note in verdict.warnings if note not in common]
            apart = [said for said in verdict.unproven if said not in unproven]
            lines += ["", *_body(verdict, colour, notes), *_list("unproven", apart)]
        closing = [*_list("note", common), *_list("unproven", unproven)]
        blocks.append("\n".join([*lines, *([""] if closing else []), *closing]))
    rule = "\n\n" + "-" * WIDTH + "\n\n"
    return rule.join(blocks)


def _head(verdict: Verdict) -> list[str]:
    lines = _wrapped("candidate", f"{verdict.candidate}, against {verdict.baseline}")
    if verdict.question:
        lines += _wrapped("question", verdict.question)
    for axis in verdict.axes:
        lines += _wrapped("axis", f"{axis.name}: {say(axis.before)} -> {say(axis.after)}")
        if axis.kind == "group" and len(axis.leaves) > 1:
            lines += _wrapped("", f"(the choice moves {len(axis.leaves)} settings)")
    if not verdict.axes:
        lines += _wrapped("axis", "none differs")
    return lines


def _body(verdict: Verdict, colour: bool, notes: Sequence[str]) -> list[str]:
    word = verdict.decision if verdict.claim else DESCRIBED.get(verdict.decision, verdict.decision)
    shown = word.upper().ljust(LABEL)
    if colour:
        shown = f"\033[{COLOURS[word]}m{shown}\033[0m"
    lines = [f"{shown}{verdict.metric} ({verdict.better} is better)" + ("" if verdict.claim else ", no claim")]
    if verdict.effect is not None:
        lines += _numbers(verdict)
    if verdict.guards:
        failed = ", ".join(
            f"{entry['guard']} {entry['name']}" for entry in verdict.guards if entry["state"] == "failed"
        )
        lines += _wrapped("guards", guards_tally(verdict.guards) + (f": {failed}" if failed else ""))
    return [*lines, *_list("why", verdict.reasons), *_list("to do", verdict.recommendations), *_list("note", notes)]


def _list(label: str, texts: Sequence[str]) -> list[str]:
    return [line for index, text in enumerate(texts) for line in _wrapped("" if index else label, text)]


def _numbers(verdict: Verdict) -> Iterable[str]:
    assert verdict.effect is not None
    assert verdict.ci_low is not None
    assert verdict.ci_high is not None
    assert verdict.baseline_value is not None
    unit = f" {verdict.unit}" if verdict.unit else ""
    yield from _wrapped("values", f"{number(verdict.baseline_value, 4)} -> {number(verdict.candidate_value, 4)}{unit}")
    relative = "" if verdict.relative_effect is None else f" ({signed_percent(verdict.relative_effect, 2)})"
    yield from _wrapped(
        "effect",
        f"{_signed(verdict.effect)}{unit}{relative}, {verdict.confidence:.0%} interval {_signed(verdict.ci_low)} to "
        f"{_signed(verdict.ci_high)}",
    )
    p = "" if verdict.p_value is None else f", p {verdict.p_value:.2g}"
    if verdict.p_adjusted is not None:
        p += f" (Holm over {verdict.num_claims} claims: {verdict.p_adjusted:.2g})"
    yield from _wrapped("evidence", f"n {verdict.n:,} {verdict.unit_of_pairing}s; {verdict.test}{p}")
    gate = []
    if verdict.claim:
        if verdict.margin is not None:
            gate.append(f"may lose up to {number(verdict.margin)}{unit}")
        else:
            gate.append(f"bar {number(verdict.bar)}{unit}" if verdict.bar else "bar: any effect")
        gate.append("nothing expected" if verdict.expected is None else f"expected {_signed(verdict.expected)}")
    if verdict.claim and verdict.floor is not None:
        gate.append(f"floor {number(verdict.floor, 4)}")
    if verdict.spread is not None:
        gate.append(f"spread {verdict.spread:.1%}")
    if gate:
        yield from _wrapped("gate", ", ".join(gate))
    for label, beside in (("best part", verdict.against_best), ("control", verdict.against_control)):
        if beside and beside["effect"] is not None:
            yield from _wrapped(
                label,
                f"{beside['point']} ({number(beside['value'], 4)}): {_signed(beside['effect'])}, "
                f"{_signed(beside['ci_low'])} to {_signed(beside['ci_high'])}: {beside['decision']}",
            )


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {label}".ljust(LABEL), subsequent_indent=" " * LABEL, break_on_hyphens=False
    )
