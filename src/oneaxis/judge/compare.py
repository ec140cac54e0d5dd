"""Two arms and one metric to a verdict: may they be compared, what do the pairs say, and does the gate accept.

`prepare` does all that one comparison can do alone; `conclude` adds what several claims at once ask of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oneaxis.config.schema import Claim, Gate
from oneaxis.errors import UserError
from oneaxis.judge import conditions, units
from oneaxis.judge.founded import unfounded
from oneaxis.judge.gate import Decision, Evidence, Word, decide, floor_of, under_the_floor, unsteady, weigh
from oneaxis.judge.ledger import NAMES, OF_ANY_METRIC, Entry, Finding, ledger
from oneaxis.judge.records import UPSTREAM, Record, find_records
from oneaxis.judge.units import Better, Problem
from oneaxis.judge.validity import OF_ONE_RUN
from oneaxis.multirun.record import Axis


@dataclass(frozen=True)
class Verdict:
    """One candidate against the baseline in one metric, as `verdicts.json` holds it."""

    point: str
    metric: str
    better: Better
    question: str
    changed_axis: str
    """Its name; of several, joined by +."""
    axes: Sequence[Axis]
    baseline: str
    candidate: str
    claim: bool
    """Whether a claim was made; else the comparison describes and decides nothing."""
    valid: bool
    decision: Word
    n: int
    unit_of_pairing: str
    unit: str
    """Of the values."""
    baseline_value: float | None
    candidate_value: float | None
    effect: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float
    relative_effect: float | None
    test: str
    p_value: float | None
    p_adjusted: float | None
    """By Holm over the claims of the multirun; None where there is one, or none."""
    num_claims: int
    floor: float | None
    spread: float | None
    """Of the arm that spreads more; repetitions only."""
    bar: float
    margin: float | None
    """The largest loss that can be borne; then the claim is non-inferiority."""
    expected: float | None
    best_single: str | None
    """Of a combination: its best part."""
    against_best: dict[str, Any] | None
    """Of a combination: effect, interval, p-value and decision against that part."""
    against_control: dict[str, Any] | None
    """Of a change with a control: the same against it."""
    reasons: Sequence[str]
    recommendations: Sequence[str]
    warnings: Sequence[str]
    unproven: Sequence[str] = ()
    """Of results of other tools: what their files do not show, by guard."""
    guards: Sequence[Mapping[str, Any]] = ()
    """All of them: passed, failed or not applicable, with what each saw (`oneaxis.judge.ledger`)."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """What two arms say of one metric before several claims are weighed together."""

    baseline: str
    candidate: str
    claim: Claim
    claimed: bool
    question: str
    gate: Gate
    axes: Sequence[Axis]
    evidence: Evidence | None
    findings: Sequence[Finding] = field(default_factory=tuple)
    """What each guard of the comparison saw."""
    others: Sequence[Problem] = field(default_factory=tuple)
    """Problems that are no guard's: a run that failed, a metric that is not there."""
    runs: Mapping[str, Any] = field(default_factory=dict)
    """Name of a run -> its own guards; empty where the metric rests on no load."""
    unproven: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Guard -> what results of other tools do not show of it."""

    @property
    def problems(self) -> list[Problem]:
        """All of them."""
        return [*self.others, *(problem for finding in self.findings for problem in finding.problems)]

    def of(self, kind: str) -> list[Problem]:
        """The problems of one kind."""
        return [problem for problem in self.problems if problem.kind == kind]

    @property
    def idle(self) -> bool:
        """Whether nothing was claimed of the metric and the axis does not reach its stage: nothing to say."""
        stage = self.claim.metric.partition("/")[0]
        return not self.claimed and bool(self.axes) and not conditions.reaches(self.axes, (stage, *UPSTREAM[stage]))

    @property
    def tested(self) -> bool:
        """Whether its p-value counts among the claims."""
        # Margins must hold all together, which needs no correction (intersection-union).
        return self.claimed and self.claim.margin is None and self.evidence is not None and not self.of("invalid")


def compare(
    baseline: Sequence[Path],
    candidate: Sequence[Path],
    claim: Claim,
    gate: Gate,
    *,
    names: tuple[str, str] | None = None,
    axes: Sequence[Axis] | None = None,
    combination: bool = False,
    written_at: str | None = None,
    claimed: bool = True,
    question: str = "",
) -> Verdict:
    """Compare two arms in one metric.

    Args:
        baseline, candidate: each the folders of its runs: jobs' records, roots of projects, or folders of artifacts.
        names: of the arms; by default those of the folders.
        axes: as declared; None: what differs between the settings.
        combination: several axes are declared.
        written_at: when the claim was written (`plan.json`); None: now, at judging time.
        claimed: False: describe, without a claim.

    Raises:
        UserError: for a folder without artifacts, or a broken file.
    """
    arms = [[record for path in paths for record in find_records(path)] for paths in (baseline, candidate)]
    for arm, side in zip(arms, ("baseline", "candidate"), strict=True):
        if not arm:
            raise UserError(f"{side}: no folder given; allowed: one or more")
    prepared = prepare(
        arms[0], arms[1], claim, gate, names=names or (arms[0][0].name, arms[1][0].name), axes=axes,
        combination=combination, written_at=written_at, claimed=claimed, question=question,
    )  # fmt: skip
    return conclude(prepared)


def prepare(
    baseline: Sequence[Record],
    candidate: Sequence[Record],
    claim: Claim,
    gate: Gate,
    *,
    names: tuple[str, str],
    axes: Sequence[Axis] | None,
    combination: bool,
    written_at: str | None,
    claimed: bool,
    question: str,
) -> Comparison:
    """Everything but the correction for several claims; arguments as of `compare`."""
    stage = claim.metric.partition("/")[0]
    timed = units.kind_of(claim.metric) == "repetitions"
    if stage not in UPSTREAM:
        unknown = Problem("unresolved", f"no stage `{stage}` measures anything", f"claim one of {', '.join(UPSTREAM)}")
        return Comparison(*names, claim, claimed, question, gate, list(axes or ()), None, others=[unknown])
    if not timed and units.kind_of(claim.metric) != "exact":
        baseline, candidate = baseline[:1], candidate[:1]
    arms = (list(baseline), list(candidate))
    of_runs = list(conditions.arms_valid(arms, stage))
    problems = [found for found in of_runs if isinstance(found, Problem)]
    findings = [found for found in of_runs if isinstance(found, Finding)]
    found_axes = list(axes or ())
    evidence = None
    if all(record.ended for arm in arms for record in arm):
        found_axes, beyond = conditions.one_axis(arms[0][0], arms[1][0], axes, combination)
        findings.append(beyond)
        if not conditions.reaches(found_axes, (stage, *UPSTREAM[stage])) and found_axes:
            said = f"the axis does not reach {stage}: {claim.metric} cannot move by it"
            problems.append(Problem("warning", said))
        findings += _conditions(arms, stage, timed, found_axes)
        if claimed:
            findings.append(conditions.bar_before_run(arms, stage, written_at, claim.expected, timed))
        evidence, found = _evidence(arms, claim, gate, timed)
        problems += found
    void = _unfounded(arms, claim.metric) if timed and stage == "sweep" else []
    problems += void
    if evidence and timed and stage == "sweep" and not void:
        size = abs(claim.expected or claim.bar or claim.margin or evidence.effect)
        findings.append(conditions.stalls(arms, claim.metric, size))
        findings.append(_peak(arms, claim, gate))
    runs = {}
    if stage == "sweep":
        runs = {record.name: record.results.document("sweep", "guards.json") for arm in arms for record in arm}
    return Comparison(*names, claim, claimed, question, gate, found_axes, evidence, findings, problems, runs)


def _conditions(arms: conditions.Arms, stage: str, timed: bool, axes: Sequence[Axis]) -> list[Finding]:
    """The guards of the conditions under which both arms were measured."""
    first, second = arms[0][0], arms[1][0]
    findings = [conditions.same_inputs(first, second, axes, stage), conditions.same_conditions(arms, stage, timed),
                conditions.arms_uniform(arms)]  # fmt: skip
    if not timed:
        # What a computation's last bits are depends on the engine that computes it.
        return findings + (conditions.realised_alike(first, second, axes, stage) if stage == "diverge" else [])
    runs = units.aligned(*arms)
    missing = []
    if len(runs) < max(len(arm) for arm in arms):
        missing.append(conditions.invalid(
            f"{len(arms[0])} runs of the baseline and {len(arms[1])} of the candidate give {len(runs)} pairs",
            "run what is missing: `oneaxis run -m --resume ID` (ID: the folder's name in multirun/)",
        ))  # fmt: skip
    findings += [Finding(11, {"pairs": len(runs)}, missing), conditions.one_session(arms, stage)]
    findings += [conditions.stray_tenants(arms, stage), *conditions.realised_alike(first, second, axes, stage)]
    said = {problem.reason for finding in findings for problem in finding.problems}
    for one, other in runs[1:]:
        for finding in conditions.realised_alike(one, other, axes, stage):
            more = [problem for problem in finding.problems if problem.reason not in said]
            said |= {problem.reason for problem in more}
            findings += [Finding(finding.number, finding.evidence, more)] if more else []
    if stage == "sweep":
        found = (conditions.same_arrivals(runs, axes), conditions.hit_rates_agree(arms, axes))
        findings += [finding for finding in found if finding]
        findings.append(conditions.warmed_alike(runs))
    return findings


def _gate_finding(comparison: Comparison, decision: Decision) -> Finding | None:
    """Guard 11, the gate itself: whether the evidence is of a kind that may decide, and holds the floor."""
    evidence, claim, gate = comparison.evidence, comparison.claim, comparison.gate
    if evidence is None:
        return None
    seen: dict[str, Any] = {"pairs": evidence.n, "interval": [evidence.ci_low, evidence.ci_high],
                            "decision": decision.word}  # fmt: skip
    if evidence.spreads:
        seen["spread"] = max(evidence.spreads)
    if evidence.kind in ("repetitions", "requests") and (noisy := unsteady(evidence, gate)):
        found = [Problem("unresolved", reason, noisy.recommendations[0]) for reason in noisy.reasons]
        return Finding(11, seen, found)
    low = under_the_floor(evidence, claim.better, gate, claim.margin)
    return Finding(11, seen, [Problem("reject", low.reasons[0], low.recommendations[0])] if low else [])


def _not_applicable(comparison: Comparison) -> dict[int, str]:
    """Why some of the guards have nothing to look at in this metric."""
    stage, metric = comparison.claim.metric.partition("/")[0], comparison.claim.metric
    kind = units.kind_of(metric)
    if comparison.others and not comparison.findings:
        return dict.fromkeys(NAMES, "the comparison went no further: see the reasons")
    if stage == "load":
        return {8: "these files hold no calls made twice", 11: "no evidence", 12: "nothing is claimed"}
    if stage == "sweep":
        return dict.fromkeys(OF_ONE_RUN, "the runs' guards.json has none of it") | {12: "nothing is claimed"}
    measured = "no load is measured" if kind == "repetitions" else f"no timing: paired by {units.UNIT_NAMES[kind]}"
    return {number: f"{metric}: {measured}" for number in OF_ONE_RUN if number not in OF_ANY_METRIC} | {
        11: "no evidence", 12: "nothing is claimed"}  # fmt: skip


def _evidence(arms: conditions.Arms, claim: Claim, gate: Gate, timed: bool) -> tuple[Evidence | None, list[Problem]]:
    """The pairs and what they say; or why there are none."""
    paired = units.pair(claim.metric, *arms)
    if isinstance(paired, Problem):
        return None, [paired]
    problems = []
    if timed:
        unsupported = units.percentile_problem(claim.metric, [r for arm in arms for r in arm], gate.confidence)
        problems += [unsupported] if unsupported else []
    else:
        for arm, value in zip(arms, (paired.baseline_value, paired.candidate_value), strict=True):
            told = arm[0].results.metrics.get(claim.metric)
            if told is not None and abs(told - value) > 1e-6 * max(1.0, abs(told)):
                problems.append(conditions.invalid(
                    f"{arm[0].name}: its metrics say {told:.6g} and its table gives {value:.6g}", "run the stage again"
                ))  # fmt: skip
    if len(paired.baseline) < 2 and units.kind_of(claim.metric) != "exact":
        unit = units.UNIT_NAMES[units.kind_of(claim.metric)]
        reason = f"{len(paired.baseline)} {unit}: an interval needs two, a decision more"
        more = "run more repetitions" if timed else "measure on more of them"
        return None, [*problems, Problem("unresolved", reason, more)]
    return weigh(units.kind_of(claim.metric), paired, gate.confidence), problems


def _unfounded(arms: conditions.Arms, metric: str) -> list[Problem]:
    """Why what was recorded of a load does not follow from its tables; a claim on goodput rests on the peak too."""
    cell = units.CELL_LATENCY.match(metric)
    peak = [_peak_of(cell["shape"])] if cell and cell["name"] == "goodput_tok_s" else []
    return [problem for arm in arms for record in arm if record.ended for problem in unfounded(record, [metric, *peak])]


def _peak_of(shape: str) -> str:
    return f"sweep/{shape}/capacity_tok_s"


def _peak(arms: conditions.Arms, claim: Claim, gate: Gate) -> Finding:
    """Guard 11 speaks of the peak: a claim on goodput at one rate must not cost the shape's capacity."""
    match = units.CELL_LATENCY.match(claim.metric)
    if not match or match["name"] != "goodput_tok_s":
        return Finding(11, {})
    name = _peak_of(match["shape"])
    peaks = [[record.results.metrics.get(name) for record in arm] for arm in arms]
    known = [[value for value in arm if value is not None] for arm in peaks]
    if len(known[0]) < len(peaks[0]):
        said = f"guard 11: the peak of the baseline is not known: not every run of it has a {name}"
        return Finding(11, {}, [Problem("warning", said)])
    if len(known[1]) < len(peaks[1]):
        lost = len(peaks[1]) - len(known[1])
        said = f"guard 11: the baseline has a {name}, and the candidate has none in {lost} of {len(peaks[1])} runs"
        return Finding(11, {}, [Problem("reject", said, "keep the baseline")])
    means = [sum(values) / len(values) for values in known]
    seen = {"peaks_tok_s": means}
    if means[1] < gate.floor * means[0]:
        said = f"guard 11: the candidate's peak, {means[1]:.4g} tok/s, is under {gate.floor:.0%} of {means[0]:.4g}"
        return Finding(11, seen, [Problem("reject", said, "keep the baseline")])
    return Finding(11, seen)


def conclude(
    comparison: Comparison, p_adjusted: float | None = None, num_claims: int = 1, against: Comparison | None = None,
    *, control: bool = False,
) -> Verdict:  # fmt: skip
    """The verdict of a comparison.

    Args:
        p_adjusted, num_claims: of the family of claims it belongs to; None: it stands alone.
        against: the same metric against what has to be beaten too: of a combination its best single change.
        control: whether that is the candidate's control instead.
    """
    claim, evidence, gate = comparison.claim, comparison.evidence, comparison.gate
    decision = _decide(comparison, p_adjusted, num_claims)
    warnings = [problem.reason for problem in comparison.of("warning")]
    if evidence and claim.expected is not None and not evidence.ci_low <= claim.expected <= evidence.ci_high:
        warnings.append(f"the effect expected, {claim.expected:+g}, lies outside the interval")
    beside = None
    if against is not None:
        decision, beside = _beaten_too(decision, against, control=control)
    axes = comparison.axes
    own = _gate_finding(comparison, decision)
    entries: list[Entry] = ledger(
        [*comparison.findings, *([own] if own else [])], comparison.runs, _not_applicable(comparison),
        comparison.unproven,
    )  # fmt: skip
    # What was not claimed before the run decides nothing afterwards.
    decides = comparison.claimed or decision.word in ("invalid", "unresolved")
    recommendations = list(dict.fromkeys(text for text in decision.recommendations if text)) if decides else []
    failed = {finding.number for finding in comparison.findings if any(p.kind != "warning" for p in finding.problems)}
    unproven = [f"guard {number}, {NAMES[number]}: {said}" for number, own in sorted(comparison.unproven.items())
                if number not in failed for said in own]  # fmt: skip
    if unproven and comparison.claimed and decision.word == "accept":
        recommendations.append("see to it that what is unproven holds: docs/judge-others.md says how")
    return Verdict(
        point=comparison.candidate,
        metric=claim.metric,
        better=claim.better,
        question=comparison.question,
        changed_axis=" + ".join(axis.name for axis in axes),
        axes=axes,
        baseline=comparison.baseline,
        candidate=comparison.candidate,
        claim=comparison.claimed,
        valid=decision.word != "invalid",
        decision=decision.word,
        n=evidence.n if evidence else 0,
        unit_of_pairing=evidence.unit if evidence else units.UNIT_NAMES[units.kind_of(claim.metric)],
        unit=units.unit_of_measure(claim.metric),
        baseline_value=evidence.baseline_value if evidence else None,
        candidate_value=evidence.candidate_value if evidence else None,
        effect=evidence.effect if evidence else None,
        ci_low=evidence.ci_low if evidence else None,
        ci_high=evidence.ci_high if evidence else None,
        confidence=gate.confidence,
        relative_effect=evidence.relative if evidence else None,
        test=evidence.test + (f" ({evidence.detail})" if evidence.detail else "") if evidence else "",
        p_value=evidence.p_value if evidence else None,
        p_adjusted=p_adjusted,
        num_claims=num_claims,
        floor=floor_of(evidence, claim.better, gate, claim.margin) if evidence else None,
        spread=max(evidence.spreads) if evidence and evidence.spreads else None,
        bar=claim.bar,
        margin=claim.margin,
        expected=claim.expected,
        best_single=against.baseline if against and not control else None,
        against_best=None if control else beside,
        against_control=beside if control else None,
        reasons=list(decision.reasons),
        recommendations=recommendations,
        warnings=list(dict.fromkeys(warnings)),
        unproven=unproven,
        guards=[entry.as_json() for entry in entries],
    )


def _decide(comparison: Comparison, p_adjusted: float | None, num_claims: int) -> Decision:
    """Invalid before unresolved before what the gate says."""
    words: tuple[Word, ...] = ("invalid", "unresolved", "reject")
    for word in words:
        problems = comparison.of(word)
        if problems:
            reasons = list(dict.fromkeys(problem.reason for problem in problems))
            return Decision(word, reasons, [problem.recommendation for problem in problems])
    claim = comparison.claim
    assert comparison.evidence is not None
    return decide(comparison.evidence, claim.better, claim.bar, comparison.gate,
                  margin=claim.margin, p_adjusted=p_adjusted, num_claims=num_claims)  # fmt: skip


def _beaten_too(decision: Decision, against: Comparison, *, control: bool) -> tuple[Decision, dict[str, Any]]:
    """A combination is accepted only when it also beats the best of its parts, a change only when also its control;
    where the claim is a margin, when it loses no more than that against them."""
    beside = _decide(against, None, 1)
    evidence = against.evidence
    details = {
        "point": against.baseline,
        "value": evidence.baseline_value if evidence else None,
        "effect": evidence.effect if evidence else None,
        "ci_low": evidence.ci_low if evidence else None,
        "ci_high": evidence.ci_high if evidence else None,
        "p_value": evidence.p_value if evidence else None,
        "decision": beside.word,
        "reasons": list(beside.reasons),
    }
    if decision.word != "accept":
        return decision, details
    other = against.baseline
    which = "control" if control else "best part"
    said = [*decision.reasons, *(f"against its {which}, {other}: {reason}" for reason in beside.reasons)]
    if beside.word == "accept":
        return Decision("accept", said, decision.recommendations), details
    whom = f"its control, {other}" if control else f"the best of its parts, {other}"
    short = f"it does not beat {whom}"
    if against.claim.margin is not None:
        short = f"that it loses no more than the margin against {whom} is not shown"
    alone = f"take {other}, or the baseline: what it gains, {other} gains too" if control else f"take {other} alone"
    recommendation = alone if beside.word in ("tie", "reject") else "settle that comparison first"
    return Decision(beside.word, [short, *said], [recommendation]), details
