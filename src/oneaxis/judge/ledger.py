"""The guards of a comparison: each passed with its evidence, failed with its reason, or not applicable.

A function of `conditions` looks at two arms and gives a `Finding`: what it saw, and its problems. The guards of each
single run come from the runs' own `guards.json`. Here both are put together, one row a guard, so that a reader sees
what was checked, and not only what failed. Pure functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from oneaxis.judge.guards import Guard
from oneaxis.judge.units import Problem
from oneaxis.judge.validity import OF_ONE_RUN

NAMES = {
    1: "unique prompts",
    2: "token truth",
    3: "realised config",
    4: "one axis",
    5: "load fidelity",
    6: "survivors",
    7: "output limit honoured",
    8: "frozen draws",
    9: "stalls",
    10: "exclusive device",
    11: "acceptance gate",
    12: "bar before run",
    13: "warm-up",
    14: "same conditions",
    15: "server truth",
}
OF_ANY_METRIC = (4, 11, 12, 14)
"""These apply to whatever is compared, those of one run to a load."""

State = Literal["passed", "failed", "unproven", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """What one guard saw of two arms."""

    number: int
    evidence: Mapping[str, Any]
    problems: Sequence[Problem] = field(default_factory=tuple)


@dataclass(frozen=True)
class Entry:
    """A guard's row in the ledger of a comparison."""

    guard: Guard
    state: State
    notes: Sequence[str] = field(default_factory=tuple)
    """What is to be kept in mind though it passed, what is not proven, or why it does not apply."""

    def as_json(self) -> dict[str, Any]:
        """As `verdicts.json` holds it."""
        return {**self.guard.as_json(), "state": self.state, "notes": list(self.notes)}


def ledger(
    findings: Iterable[Finding],
    runs: Mapping[str, Sequence[Mapping[str, Any]] | None],
    not_applicable: Mapping[int, str],
    unproven: Mapping[int, Sequence[str]] = MappingProxyType({}),
) -> list[Entry]:
    """All of them, in their order.

    Args:
        findings: of both arms; several of one number are one guard.
        runs: name of a run -> its `guards.json`; None where it has none. Empty for a metric that rests on no load.
        not_applicable: number -> why this guard has nothing to look at. A finding of that number is stronger.
        unproven: number -> what the records do not show of it, where others than ours were judged. A failure is
            stronger, and a guard that nothing failed has not passed.
    """
    found: dict[int, list[Finding]] = {number: [] for number in NAMES}
    for finding in [*findings, *_of_runs(runs)]:
        if finding.number in found:
            found[finding.number].append(finding)
    return [_entry(number, own, not_applicable.get(number), unproven.get(number, ())) for number, own in found.items()]


def _entry(number: int, findings: Sequence[Finding], why_not: str | None, unproven: Sequence[str]) -> Entry:
    problems = [problem for finding in findings for problem in finding.problems]
    failures = [problem for problem in problems if problem.kind != "warning"]
    notes = [problem.reason for problem in problems if problem.kind == "warning"]
    evidence = {key: value for finding in findings for key, value in finding.evidence.items()}
    if not findings and unproven:
        return Entry(Guard(number, NAMES[number], True, {}), "unproven", list(unproven))
    if not findings:
        guard = Guard(number, NAMES[number], True, {})
        return Entry(guard, "not applicable", [why_not or "nothing in these records speaks of it"])
    guard = Guard(
        number,
        NAMES[number],
        not failures,
        evidence,
        "; ".join(dict.fromkeys(problem.reason for problem in failures)),
        "; ".join(dict.fromkeys(problem.recommendation for problem in failures if problem.recommendation)),
    )
    if failures:
        return Entry(guard, "failed", notes)
    return Entry(guard, "unproven" if unproven else "passed", [*unproven, *notes])


def _of_runs(runs: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> list[Finding]:
    """The runs' own guards: of each number, how many runs passed, and the largest figures that any of them saw.

    Why one failed is a finding of its own (`conditions.arms_valid`).
    """
    findings = []
    documents = {name: held for name, held in runs.items() if held}
    for number in OF_ONE_RUN:
        rows = {name: row for name, held in documents.items() for row in held if row["guard"] == number}
        if not rows:
            continue
        evidence: dict[str, Any] = {"runs": len(runs), "runs_passed": sum(bool(row["valid"]) for row in rows.values())}
        for row in rows.values():
            for key, value in (row.get("evidence") or {}).items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                evidence[key] = max(value, evidence.get(key, value))
        without = sorted(set(runs) - set(rows))
        said = (
            f"{len(without)} of {len(runs)} runs have no record of this guard, such as {without[0]}" if without else ""
        )
        findings.append(Finding(number, evidence, [Problem("warning", said)] if said else []))
    return findings
