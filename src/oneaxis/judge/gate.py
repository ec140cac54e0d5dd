"""The acceptance gate: from paired numbers to accept, reject, tie or unresolved, with every reason and what to do.

Pure: no file is read here. docs/verdicts.md holds the rules as a table; each row has a test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np

from oneaxis.config.schema import Gate
from oneaxis.judge.paired import paired_difference
from oneaxis.judge.statistics import (
    fewest_pairs,
    no_narrower_share,
    paired_share_interval,
    paired_t_p,
    pairs_needed,
    sign_flip,
    spread,
)
from oneaxis.judge.units import UNIT_NAMES, Better, Kind, Paired
from oneaxis.report.text import number
from oneaxis.score.paired import mcnemar_exact

Word = Literal["accept", "reject", "tie", "unresolved", "invalid"]

NO_SHARE: tuple[Kind, ...] = ("pairs", "escapes", "answers", "prompts", "documents", "nll")
"""Of these a share of the baseline means nothing: log-probabilities, differences, rates that may be near 0."""


@dataclass(frozen=True)
class Evidence:
    """A metric in both arms, and what its pairs say of the difference."""

    kind: Kind
    baseline_value: float
    candidate_value: float
    effect: float
    """candidate - baseline, in the metric's unit."""
    ci_low: float
    ci_high: float
    n: int
    test: str
    p_value: float
    """Of the test that is named; two-sided, not corrected for several claims."""
    p_family: float
    """What enters the correction for several claims: the same, but for repetitions the paired t test's."""
    deviation: float
    """Standard deviation of the paired differences, in the metric's unit."""
    spreads: tuple[float, float] | None = None
    """Of repetitions: (max - min) / max of the baseline and of the candidate."""
    detail: str = ""
    """Counts behind the test, for the reader."""
    share: bool = False
    """Every unit lies between 0 and 1, so that the baseline says how much there is to lose."""

    @property
    def relative(self) -> float | None:
        """effect / baseline; None where a share of the baseline means nothing (log-probabilities, differences)."""
        if self.kind in NO_SHARE or self.baseline_value <= 0:
            return None
        return self.effect / self.baseline_value

    @property
    def unit(self) -> str:
        """What was paired."""
        return UNIT_NAMES[self.kind]


@dataclass(frozen=True)
class Decision:
    """What the gate says."""

    word: Word
    reasons: Sequence[str] = field(default_factory=tuple)
    recommendations: Sequence[str] = field(default_factory=tuple)


def weigh(kind: Kind, paired: Paired, confidence: float) -> Evidence:
    """Paired units to the effect, its interval and its test.

    Args:
        paired: n >= 2 units; of `exact` one.
    """
    one, other = paired.baseline, paired.candidate
    n = len(one)
    values = (paired.baseline_value, paired.candidate_value)
    effect = values[1] - values[0]
    if kind == "exact":
        p = 0.0 if effect else 1.0
        return Evidence(kind, *values, effect, effect, effect, 1, "none: the settings decide it", p, p, 0.0,
                        share=paired.share)  # fmt: skip
    assert n >= 2
    deviation = float(np.std(other - one, ddof=1))
    shares = kind in ("items", "answers", "prompts")
    if shares or (kind == "documents" and set(np.unique([one, other])) <= {0.0, 1.0}):
        gained, lost = int(((other == 1) & (one == 0)).sum()), int(((other == 0) & (one == 1)).sum())
        low, high = paired_share_interval(gained, lost, n, confidence)
        p = mcnemar_exact(gained, lost)
        return Evidence(kind, *values, effect, low, high, n, "McNemar, exact", p, p, deviation,
                        detail=f"{gained} gained, {lost} lost", share=True)  # fmt: skip
    interval = paired_difference(one, other, confidence)
    p_t = paired_t_p(other - one)
    if kind == "copies":
        low, high = no_narrower_share(effect, interval.ci_low, interval.ci_high, max(paired.num_tasks, n), confidence)
        return Evidence(kind, *values, effect, low, high, n, "paired t", p_t, p_t, deviation, share=True)
    if kind == "perplexity":
        # The interval is that of the log ratio; around the baseline it is one in perplexity.
        low, high = (values[0] * float(np.expm1(end)) for end in (interval.ci_low, interval.ci_high))
        return Evidence(kind, *values, effect, low, high, n, "paired t on mean NLL", p_t, p_t,
                        deviation * values[0])  # fmt: skip
    if kind == "repetitions":
        p = sign_flip(other - one)
        return Evidence(kind, *values, effect, interval.ci_low, interval.ci_high, n, "sign-flip, exact, and paired t",
                        p, p_t, deviation, (spread(one.tolist()), spread(other.tolist())),
                        share=paired.share)  # fmt: skip
    share = kind == "documents" and min(one.min(), other.min()) >= 0 and max(one.max(), other.max()) <= 1
    return Evidence(kind, *values, effect, interval.ci_low, interval.ci_high, n, "paired t", p_t, p_t, deviation,
                    share=share)  # fmt: skip


def floor_of(evidence: Evidence, better: Better, gate: Gate, margin: float | None = None) -> float | None:
    """The value that a candidate's mean must reach.

    None where shares of the baseline mean nothing (log-probabilities, differences, rates near 0), and where a margin
    says what may be lost of items, pairs or sequences: of 100 items, 17 of them right, one more that is wrong would be
    under a floor of 95%. Timings keep theirs.
    """
    if evidence.kind in NO_SHARE or evidence.baseline_value <= 0 or gate.floor == 0:
        return None
    if margin is not None and evidence.kind != "repetitions":
        return None
    return evidence.baseline_value * gate.floor if better == "higher" else evidence.baseline_value / gate.floor


def under_the_floor(evidence: Evidence, better: Better, gate: Gate, margin: float | None = None) -> Decision | None:
    """The rejection of a candidate whose mean does not reach the floor; None when it does, or there is none."""
    sign = 1.0 if better == "higher" else -1.0
    floor = floor_of(evidence, better, gate, margin)
    if floor is None or sign * evidence.candidate_value >= sign * floor:
        return None
    inverse = "" if better == "higher" else " (inverse: lower is better)"
    said = f"under the floor: {number(evidence.candidate_value, 4)} against {number(floor, 4)}, which is "
    return Decision("reject", [f"{said}{gate.floor:.0%} of the baseline{inverse}"], ["keep the baseline"])


def decide(
    evidence: Evidence,
    better: Better,
    bar: float,
    gate: Gate,
    *,
    margin: float | None = None,
    p_adjusted: float | None = None,
    num_claims: int = 1,
) -> Decision:
    """The gate, in this order: enough pairs, spread, floor, worse, no effect shown, several claims, bar; of a claim
    with a margin, only that is asked after the floor.

    Args:
        bar: the smallest effect that counts, in the metric's unit and the better direction.
        margin: the largest loss that can be borne; then the claim is non-inferiority.
        p_adjusted: of the family of claims; None: this comparison stands alone.
        num_claims: size of that family.
    """
    sign = 1.0 if better == "higher" else -1.0
    gain = sign * evidence.effect
    low, high = sorted((sign * evidence.ci_low, sign * evidence.ci_high))
    alpha = 1 - gate.confidence
    percent = f"{gate.confidence:.0%}"

    def signed(value: float) -> str:
        """A gain as an effect of the metric."""
        return ("+" if sign * value > 0 else "") + number(sign * value)

    if evidence.kind in ("repetitions", "requests"):
        blocked = unsteady(evidence, gate)
        if blocked:
            return blocked
    if low_value := under_the_floor(evidence, better, gate, margin):
        return low_value
    if margin is not None:
        # What is measured or counted is never under 0, and a share never over 1.
        ends = evidence.share or (better == "higher" and evidence.kind in ("repetitions", "requests", "exact"))
        room = evidence.baseline_value if better == "higher" else 1 - evidence.baseline_value
        if ends and room <= margin:
            return Decision("unresolved", [
                f"nothing to lose: the baseline is at {number(evidence.baseline_value)}, so whatever the candidate "
                f"does it cannot lose more than the margin of {signed(-margin)}"
            ], ["read what the baseline fails at first; claim what it can do, or a smaller margin"])  # fmt: skip
        return _no_worse(evidence, low, high, margin, signed, gate)
    shown = evidence.p_value <= alpha
    if high < 0 and shown:
        return Decision("reject", [f"worse: the {percent} interval lies wholly on the wrong side of zero"],
                        ["keep the baseline"])  # fmt: skip
    if low <= 0 or not shown:
        return _tie(evidence, low, high, bar, alpha, signed, gate)
    if p_adjusted is not None and p_adjusted > alpha:
        return Decision("unresolved", [
            f"shown alone (p {evidence.p_family:.2g}), not among {num_claims} claims (Holm: {p_adjusted:.2g})"
        ], ["test this candidate alone on fresh units, or claim fewer things at once"])  # fmt: skip
    if high < bar:
        return Decision("reject", [
            f"the effect is real and too small: at most {signed(high)}, and the bar is {signed(bar)}"
        ], ["keep the baseline, or lower the bar before a new run if less would do"])  # fmt: skip
    if low < bar:
        return Decision("unresolved", [
            f"better, but whether by the bar of {signed(bar)} is open: between {signed(low)} and {signed(high)}"
        ], [_more(evidence, abs(gain - bar), gate)])  # fmt: skip
    said = f"the {percent} interval lies beyond " + (f"the bar of {signed(bar)}" if bar else "zero")
    return Decision("accept", [said], ["take the candidate"])


def _no_worse(
    evidence: Evidence, low: float, high: float, margin: float, signed: Callable[[float], str], gate: Gate
) -> Decision:
    """Non-inferiority: where the interval lies against the largest loss that can be borne (ICH E9, 3.3.2)."""
    bound = signed(-margin) if margin else "zero"
    if low >= -margin:
        said = f"a loss beyond the margin of {bound} is excluded: the worst still compatible is {signed(min(low, 0.0))}"
        return Decision("accept", [said], ["take the candidate if it serves otherwise"])
    if high < -margin:
        return Decision("reject", [f"worse by more than the margin of {bound}: at best {signed(high)}"],
                        ["keep the baseline"])  # fmt: skip
    return Decision("unresolved", [
        f"whether the loss stays within the margin of {bound} is open: between {signed(low)} and {signed(high)}"
    ], [_more(evidence, abs((low + high) / 2 + margin), gate)])  # fmt: skip


def unsteady(evidence: Evidence, gate: Gate) -> Decision | None:
    """Why repetitions cannot decide: too few, or too far apart."""
    needed = max(gate.min_pairs, fewest_pairs(gate.confidence))
    if evidence.kind == "requests":
        return Decision("unresolved", [
            f"one run on a side: the interval is over its requests, and how runs differ is not in it; a claim about a "
            f"timing needs {needed} runs a side"
        ], [f"measure {needed} runs a side, the arms in turn, and give them all, joined by commas"])  # fmt: skip
    if evidence.n < needed:
        return Decision("unresolved", [
            f"{evidence.n} pairs of runs; a claim about a timing needs {needed} (gate.min_pairs {gate.min_pairs}; the "
            f"sign-flip test at {gate.confidence:.0%} needs {fewest_pairs(gate.confidence)})"
        ], [f"run {needed} repetitions or more (`experiment.repetitions={needed}`)"])  # fmt: skip
    assert evidence.spreads
    wide = [
        f"the {side}'s runs spread by {value:.1%} (gate.max_spread {gate.max_spread:.0%})"
        for side, value in zip(("baseline", "candidate"), evidence.spreads, strict=True)
        if value > gate.max_spread
    ]
    if wide:
        return Decision("unresolved", wide, [
            "quieten the machine, lengthen load.duration_s, or choose the gate of this hardware before the next run "
            "(gate=gpu, cpu, shared)"
        ])  # fmt: skip
    return None


def _tie(
    evidence: Evidence, low: float, high: float, bar: float, alpha: float, signed: Callable[[float], str], gate: Gate
) -> Decision:
    reasons = [f"no {evidence.unit} differs"] if evidence.deviation == evidence.effect == 0 else []
    if low <= 0 <= high and not reasons:
        reasons.append("the interval holds zero")
    if alpha < evidence.p_value < 1:
        reasons.append(f"p {evidence.p_value:.2g} is above {alpha:.2g}")
    largest = f"the largest gain still compatible is {signed(max(high, 0.0))}, the largest loss {signed(min(low, 0.0))}"
    recommendation = "choose by cost or simplicity"
    if bar and high >= bar:
        recommendation += f"; the bar is not excluded: {_more(evidence, bar, gate)}"
    elif bar:
        recommendation += "; a gain of the bar's size is excluded"
    return Decision("tie", [f"no effect shown: {', '.join(reasons)}", largest], [recommendation])


def _more(evidence: Evidence, margin: float, gate: Gate) -> str:
    """How many units would decide, if the differences go on to vary as they do."""
    needed = pairs_needed(evidence.deviation, margin, gate.confidence) if margin > 0 else None
    if evidence.share and evidence.deviation == 0 and 0 < margin < 1:
        # Of n pairs that all agree the score interval reaches z^2 / (n + z^2).
        square = NormalDist().inv_cdf((1 + gate.confidence) / 2) ** 2
        needed = math.ceil(square * (1 - margin) / margin)
    unit = "pairs of runs" if evidence.kind == "repetitions" else f"{evidence.unit}s"
    if needed is None:
        return "more units would hardly decide it: the effect seen is at the bar itself"
    return f"about {max(needed, evidence.n + 1):,} {unit} would decide (there are {evidence.n:,})"
