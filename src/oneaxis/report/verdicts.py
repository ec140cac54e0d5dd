"""The tables, lines and cards of a multirun's page: pure functions of what `records` read.

A point that failed or is INVALID keeps its row, below the others, and is never named as best. Decisions are the
judge's; nothing is decided here.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import Any

from oneaxis.config import STAGE_SECTIONS
from oneaxis.multirun.record import Axis, Point
from oneaxis.report import text
from oneaxis.report.records import Multirun, Verdict
from oneaxis.report.tables import Link, Table

WORDS = {"accept": "✓ accept", "better": "▲ better", "reject": "✕ reject", "worse": "▼ worse", "tie": "= tie",
         "unresolved": "? unresolved", "invalid": "! INVALID", "not judged": "– not judged"}  # fmt: skip
"""Every decision with a sign of its own: colour alone tells nothing."""
DESCRIBED = {"accept": "better", "reject": "worse"}
"""Without a claim nothing is accepted: the same finding, in words that decide nothing."""
TONES = {"accept": "good", "reject": "bad", "invalid": "invalid", "not judged": "invalid"}
CARD_WORDS = 60
SHOWN_VALUES = 12
LEDGERS_IN_FULL = 6
"""Of more candidates, the guards of one metric are summed up in a row each."""
GUARD_WORDS = {"passed": "✓ passed", "failed": "✕ failed", "not applicable": "– not applicable",
               "unproven": "? unproven"}  # fmt: skip
GUARD_TONES = {"passed": "good", "failed": "bad"}


@dataclass(frozen=True)
class Row:
    """A candidate in one metric, as plot and table show it."""

    point: str
    decision: str
    reason: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict = field(default_factory=dict)
    anchor: str = ""
    """Of its row in the table."""
    control: bool = False
    """There to be beaten: never named as the one that is accepted."""

    @property
    def shown(self) -> tuple[str, str]:
        """Effect and interval as text."""
        return text.effect(self.effect, self.low, self.high)

    @property
    def sound(self) -> bool:
        """Whether it may be ranked."""
        return self.effect is not None and self.decision not in ("invalid", "not judged")


@dataclass(frozen=True)
class Comparison:
    """A metric: what was claimed of it, and all candidates against the baseline, best first, unsound last."""

    metric: str
    claimed: bool
    better: str | None
    bar: float | None
    margin: float | None
    expected: float | None
    unit: str
    rows: Sequence[Row]

    @property
    def id(self) -> str:
        """For anchors and for the ids inside plots."""
        return slug(self.metric)

    @property
    def asked(self) -> str:
        """What the claim asks of the effect, in a few words."""
        if self.margin is not None:
            return f"may lose up to {text.number(self.margin)}"
        return f"bar {text.number(self.bar)}" if self.bar else "bar any effect"

    @property
    def accepted(self) -> list[Row]:
        """Of a claim the accepted, else those that are better; best first."""
        return [row for row in self.rows if row.sound and row.decision in ("accept", "better") and not row.control]


def slug(name: str) -> str:
    """A name as a part of an anchor; two names that differ give two slugs."""
    return re.sub(r"[^A-Za-z0-9]", lambda found: "-" if found.group() in "/_. " else f"_{ord(found.group()):x}_", name)


# --- comparisons ---------------------------------------------------------------------------------------------


def comparisons(multirun: Multirun) -> list[Comparison]:
    """One per judged metric: claims first, in the order of the plan, then the others as the judge wrote them."""
    claims = {claim["metric"]: claim for claim in multirun.plan.experiment.get("claims", [])}
    verdicts = multirun.verdicts or []
    named = dict.fromkeys([*claims, *(v["metric"] for v in sorted(verdicts, key=lambda v: not v.get("claim")))])
    return [_comparison(multirun, metric, claims.get(metric), verdicts) for metric in named]


def _comparison(
    multirun: Multirun, metric: str, claim: Mapping[str, Any] | None, verdicts: Iterable[Verdict]
) -> Comparison:
    baseline = multirun.plan.baseline.name
    own = {v["candidate"]: v for v in verdicts if v["metric"] == metric and v["baseline"] == baseline}
    first: Mapping[str, Any] = claim or next(iter(own.values()), {})
    better = first.get("better")
    sign = -1.0 if better == "lower" else 1.0
    controls = {point.control for point in multirun.candidates}
    rows = [replace(_row(multirun, point, own.get(point.name)), anchor=f"{slug(metric)}-p{number}",
                    control=point.name in controls)
            for number, point in enumerate(multirun.candidates)
            if claim is not None or point.name in own or not multirun.ended_well(point.name)]  # fmt: skip
    rows.sort(key=lambda row: (not row.sound, row.effect is None, -sign * (row.effect or 0.0)))
    claimed = claim is not None or any(v.get("claim") for v in own.values())
    unit = next((str(v["unit"]) for v in own.values() if v.get("unit")), "")
    return Comparison(metric, claimed, better, first.get("bar"), first.get("margin"), first.get("expected"), unit, rows)


def _row(multirun: Multirun, point: Point, verdict: Verdict | None) -> Row:
    failed = [record for record in multirun.of(point.name) if record.state == "failed"]
    if verdict is None:
        why = _why_not(multirun, point.name) if multirun.verdicts is not None else "there are no verdicts"
        return Row(point.name, "not judged", why)
    decision = str(verdict["decision"]) if verdict["valid"] else "invalid"
    reasons = [str(reason).rstrip(".") for reason in verdict.get("reasons") or []]
    if not verdict.get("claim"):
        decision = DESCRIBED.get(decision, decision)
    if failed and decision != "invalid":
        decision, reasons = "invalid", [f"r{failed[0].job.repetition} failed", *reasons]
    return Row(point.name, decision, "; ".join(reasons), finite(verdict.get("effect")), finite(verdict.get("ci_low")),
               finite(verdict.get("ci_high")), verdict)  # fmt: skip


def _why_not(multirun: Multirun, point: str) -> str:
    states = {record.state: record for record in multirun.of(point)}
    for state in ("failed", "interrupted", "not ended", "not started"):
        if state in states:
            message = states[state].status.message if states[state].status else ""  # type: ignore[union-attr]
            return f"{state}: {message}" if message else state
    return "the judge wrote no verdict"


def finite(value: Any) -> float | None:
    """A number that can be drawn, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def effect_table(multirun: Multirun, comparison: Comparison) -> Table:
    """Candidates by effect, with everything that the decision rests on."""
    rows: list[list[str | Link]] = []
    for row in comparison.rows:
        v, p = row.verdict, finite(row.verdict.get("p_value"))
        adjusted = finite(v.get("p_adjusted"))
        holm = f"p {_p_value(adjusted)} by Holm over {v.get('num_claims')} claims" if adjusted is not None else ""
        rows.append([
            _to_page(multirun, row.point), WORDS.get(row.decision, row.decision),
            text.number(finite(v.get("baseline_value")), 4), text.number(finite(v.get("candidate_value")), 4),
            *row.shown, text.signed_percent(finite(v.get("relative_effect"))),
            ", ".join(filter(None, [
                text.plural(finite(v.get("n")), v.get("unit_of_pairing")),
                f"p {_p_value(p)}" if p is not None else "", str(v.get("test") or ""), holm,
            ])), row.reason,
        ])  # fmt: skip
    return Table(
        ("Point", "decision", "baseline", "candidate", "effect", "interval", "relative", "evidence", "why"), rows,
        "lsrrrrrww", caption=f"{comparison.metric}, by effect",
        note=f"Effect: candidate − baseline ({multirun.plan.baseline.name})"
        f"{f', in {comparison.unit}' if comparison.unit else ''}. Interval: "
        f"{text.percent(multirun.plan.gate.get('confidence'), 0)}, paired. {expectation(comparison)}",
        tones=[TONES.get(row.decision, "") for row in comparison.rows], ids=[row.anchor for row in comparison.rows],
    )  # fmt: skip


def short_table(multirun: Multirun, comparison: Comparison) -> Table:
    """The same rows with the decision alone, for the later metrics of a page that has many."""
    return Table(
        ("Point", "decision", "effect", "interval"),
        [[row.point, WORDS.get(row.decision, row.decision), *row.shown] for row in comparison.rows], "lsrr",
        caption=f"{comparison.metric}, by effect", note=expectation(comparison),
        tones=[TONES.get(row.decision, "") for row in comparison.rows], ids=[row.anchor for row in comparison.rows],
    )  # fmt: skip


def _p_value(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else text.number(p, 2)


def _to_page(multirun: Multirun, point: str) -> str | Link:
    page = next((record.page for record in multirun.of(point) if record.page), None)
    return Link(point, page) if page else point


def expectation(comparison: Comparison) -> str:
    """What was written down before the run."""
    if not comparison.claimed:
        return "No claim was made of it before the run."
    bar = f"smallest that counts {text.number(comparison.bar)}" if comparison.bar else "any effect counts"
    if comparison.margin is not None:
        bar = f"the claim is a loss of at most {text.number(comparison.margin)}"
    expected = text.signed(comparison.expected) if comparison.expected is not None else "none"
    return f"Before the run: {comparison.better} is better, {bar}, expected {expected}."


def verdict_line(comparison: Comparison) -> str:
    """A claim in one line: the best accepted candidate, and how many there are of each decision."""
    counts = [f"{n} {word.split(' ', 1)[1]}" for decision, word in WORDS.items()
              if (n := sum(row.decision == decision for row in comparison.rows if not row.control))]  # fmt: skip
    if comparison.accepted:
        best = comparison.accepted[0]
        unit = f" {comparison.unit}" if comparison.unit else ""
        said = f"{best.point} {'accepted' if comparison.claimed else 'is better'}, {' '.join(best.shown)}{unit}"
    else:
        said = "no candidate accepted" if comparison.claimed else "no candidate is better"
    if all(row.decision == "not judged" for row in comparison.rows):
        said = "not judged"
    expected = bar = ""
    if comparison.claimed:
        expected = f"; expected {text.signed(comparison.expected)}" if comparison.expected is not None else ""
        bar = f"; {comparison.asked}" if comparison.bar or comparison.margin is not None else ""
    return f"{said} ({', '.join(counts)}{expected}{bar})"


def everywhere(compared: Sequence[Comparison]) -> str:
    """Which candidates are accepted in every claim, in one line; empty where there are not two claims."""
    claims = [comparison for comparison in compared if comparison.claimed]
    if len(claims) < 2:
        return ""
    names = [row.point for row in claims[0].accepted if all(row.point in {r.point for r in c.accepted} for c in claims)]
    return f"Accepted in all {len(claims)} claims: {', '.join(names) or 'none'}."


def tally(compared: Sequence[Comparison]) -> list[tuple[str, int]]:
    """How many verdicts there are of each decision, over the claims, or over everything where nothing is claimed;
    without those on controls."""
    chosen = [comparison for comparison in compared if comparison.claimed] or compared
    rows = [row for comparison in chosen for row in comparison.rows if not row.control]
    return [(decision, n) for decision in WORDS if (n := sum(row.decision == decision for row in rows))]


# --- combination ---------------------------------------------------------------------------------------------


def combinations(multirun: Multirun, compared: Sequence[Comparison]) -> Table | None:
    """Each combination beside the best of its parts, per metric; None where there is none."""
    rows: list[list[str | Link]] = []
    tones = []
    for comparison in compared:
        found = {row.point: row for row in comparison.rows}
        for point in multirun.candidates:
            row = found.get(point.name)
            if row is None or point.role != "combination" or row.effect is None:
                continue
            best: Mapping[str, Any] = row.verdict.get("against_best") or {}
            name = str(row.verdict.get("best_single") or best.get("point") or text.NONE)
            single = found.get(name)
            effect = finite(best.get("effect"))
            if effect is None and single and single.effect is not None:
                effect = row.effect - single.effect
            rows.append([point.name, comparison.metric, WORDS.get(row.decision, row.decision), row.shown[0],
                         name, single.shown[0] if single else text.NONE,
                         *text.effect(effect, finite(best.get("ci_low")), finite(best.get("ci_high"))),
                         WORDS.get(str(best.get("decision")), text.NONE)])  # fmt: skip
            tones.append(TONES.get(row.decision, ""))
    if not rows:
        return None
    return Table(
        ("Combination", "metric", "decision", "effect", "best single", "its effect", "combination − single",
         "interval", "against it"), rows, "llsrlrrrl", caption="Combination against the best of its parts", tones=tones,
        note="A combination that does not beat its best part is not worth its other changes.",
    )  # fmt: skip


def controls(multirun: Multirun, compared: Sequence[Comparison]) -> Table | None:
    """Each change beside its control, per metric; None where none has one."""
    rows: list[list[str | Link]] = []
    tones = []
    for comparison in compared:
        found = {row.point: row for row in comparison.rows}
        for point in multirun.candidates:
            row = found.get(point.name)
            against: Mapping[str, Any] = (row.verdict.get("against_control") or {}) if row else {}
            if row is None or not against:
                continue
            control = found.get(point.control)
            ends = (finite(against.get(name)) for name in ("effect", "ci_low", "ci_high"))
            rows.append([point.name, comparison.metric, WORDS.get(row.decision, row.decision), row.shown[0],
                         point.control, control.shown[0] if control else text.NONE, *text.effect(*ends),
                         WORDS.get(str(against.get("decision")), text.NONE)])  # fmt: skip
            tones.append(TONES.get(row.decision, ""))
    if not rows:
        return None
    return Table(
        ("Change", "metric", "decision", "effect", "control", "its effect", "change − control", "interval",
         "against it"), rows, "llsrlrrrl", caption="Changes against their controls", tones=tones,
        note="A change that does not beat its control does not help for the reason that it was made for.",
    )  # fmt: skip


def guards_table(comparison: Comparison) -> Table | None:
    """The guards of every candidate in one metric, those that failed first; None where no verdict has them."""
    judged = [row for row in comparison.rows if row.verdict.get("guards")]
    if not judged:
        return None
    tallies = dict.fromkeys(text.guards_tally(row.verdict["guards"]) for row in judged)
    caption = f"{comparison.metric}: {' / '.join(tallies)}" if len(tallies) <= 2 else f"{comparison.metric}: guards"
    if len(judged) > LEDGERS_IN_FULL:
        failed = [[entry for entry in row.verdict["guards"] if entry["state"] == "failed"] for row in judged]
        rows: list[list[str | Link]] = [
            [row.point, text.guards_tally(row.verdict["guards"]), ". ".join(_guard_title(entry) for entry in own)]
            for row, own in zip(judged, failed, strict=True)
        ]
        return Table(("Point", "guards", "failed"), rows, "lsw", caption=caption, folded=True,
                     tones=["bad" if own else "good" for own in failed])  # fmt: skip
    entries = [(row, entry) for row in judged
               for entry in sorted(row.verdict["guards"], key=lambda entry: entry["state"] != "failed")]  # fmt: skip
    rows = [
        [
            row.point, _guard_title(entry), GUARD_WORDS[entry["state"]], text.evidence(entry.get("evidence") or {}),
            ". ".join(filter(None, (entry.get("reason"), entry.get("recommendation"), *(entry.get("notes") or ())))),
        ]
        for row, entry in entries
    ]  # fmt: skip
    return Table(
        ("Point", "guard", "", "what it saw", "why, and what to do"), rows, "llsww", caption=caption, folded=True,
        tones=[GUARD_TONES.get(entry["state"], "") for _, entry in entries],
        note="Figures of several runs are the largest of them. docs/guards.md says what each guard stands against.",
    )  # fmt: skip


def _guard_title(entry: Mapping[str, Any]) -> str:
    return f"{entry['guard']} {entry['name']}"


# --- the points ----------------------------------------------------------------------------------------------


def asked(multirun: Multirun) -> list[tuple[str, str]]:
    """What was decided before the first job."""
    plan = multirun.plan
    gate = plan.gate
    lines = [("Baseline", plan.baseline.name)]
    if plan.axis:
        lines.append(("Axis", plan.axis))
        values = _values(multirun)
        more = f", … ({len(values)} in all)" if len(values) > SHOWN_VALUES else ""
        lines.append(("Values", f"{before_value(multirun)} → {', '.join(values[:SHOWN_VALUES])}{more}"))
    else:
        lines.append(("Changes", ", ".join(point.name for point in multirun.candidates)))
    repetitions = len({job.repetition for job in plan.jobs})
    lines.append(("Jobs", f"{len(plan.points)} points, {len(plan.jobs)} jobs"
                  + (f", {repetitions} repetitions in alternating order" if repetitions > 1 else "")))  # fmt: skip
    if gate:
        lines.append(
            (
                "Gate",
                f"{text.percent(gate.get('confidence'), 0)} intervals, floor "
                f"{text.percent(gate.get('floor'), 0)} of the baseline, spread of repetitions at most "
                f"{text.percent(gate.get('max_spread'), 0)}, {gate.get('min_pairs')} pairs for a timing",
            )
        )
    if plan.experiment.get("cost"):
        lines.append(("Cost", str(plan.experiment["cost"])))
    if plan.experiment.get("deadline"):
        lines.append(("Decide by", str(plan.experiment["deadline"])))
    return lines


def before_value(multirun: Multirun) -> str:
    """The axis's value in the baseline."""
    axes = [axis for point in multirun.candidates for axis in point.axes if axis.name == multirun.plan.axis]
    return text.value_text(axes[0].before) if axes else text.NONE


def _values(multirun: Multirun) -> list[str]:
    return [text.value_text(axis.after) for point in multirun.candidates for axis in point.axes
            if axis.name == multirun.plan.axis]  # fmt: skip


def axis_values(multirun: Multirun) -> dict[str, float]:
    """Point -> value of the axis, the baseline's included; empty unless the one axis is a number everywhere."""
    name, baseline = multirun.plan.axis, multirun.plan.baseline.name
    values: dict[str, Any] = {}
    for point in multirun.candidates:
        if point.role != "single" or len(point.axes) != 1 or point.axes[0].name != name:
            return {}
        values[baseline], values[point.name] = point.axes[0].before, point.axes[0].after
    if any(isinstance(value, bool) or finite(value) is None for value in values.values()):
        return {}
    return {point: float(value) for point, value in values.items()}


def axes_table(multirun: Multirun) -> Table:
    """What each point changes."""
    rows: list[list[str | Link]] = []
    controlled = {point.control: point.name for point in multirun.candidates if point.control}
    for point in multirun.plan.points:
        role = f"control of {controlled[point.name]}" if point.name in controlled else point.role
        if not point.axes:
            rows.append([point.name, role, "nothing", "", ""])
        for axis in point.axes:
            rows.append([point.name, role, axis.name, text.value_text(axis.before), text.value_text(axis.after)])
    return Table(("Point", "role", "axis", "baseline", "here"), rows, "lllll", caption="What each point changes")


def leaves_tables(multirun: Multirun) -> list[Table]:
    """Each setting that a group's choice moves, one folded table per point and group."""
    return [
        Table(("Setting", "baseline", "here"),
              [[key, text.value_text(pair[0]), text.value_text(pair[1])] for key, pair in sorted(axis.leaves.items())],
              "lll", caption=f"{point.name}: what {_choice(axis)} moves", folded=True)
        for point in multirun.candidates
        for axis in point.axes
        if axis.kind == "group" and axis.leaves
    ]  # fmt: skip


def _choice(axis: Axis) -> str:
    return f"{axis.name}={text.value_text(axis.after)}"


def jobs_table(multirun: Multirun) -> Table:
    """How each job ended, what ran in it and what that cost beyond the stages."""
    rows: list[list[str | Link]] = []
    tones = []
    for record in multirun.records:
        status = record.status
        name = f"{record.job.point} r{record.job.repetition}"
        first: str | Link = Link(name, record.page) if record.page else name
        if status is None:
            rows.append([first, record.state, "", _stages(record.restored), "", "", "", ""])
        else:
            staged = sum(status.stage_seconds.values())
            over = max(0.0, status.seconds - staged - status.waited_s)
            rows.append([first, status.state, _stages(status.ran) or "nothing", _stages(record.restored),
                         text.seconds(status.seconds), text.seconds(over), text.seconds(status.waited_s),
                         status.node])  # fmt: skip
        tones.append("" if record.state == "done" else "bad")
    return Table(
        ("Job", "state", "ran", "restored or unchanged", "took", "overhead", "waited", "node"), rows, "lsllrrrl",
        caption="Jobs, in their order", tones=tones, folded=len(rows) > 24,
        note="Overhead: what a job took beyond its stages and its waiting for a slot, a stage or the device.",
    )  # fmt: skip


def _stages(names: Sequence[str]) -> str:
    return "all" if len(names) == len(STAGE_SECTIONS) else ", ".join(names)


def failures_table(multirun: Multirun) -> Table | None:
    """The jobs that did not end well, each with its line; None where all did."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for record in multirun.records:
        if record.state != "done":
            code = str(record.status.exit_code) if record.status else text.NONE
            message = record.status.message if record.status else ""
            said = message or f"{record.state}; `oneaxis run -m --resume {multirun.plan.id}` runs it"
            groups.setdefault((record.job.point, record.state, code, said), []).append(f"r{record.job.repetition}")
    rows = [[f"{point} {', '.join(which)}", state, code, said] for (point, state, code, said), which in groups.items()]
    if not rows:
        return None
    return Table(("Job", "state", "exit code", "what it said"), rows, "lsrw", caption="Failures",
                 tones=["bad"] * len(rows))  # fmt: skip


def repetitions(multirun: Multirun, metric: str) -> dict[str, list[tuple[int, float, float]]]:
    """Point -> (repetition, minutes since the multirun's first measurement, value); empty for a single repetition."""
    stage = metric.partition("/")[0]
    measured = [
        (record, datetime.fromisoformat(record.provenance[stage]["started_at"]).timestamp() / 60)
        for record in multirun.records
        if finite(record.metrics.get(metric)) is not None and "started_at" in record.provenance.get(stage, {})
    ]
    if len({record.job.repetition for record, _ in measured}) < 2:
        return {}
    began = min(minute for _, minute in measured)
    found: dict[str, list[tuple[int, float, float]]] = {}
    for record, minute in sorted(measured, key=lambda pair: pair[1]):
        found.setdefault(record.job.point, []).append(
            (record.job.repetition, minute - began, float(record.metrics[metric]))
        )
    return found


def repetitions_table(metric: str, measured: Mapping[str, Sequence[tuple[int, float, float]]]) -> Table:
    """Every value of every repetition, in run order."""
    flat = sorted(((minute, repetition, point, value) for point, values in measured.items()
                   for repetition, minute, value in values))  # fmt: skip
    return Table(("Point", "repetition", "minute", "value"),
                 [[point, str(repetition), f"{minute:.1f}", text.number(value, 4)]
                  for minute, repetition, point, value in flat], "lrrr", caption=f"{metric}: every repetition",
                 folded=True)  # fmt: skip


# --- cards, certainty, provenance ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A verdict in at most 60 words, its evidence and its date among them."""

    decision: str
    words: str
    date: str
    evidence: Link
    about: str
    """What the link is about, for those who hear it alone."""

    @property
    def plain(self) -> str:
        """As Markdown, one paragraph."""
        date = f" Decide by {self.date}." if self.date else ""
        return f"**{self.decision.upper()}** {self.words}{date} [{self.evidence.text}]({self.evidence.href})"


def cards(multirun: Multirun, compared: Sequence[Comparison]) -> list[Card]:
    """One per verdict, claims first, in the order of the tables."""
    return [_card(multirun, comparison, row) for comparison in compared for row in comparison.rows if row.verdict]


def _card(multirun: Multirun, comparison: Comparison, row: Row) -> Card:
    v, date = row.verdict, str(multirun.plan.experiment.get("deadline") or "")
    page = next((record.page for record in multirun.of(row.point) if record.page), None)
    evidence = Link("Evidence", page or f"report.html#{row.anchor}")
    numbers = ", no effect measured"
    if row.effect is not None:
        numbers = (f" {text.number(finite(v.get('baseline_value')), 4)} → "
                   f"{text.number(finite(v.get('candidate_value')), 4)}, {' '.join(row.shown)}")  # fmt: skip
    n = finite(v.get("n"))
    said = [f"{_cut(row.point, 4)}: {comparison.metric}{numbers}"
            + (f", n = {text.plural(n, v.get('unit_of_pairing'))}." if n is not None else ".")]  # fmt: skip
    if comparison.claimed:
        expected = text.signed(comparison.expected) if comparison.expected is not None else "nothing stated"
        said.append(f"Expected {expected}, {comparison.asked}.")
    said += [_sentence(_cut(str(reason).rstrip("."), 24)) for reason in v.get("reasons") or []]

    def made(sentences: Sequence[str]) -> Card:
        return Card(row.decision, " ".join(sentences), date, evidence, f"{row.point}, {comparison.metric}")

    kept: list[str] = []
    for sentence in said:
        if len(made([*kept, sentence]).plain.split()) <= CARD_WORDS:
            kept.append(sentence)
    return made(kept)


def _sentence(words: str) -> str:
    """With a capital where the first word is a plain one, and not a name such as `prefill_heavy`."""
    first = words.partition(" ")[0]
    return f"{words[:1].upper()}{words[1:]}." if first.isalpha() else f"{words}."


def _cut(words: str, most: int) -> str:
    parts = words.split()
    return " ".join(parts) if len(parts) <= most else " ".join(parts[:most]) + "…"


def certainty(multirun: Multirun) -> list[tuple[str, str]]:
    """What the judge recommends, each once, with the points it is about."""
    return _lines_with_points(multirun, "recommendations")


def notes(multirun: Multirun) -> list[tuple[str, str]]:
    """What the judge warns of, each once, with the points it is about."""
    return _lines_with_points(multirun, "warnings")


def _lines_with_points(multirun: Multirun, key: str) -> list[tuple[str, str]]:
    about: dict[str, dict[str, None]] = {}
    for verdict in multirun.verdicts or []:
        for line in verdict.get(key) or []:
            about.setdefault(str(line), {})[str(verdict["candidate"])] = None
    return [
        (line, ", ".join(list(points)[:5]) + (f" and {len(points) - 5} more" if len(points) > 5 else ""))
        for line, points in about.items()
    ]


def provenance_tables(multirun: Multirun) -> list[Table]:
    """The commit, the machines and the versions; what is not the same in all jobs is said."""
    plan = multirun.plan
    facts = [facts for record in multirun.records for facts in record.provenance.values()]
    nodes = dict.fromkeys(record.status.node for record in multirun.records if record.status)
    rows: list[list[str | Link]] = [
        ["multirun", plan.id], ["planned at (UTC)", plan.created_at[:19].replace("T", " ")],
        ["snapshot", plan.snapshot or text.NONE], ["command", f"oneaxis run -m {' '.join(plan.overrides)}".strip()],
        ["launcher", " ".join(plan.launcher) or "basic: one job after another"], ["session", plan.session],
        ["nodes", ", ".join(nodes) or text.NONE],
    ]  # fmt: skip
    rows += [[f"machine: {key.replace('_', ' ')}", value] for key, value in
             _once_each(facts_.get("hardware", {}) for facts_ in facts).items()]  # fmt: skip
    tables = [Table(("Fact", "value"), rows, "ll", caption="Origin")]
    versions = _once_each(facts_.get("versions", {}) for facts_ in facts)
    if versions:
        tables.append(Table(("Package", "version"), [[name, versions[name]] for name in sorted(versions)], "ll",
                            caption="Versions", folded=True))  # fmt: skip
    return tables


def _once_each(parts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    seen: dict[str, dict[str, None]] = {}
    for key, value in chain.from_iterable(part.items() for part in parts):
        seen.setdefault(str(key), {})[text.value_text(value)] = None
    return {key: next(iter(values)) if len(values) == 1 else f"DIFFERS: {'; '.join(values)}"
            for key, values in seen.items()}  # fmt: skip
