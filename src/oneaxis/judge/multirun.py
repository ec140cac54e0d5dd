"""A multirun's record to its verdicts: every candidate against the baseline, in every claim, written to verdicts.json.

Several claims of one multirun are a family: the chance that one of them looks true by luck grows with their number.
Holm's correction over all (candidate, claim) pairs that could be tested keeps that chance at 1 - gate.confidence for
the whole multirun. Where nothing is claimed the headline metrics are compared, and nothing is corrected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from oneaxis.artifacts import write_json
from oneaxis.config.schema import Claim, Gate
from oneaxis.errors import UserError
from oneaxis.judge import units
from oneaxis.judge.compare import Comparison, Verdict, conclude, prepare
from oneaxis.judge.conditions import DEFAULT_SESSION
from oneaxis.judge.records import Record, read_record
from oneaxis.judge.statistics import holm
from oneaxis.load.levels import level_size
from oneaxis.multirun.record import PLAN, Axis, Plan, Point, job_folder, read_plan

VERDICTS = "verdicts.json"

ANSWERED = (
    "extract/records/parse_failed", "extract/legible/label_right", "extract/illegible/label_forced",
    "extract/lists/parse_failed", "extract/lists/rows_right", "extract/lists/early_stop",
    "diverge/loaded/several_share", "diverge/modal_differs_share",
)  # fmt: skip
"""The headline of forced JSON (does it parse, is it right, is it invented) and of divergence."""


def judge_multirun(folder: Path) -> list[Verdict]:
    """Judge the multirun in `folder`, write its `verdicts.json`, and return the verdicts in the order of the plan.

    Raises:
        UserError: for a record that is broken, naming the file.
    """
    plan = read_plan(folder)
    arms = {point.name: _arm(folder, plan, point) for point in plan.points}
    verdicts = judge_points(plan, arms)
    write_json(folder / VERDICTS, [verdict.as_json() for verdict in verdicts])
    return verdicts


def _arm(folder: Path, plan: Plan, point: Point) -> list[Record]:
    """All runs of a point, also those that never ended."""
    jobs = sorted((job for job in plan.jobs if job.point == point.name), key=lambda job: job.repetition)
    return [read_record(job_folder(folder, job), f"{job.point} r{job.repetition}", job.repetition) for job in jobs]


def judge_points(plan: Plan, arms: Mapping[str, Sequence[Record]]) -> list[Verdict]:
    """The verdicts of a plan, from the runs of its points."""
    try:
        gate = Gate.model_validate(dict(plan.gate))
        written = [Claim.model_validate(dict(claim)) for claim in plan.experiment.get("claims") or []]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{PLAN} of multirun {plan.id}: {error.title.lower()}.{where}: {first['msg']}") from error
    claims = written or headline_claims(arms, timed=plan.session != DEFAULT_SESSION)
    candidates = [point for point in plan.points if point.role != "baseline"]
    controlled = {point.control: point.name for point in candidates if point.control}

    def prepared(before: Point, after: Point, claim: Claim) -> Comparison:
        return prepare(
            arms[before.name], arms[after.name], claim, gate, names=(before.name, after.name),
            axes=_between(before, after), combination=after.role == "combination", written_at=plan.created_at,
            claimed=bool(written), question=str(plan.experiment.get("question") or ""),
        )  # fmt: skip

    comparisons = {(point.name, claim.metric): prepared(plan.baseline, point, claim)
                   for point in candidates for claim in claims}  # fmt: skip
    tested = {key: found.evidence.p_family for key, found in comparisons.items() if found.tested and found.evidence}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True)) if len(tested) > 1 else {}
    verdicts = []
    for point in candidates:
        for claim in claims:
            comparison = comparisons[point.name, claim.metric]
            if comparison.idle:
                continue
            best = best_part(point, claim, comparisons)
            against = None
            if beside := best or point.control:
                # What has to be beaten has to be beaten by anything; what may be lost may be lost against it too.
                asked = claim.model_copy(update={"bar": 0.0, "expected": None})
                against = prepared(plan.point(beside), point, asked)
            verdict = conclude(
                comparison, adjusted.get((point.name, claim.metric)), len(tested) or 1, against, control=not best
            )
            if point.name in controlled:
                of = f"it is the control of {controlled[point.name]}, and there to be beaten"
                verdict = replace(verdict, recommendations=[of])
            verdicts.append(verdict)
    return verdicts


def _between(before: Point, after: Point) -> list[Axis]:
    """The axes declared between two points: between a part and its combination, those that the part does not move;
    between a control and its change, their axis from the one's value to the other's."""
    if before.role == "baseline":
        return list(after.axes)
    if after.control == before.name:
        return [_from_to(*both) for both in zip(before.axes, after.axes, strict=True)]
    moved = {axis.name for axis in before.axes}
    return [axis for axis in after.axes if axis.name not in moved]


def _from_to(before: Axis, after: Axis) -> Axis:
    """The axis between two points that both move it from the same baseline."""
    leaves = {}
    for key in {**before.leaves, **after.leaves}:
        # A setting that one of the points leaves alone has the baseline's value there.
        one = before.leaves[key][1] if key in before.leaves else after.leaves[key][0]
        other = after.leaves[key][1] if key in after.leaves else before.leaves[key][0]
        if one != other:
            leaves[key] = [one, other]
    return Axis(after.name, after.kind, before.after, after.after, leaves)


def best_part(point: Point, claim: Claim, comparisons: Mapping[tuple[str, str], Comparison]) -> str | None:
    """Of a combination, the part whose value is best; None of a single change, or when no part was measured."""
    values = {}
    for name in point.parts:
        found = comparisons.get((name, claim.metric))
        if found and found.evidence and not found.of("invalid"):
            values[name] = found.evidence.candidate_value
    if point.role != "combination" or not values:
        return None
    return (max if claim.better == "higher" else min)(values, key=lambda name: values[name])


def headline_claims(arms: Mapping[str, Sequence[Record]], timed: bool) -> list[Claim]:
    """What to compare where nothing is claimed: the headline of every stage that ran, best known direction, no bar.

    Args:
        timed: whether the timings are of this multirun's own session; else they are left out.
    """
    everywhere = [set(units.metric_names({name: arm[:1]})) for name, arm in arms.items() if arm]
    names = sorted(set().union(*everywhere))
    shared = [name for name in names if sum(name in each for each in everywhere) > 1]
    chosen: list[str] = []
    if "quantize/perplexity_after" in names:
        # An arm that is not quantised lacks the name, and has the measurement.
        chosen.append("quantize/perplexity_after")
        chosen += [name for name in ("quantize/kl", "quantize/copy_exact_after") if name in names]
    elif "calibrate/perplexity" in shared:
        chosen.append("calibrate/perplexity")
    chosen += [name for name in ("train_dpo/chosen_delta", "train_dpo/rejected_delta", "train_dpo/margin_delta",
                                 "train_dpo/refusal_rate_after") if name in names]  # fmt: skip
    chosen += [name for name in shared if name.endswith(("/acc_bytes", "/pmi_dc"))]
    chosen += [name for name in ANSWERED if name in shared]
    if timed:
        chosen += _timings(shared)
    claims = []
    for name in chosen:
        better = units.better_of(name)
        assert better is not None, name
        claims.append(Claim(metric=name, better=better, expected=None, bar=0.0))
    return claims


def _timings(names: Sequence[str]) -> list[str]:
    """Cold start, and of each shape its capacity (goodput where there is none) and latencies at its lowest level."""
    chosen = [name for name in names if name == "serve/cold_start_s"]
    cells: dict[str, set[str]] = {}
    for name in names:
        match = units.CELL_LATENCY.match(name)
        if match:
            cells.setdefault(match["shape"], set()).add(match["level"])
    for shape, labels in cells.items():
        lowest, highest = (pick(labels, key=level_size) for pick in (min, max))
        peak = f"sweep/{shape}/capacity_tok_s"
        wanted = [peak if peak in names else f"sweep/{shape}/{highest}/goodput_tok_s"]
        wanted += [f"sweep/{shape}/{lowest}/{latency}" for latency in ("ttft_p50_ms", "itl_p50_ms")]
        chosen += [name for name in wanted if name in names]
    return chosen


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """1 when a comparison is INVALID, or claims were made and no candidate is accepted in all of them; else 0.

    A control is no candidate: that it is accepted is nothing won.
    """
    if any(verdict.decision == "invalid" for verdict in verdicts):
        return 1
    claimed = [verdict for verdict in verdicts if verdict.claim]
    if not claimed:
        return 0
    controls = {verdict.against_control["point"] for verdict in claimed if verdict.against_control}
    points = {verdict.point for verdict in claimed} - controls
    won = [p for p in points if all(v.decision == "accept" for v in claimed if v.point == p)]
    return 0 if won else 1
