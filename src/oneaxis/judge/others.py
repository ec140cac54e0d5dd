"""Two arms of other tools' results to verdicts: what they share, what their files prove, what they do not.

The gate and its rules are those of our own timings (docs/verdicts.md): six runs a side in alternating order decide, a
run a side describes. A file proves less than a run of ours, so each verdict lists what is *unproven*; what a file
disproves (another load than asked, answers of other lengths, two axes) is INVALID or unresolved, as ever.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from oneaxis.config.schema import Claim, Gate
from oneaxis.errors import UserError
from oneaxis.judge import units
from oneaxis.judge.compare import Comparison, Verdict, conclude
from oneaxis.judge.conditions import grouped_axes, invalid, say
from oneaxis.judge.foreign import (
    METRICS,
    OF_A_CLASS,
    SCHEDULE,
    Bound,
    Run,
    achieved_rps,
    basis,
    good,
    itl_mean,
    latencies,
    mean,
    metric,
    nearest_rank,
    one_token_a_chunk,
    read_arm,
    refusals,
)
from oneaxis.judge.gate import Evidence, weigh
from oneaxis.judge.ledger import Finding
from oneaxis.judge.records import differences
from oneaxis.judge.stalls import stalled_in_cell
from oneaxis.judge.statistics import bootstrap_difference, fewest_pairs, spread, two_samples
from oneaxis.judge.units import Better, Paired, Problem
from oneaxis.load.metrics import HEADLINE_PERCENTILE, requests_needed
from oneaxis.multirun.record import Axis

HEADLINES = (f"ttft_p{HEADLINE_PERCENTILE}_ms", f"tpot_p{HEADLINE_PERCENTILE}_ms", f"e2e_p{HEADLINE_PERCENTILE}_ms",
             "itl_mean_ms", "output_tok_s", "failed")  # fmt: skip
MAX_RATE_ERROR = 0.10
"""Of the rate achieved against the one asked for, beyond what the draw of random arrivals may give."""


MAX_MISSED = 0.01
"""Of a run's requests, for a mean over those that were answered."""


@dataclass(frozen=True)
class Bounds:
    """Those of section `guards`; outside a project, of conf/guards/default.yaml."""

    max_send_lag_p99_ms: float = 100
    max_prefix_hit_rate: float = 0.01
    max_token_disagreement: float = 0.01


@dataclass(frozen=True)
class Arms:
    """The runs of both sides under one load, each side in the order of their start."""

    level: str
    baseline: Sequence[Run]
    candidate: Sequence[Run]
    bound: Bound | None = None
    """What makes a request a good one; None: nobody said."""

    @property
    def sides(self) -> tuple[tuple[str, Sequence[Run]], tuple[str, Sequence[Run]]]:
        """Name and runs of each."""
        return ("baseline", self.baseline), ("candidate", self.candidate)

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [*self.baseline, *self.candidate]

    @cached_property
    def _stalled(self) -> dict[int, np.ndarray]:
        return {}

    def stalled(self, run: Run) -> np.ndarray:
        """Whether each of its requests is stalled (guard 9); worked out once for all metrics."""
        if id(run) not in self._stalled:
            self._stalled[id(run)] = stalled_in_cell(_as_cell(run, basis(self.runs) is not None))
        return self._stalled[id(run)]

    @property
    def tools(self) -> list[str]:
        """One, or two."""
        return sorted({run.tool for run in self.runs})


def judge_others(
    baseline: Path,
    candidate: Path,
    *,
    metric: str | None,
    better: Better | None,
    bar: float,
    margin: float | None,
    gate: Gate,
    bounds: Bounds,
    bound: Bound | None = None,
) -> list[Verdict]:
    """The verdicts of two arms: of the metric that is claimed, else of the headlines of every load that both have.

    Args:
        bound: with it there are `attainment` and `goodput_tok_s`.

    Raises:
        UserError: for files that cannot be read or compared, or a metric that they do not have.
    """
    arms = [replace(each, bound=bound) for each in read_arms(baseline, candidate)]
    known = (*METRICS, *OF_A_CLASS) if bound else METRICS
    names = [f"load/{each.level}/{name}" for each in arms for name in known]
    if metric:
        chosen = [name for name in names if metric in (name, name.removeprefix("load/"), name.rpartition("/")[2])]
        if len(chosen) != 1:
            fault = f"is of {len(chosen)} loads" if chosen else "no file has it"
            if metric.rpartition("/")[2] in OF_A_CLASS and not bound:
                fault = "needs bounds (--goodput ttft:500 tpot:50)"
            allowed = ", ".join(chosen or names[: len(known)])
            if not chosen and len(arms) > 1:
                allowed += f"; and the same of {', '.join(each.level for each in arms[1:])}"
            raise UserError(f"--metric={metric}: {fault}; allowed: {allowed}")
    else:
        headlines = (*HEADLINES, *OF_A_CLASS)
        chosen = [name for name in names if name.rpartition("/")[2] in headlines and _told(arms, name)]
    verdicts = []
    for name in chosen:
        own = next(each for each in arms if each.level == name.split("/")[1])
        claim = claim_of(name, better, bar, margin)
        verdicts.append(conclude(compare_arms(own, claim, gate, bounds, claimed=metric is not None)))
    return verdicts


def claim_of(metric: str, better: Better | None, bar: float, margin: float | None) -> Claim:
    """As `oneaxis judge` was asked.

    Raises:
        UserError: for a bar, margin or direction that cannot be.
    """
    usual = units.better_of(metric)
    if usual is None and better is None:
        raise UserError(f"--metric={metric}: its name does not say which way is better; give --better lower|higher")
    if usual and better and better != usual:
        raise UserError(f"--better={better}: of {metric} {usual} is better; allowed: {usual}")
    if not 0 <= bar < math.inf:
        raise UserError(f"--bar={bar}: allowed: 0 or more, in the metric's unit")
    if margin is not None and (bar or not 0 <= margin < math.inf):
        raise UserError(f"--margin={margin}: allowed: 0 or more, in the metric's unit, and no --bar beside it")
    if said := units.share_problem(metric, bar, margin):
        raise UserError(f"--{said}")
    return Claim(metric=metric, better=usual or better or "lower", expected=None, bar=float(bar), margin=margin)


def read_arms(baseline: Path, candidate: Path) -> list[Arms]:
    """Both sides, load by load.

    Raises:
        UserError: for a file that cannot be read, one that is in both, a side of several models or tools, or no load
            that is in both.
    """
    sides = {"baseline": read_arm(baseline), "candidate": read_arm(candidate)}
    for side, runs in sides.items():
        for what, values in (("tools", [run.tool for run in runs]), ("models", [run.model for run in runs])):
            if len(set(values)) > 1:
                raise UserError(f"the {side} holds runs of {len(set(values))} {what} ({', '.join(sorted(set(values)))})"
                                "; allowed: repetitions of one")  # fmt: skip
    seen: dict[tuple[Any, ...], Run] = {}
    for run in (run for runs in sides.values() for run in runs):
        key = tuple(run.requests.select("sent_s", "ttft_s", "e2e_s").rows())
        if key in seen:
            where = f"{seen[key].source} and {run.source}"
            raise UserError(f"{where}: the same run twice; allowed: two different runs")
        seen[key] = run
    levels = [list(dict.fromkeys(run.level for run in runs)) for runs in sides.values()]
    shared = [level for level in levels[0] if level in levels[1]]
    if not shared:
        raise UserError(f"{baseline} and {candidate}: no load is in both ({', '.join(levels[0])}; "
                        f"{', '.join(levels[1])}); allowed: runs under the same load")  # fmt: skip
    at = [{side: _in_order([run for run in runs if run.level == level]) for side, runs in sides.items()}
          for level in shared]  # fmt: skip
    return [Arms(level, own["baseline"], own["candidate"]) for level, own in zip(shared, at, strict=True)]


def _in_order(runs: list[Run]) -> list[Run]:
    if any(run.started_at is None for run in runs):
        return runs
    return sorted(runs, key=lambda run: run.started_at or 0.0)


def _told(arms: Sequence[Arms], metric: str) -> bool:
    """Whether a headline has something to say: it is not refused, and not that nothing failed."""
    _, level, name = metric.split("/")
    own = next(each for each in arms if each.level == level)
    if name == "failed":
        return any(run.ok.height < run.requests.height for run in own.runs)
    return _refused(own, name, refusals(own.runs)) is None


def _refused(arms: Arms, name: str, refused: Mapping[str, str]) -> str | None:
    if arms.bound and name in OF_A_CLASS:
        rests_on = [*_bounds(arms), *(["output"] if name == "goodput_tok_s" else [])]
        return next((refused[part] for part in rests_on if part in refused), None)
    return refused.get(name) or refused.get(name.partition("_")[0])


# --- one comparison -------------------------------------------------------------------------------------------------


def compare_arms(arms: Arms, claim: Claim, gate: Gate, bounds: Bounds, *, claimed: bool) -> Comparison:
    """One metric under one load."""
    name = claim.metric.rpartition("/")[2]
    axes, declared = one_axis(arms)
    findings = [declared, prefix_cache(arms, bounds), token_truth(arms, name, bounds), load_kept(arms, bounds),
                failures(arms), *alike(arms)]  # fmt: skip
    others = [Problem("warning", f"{run.name}: {note}") for run in arms.runs for note in run.notes]
    if claimed:
        said = "guard 12: the bar was given when judging, not before the run"
        findings.append(Finding(12, {}, [Problem("warning", said)]))
    refused = refusals(arms.runs)
    evidence = None
    if why := _refused(arms, name, refused):
        others.append(Problem("unresolved", f"{name} is refused: {why}", "choose a metric that both arms have"))
    else:
        since = basis(arms.runs)
        others += _how(arms, name, since)
        others += _support(arms, name, gate.confidence)
        order = alternates(arms)
        findings.append(order)
        evidence, found = weigh_arms(arms, name, since is not None, gate, in_pairs=not order.problems)
        others += found
    if evidence:
        size = abs(claim.bar or claim.margin or evidence.effect)
        findings.append(stalls(arms, name, size))
    unproven = unproven_of(arms, axes)
    names = [_called(runs) for _, runs in arms.sides]
    return Comparison(names[0], names[1], claim, claimed, "", gate, axes, evidence, findings, others, unproven=unproven)


def _called(runs: Sequence[Run]) -> str:
    """A side, for the reader."""
    first, last = runs[0].source, runs[-1].source
    if first == last:
        return str(first)
    return f"{first} to {last} ({len(runs)} runs)"


def _how(arms: Arms, name: str, since: str | None) -> list[Problem]:
    """How the metric is computed, where that is not as in the files."""
    problems = []
    if name.startswith(("ttft", "e2e")) or (name in OF_A_CLASS and {"ttft", "e2e"} & set(_bounds(arms))):
        said = f"latencies count from the request's sending, in all files: {_why_sending(arms)}"
        if since:
            said = f"latencies count from {since}, in all files"
        problems.append(Problem("warning", said))
    if name.startswith(("itl", "tpot")) and not one_token_a_chunk(arms.runs):
        ok = pl.concat([run.ok for run in arms.runs])
        share = float(ok["output_tokens"].sum()) / max(float(ok["chunks"].sum()), 1.0)
        said = f"chunks are no tokens: {share:.3g} tokens a chunk; "
        if name.startswith("tpot"):
            said += "TPOT takes the answer's tokens after the first, though the first chunk may hold several"
            problems.append(Problem("warning", said))
        else:
            said += "ITL is per token, each chunk of a request taken to hold the same number, in both arms"
            problems.append(Problem("warning", said))
            if "_p" in name:
                problems.append(Problem(
                    "unresolved", f"{name}: no file says how chunks pack tokens, and a percentile rests on it",
                    "claim itl_mean_ms or a tpot, which do not",
                ))  # fmt: skip
    if name in OF_A_CLASS:
        said = ", ".join(f"{part} {bound:g} ms" for part, bound in _bounds(arms).items())
        problems.append(Problem("warning", f"good is what kept {said}, in both arms; what failed did not"))
    missed = [1 - run.ok.height / run.requests.height for run in arms.runs]
    if name == "itl_mean_ms" and any(missed):
        said = f"itl_mean_ms is over answers that came, and up to {max(missed):.1%} of a run's did not"
        few = max(missed) <= MAX_MISSED
        problems.append(Problem("warning" if few else "unresolved", said, "" if few else "see why requests failed"))
    return problems


def _bounds(arms: Arms) -> dict[str, float]:
    return arms.bound.parts if arms.bound else {}


def _why_sending(arms: Arms) -> str:
    if len(arms.tools) > 1:
        return "the two tools do not say the same moment before it"
    return "when each was to be sent is not known, or there is no such moment (a closed loop)"


# --- evidence -------------------------------------------------------------------------------------------------------


def weigh_arms(
    arms: Arms, name: str, from_intended: bool, gate: Gate, *, in_pairs: bool
) -> tuple[Evidence | None, list[Problem]]:
    """What the runs say; of one run a side, what its requests say, which cannot decide.

    Args:
        in_pairs: whether the arms were measured in turn.
    """
    values = [[metric(run, name, from_intended, arms.bound) for run in runs] for _, runs in arms.sides]
    absent = [sum(value is None for value in side) for side in values]
    if any(absent):
        why = "it falls on a request that failed" if name.endswith("_ms") else "it cannot be computed"
        said = (f"{name} is not reached in {absent[0]} of {len(values[0])} runs of the baseline and {absent[1]} of "
                f"{len(values[1])} of the candidate ({why})")  # fmt: skip
        lost = absent[0] == 0 and absent[1] == len(values[1])
        return None, [Problem("reject" if lost else "unresolved", said, "see why requests failed")]
    first, second = (np.asarray([value for value in side if value is not None]) for side in values)
    means = (float(first.mean()), float(second.mean()))
    shares = units.is_share(name)
    if min(len(first), len(second)) == 1:
        if evidence := _over_requests(arms, name, from_intended, means, gate.confidence):
            return evidence, []
        needed = max(gate.min_pairs, fewest_pairs(gate.confidence))
        said = (f"{name} is {means[0]:.4g} in the baseline and {means[1]:.4g} in the candidate, with no interval: one "
                f"run on a side; a claim about a timing needs {needed} runs a side")  # fmt: skip
        return None, [Problem("unresolved", said, f"measure {needed} runs a side, the arms in turn")]
    if len(first) == len(second) and in_pairs:
        return weigh("repetitions", Paired(first, second, *means, share=shares), gate.confidence), []
    found = two_samples(first, second, gate.confidence)
    spreads = (spread(first.tolist()), spread(second.tolist()))
    said = "the runs are not in pairs: they are compared as two samples"
    return Evidence(
        "repetitions", *means, means[1] - means[0], found.ci_low, found.ci_high, min(len(first), len(second)),
        "permutation of two samples, and Welch's t", found.p_value, found.p_welch, found.deviation, spreads,
        share=shares,
    ), [Problem("warning", said)]  # fmt: skip


def _support(arms: Arms, name: str, confidence: float) -> list[Problem]:
    """A percentile that so few requests cannot support."""
    head = name.removesuffix("_ms").rpartition("_p")
    if not head[1]:
        return []
    needed, fewest = requests_needed(int(head[2]), confidence), min(run.requests.height for run in arms.runs)
    if fewest >= needed:
        return []
    said = (
        f"a p{head[2]} needs {needed} requests a run to be shown with {confidence:.0%} confidence; there are {fewest}"
    )
    return [Problem("unresolved", said, "send more requests a run, or claim a lower percentile")]


def _over_requests(
    arms: Arms, name: str, from_intended: bool, means: tuple[float, float], confidence: float
) -> Evidence | None:
    """The interval over the requests of one run a side: how far the figure would move with other requests of that run.
    None for figures of a whole run, and for percentiles of ITL."""
    kind, _, what = name.removesuffix("_ms").partition("_")
    if kind not in ("ttft", "tpot", "e2e") and name not in ("itl_mean_ms", "attainment"):
        return None
    timed = [[latencies(run, from_intended) for run in runs] for _, runs in arms.sides]
    joined = [{key: np.concatenate([each[key] for each in side]) for key in side[0]} for side in timed]
    paired = len(arms.baseline) == len(arms.candidate) == 1 and same_prompts(arms.baseline[0], arms.candidate[0])

    def statistic(side: int) -> Callable[[np.ndarray], float]:
        own = joined[side]
        if arms.bound and name == "attainment":
            kept = np.concatenate([good(run, arms.bound, from_intended) for run in arms.sides[side][1]])
            return lambda rows: float(kept[rows].mean())
        if name == "itl_mean_ms":
            return lambda rows: itl_mean(own, rows) or math.nan
        values = own[kind]
        if what == "mean":
            return lambda rows: mean(values[rows])
        return lambda rows: nearest_rank(values[rows], int(what[1:]))

    sizes = [len(side["ttft"]) for side in joined]
    found = bootstrap_difference(statistic(0), statistic(1), (sizes[0], sizes[1]), paired=bool(paired),
                                 confidence=confidence)  # fmt: skip
    if found is None:
        return None
    how = "bootstrap over requests, " + ("paired by prompt" if paired else "not paired")
    return Evidence("requests", *means, means[1] - means[0], found.ci_low, found.ci_high, min(sizes), how,
                    found.p_value, found.p_value, found.deviation, share=units.is_share(name))  # fmt: skip


def same_prompts(one: Run, other: Run) -> str | None:
    """What shows that two runs sent the same prompts in the same order; None: nothing does."""
    a, b = one.requests, other.requests
    if a.height != b.height:
        return None
    told = _equal(a["prompt"], b["prompt"])
    if told is not None:
        return "their text" if told == 1 else None
    # Lengths and answers prove something only where they differ among themselves; a few answers of one prompt differ
    # from run to run, since an engine's sums depend on the batch.
    if a["prompt_tokens"].n_unique() > max(2, a.height // 4) and _equal(a["prompt_tokens"], b["prompt_tokens"]) == 1:
        return "their lengths, in order"
    answered = _equal(a["text"], b["text"])
    if a["text"].n_unique() > a.height // 2 and answered is not None and answered >= MOST:
        return "their answers, in order"
    return None


MOST = 0.5
"""Share of requests of which something has to be known, or to be the same, to speak of all."""


def _equal(one: pl.Series, other: pl.Series) -> float | None:
    """Of the places where both are known, the share where they are equal; None where too few are known."""
    both = one.is_not_null() & other.is_not_null()
    known = int(both.sum())
    return float((one.filter(both) == other.filter(both)).mean()) if known > MOST * len(one) else None  # type: ignore[arg-type]


# --- guards ---------------------------------------------------------------------------------------------------------


def one_axis(arms: Arms) -> tuple[list[Axis], Finding]:
    """Guard 4, by what the files say of model and declared settings (`--metadata`, labels)."""
    found = differences(arms.baseline[0].settings, arms.candidate[0].settings)
    axes = grouped_axes(found)
    problems = []
    for _, runs in arms.sides:
        if any(differences(runs[0].settings, run.settings) for run in runs[1:]):
            problems.append(invalid(f"guard 4, one axis: the runs of one side differ among themselves ({runs[0].name} "
                                    "and others)", "give repetitions of one setting"))  # fmt: skip
    if len(axes) > 1:
        shown = ", ".join(f"{axis.name} ({say(axis.before)} -> {say(axis.after)})" for axis in axes[:6])
        problems.append(invalid(f"guard 4, one axis: {len(axes)} axes differ: {shown}", "change one at a time"))
    return axes, Finding(4, {"axes": [axis.name for axis in axes]}, problems)


def prefix_cache(arms: Arms, bounds: Bounds) -> Finding:
    """Guard 1: hit rates where the server reported them with each answer, else whether prompts were seen to repeat."""
    rates = [[hit_rate(run) for run in runs] for _, runs in arms.sides]
    known = [[rate for rate in side if rate is not None] for side in rates]
    if all(len(side) == len(runs) for side, (_, runs) in zip(known, arms.sides, strict=True)):
        means = [sum(side) / len(side) for side in known]
        seen = {"hit_rate_baseline": means[0], "hit_rate_candidate": means[1]}
        if abs(means[0] - means[1]) <= bounds.max_prefix_hit_rate:
            return Finding(1, seen)
        return Finding(1, seen, [invalid(
            f"guard 1, unique prompts: the prefix cache gave {means[0]:.1%} of the baseline's prompt tokens and "
            f"{means[1]:.1%} of the candidate's (guards.max_prefix_hit_rate {bounds.max_prefix_hit_rate:.1%})",
            "both arms need prompts of their own and an empty cache",
        )])  # fmt: skip
    said = [f"{side}: {found}" for side, runs in arms.sides if (found := _repeats(runs))]
    problem = Problem(
        "unresolved", f"guard 1, unique prompts: {'; '.join(said)}, and no file says what the prefix cache gave",
        "give each repetition a seed of its own (the same in both arms), or have the server report cached tokens "
        "(vLLM: --enable-prompt-tokens-details; guidellm and AIPerf keep them)",
    )  # fmt: skip
    return Finding(1, {"repeated": said}, [problem] if said else [])


def hit_rate(run: Run) -> float | None:
    """Cached prompt tokens / prompt tokens of the answers; None where the server did not say of each."""
    ok = run.ok
    if ok["cached_tokens"].null_count() or ok["prompt_tokens"].null_count():
        return None
    return float(ok["cached_tokens"].sum()) / max(float(ok["prompt_tokens"].sum()), 1.0)


def _repeats(runs: Sequence[Run]) -> str | None:
    """What shows that prompts were sent more than once to one arm."""
    for run in runs:
        prompts = run.requests["prompt"].drop_nulls()
        if prompts.n_unique() < len(prompts):
            return f"{len(prompts) - prompts.n_unique()} of {len(prompts)} prompts of {run.name} repeat another"
    for one, other in pairwise(runs):
        if shown := same_prompts(one, other):
            return f"{one.name} and {other.name} sent the same prompts (by {shown})"
    return None


def token_truth(arms: Arms, name: str, bounds: Bounds) -> Finding:
    """Guard 2: answers as long as had to be, inputs and answers of one length in both arms."""
    problems = []
    seen = {}
    for run in arms.runs:
        asked = run.ok.filter(pl.col("asked_output_tokens").is_not_null() & pl.col("output_tokens").is_not_null())
        other = asked.filter(pl.col("asked_output_tokens") != pl.col("output_tokens")).height
        if other:
            problems.append(invalid(f"guard 2, token truth: {other} of {asked.height} answers of {run.name} have other "
                                    "output tokens than ignore_eos and max_tokens ask for", "see what the server "
                                    "counts"))  # fmt: skip
            break
    for column, what in (("prompt_tokens", "prompts"), ("output_tokens", "answers")):
        means = []
        for _, runs in arms.sides:
            # What was asked is known of requests that failed too.
            values = pl.concat([(run.requests if what == "prompts" else run.ok)[column] for run in runs]).drop_nulls()
            means.append(float(values.sum()) / len(values) if len(values) else math.nan)
        seen[f"mean_{column}"] = [None if math.isnan(mean) else mean for mean in means]
        if math.isnan(sum(means)) or abs(means[1] - means[0]) <= bounds.max_token_disagreement * max(means):
            continue
        said = (f"guard 2, token truth: the {what} have {means[0]:.4g} tokens on average in the baseline and "
                f"{means[1]:.4g} in the candidate")  # fmt: skip
        if what == "prompts":
            problems.append(invalid(said, "send both arms the same prompts"))
        elif name.startswith(("e2e", "output")):
            problems.append(Problem("unresolved", f"{said}: {name} follows from that", "ask for answers of one length "
                                    "(--ignore-eos), or claim ttft or tpot"))  # fmt: skip
        else:
            problems.append(Problem("warning", said))
    return Finding(2, seen, problems)


def load_kept(arms: Arms, bounds: Bounds) -> Finding:
    """Guard 5: the load was what was asked for, as far as moments of sending say."""
    problems, worst, lags = [], 0.0, []
    for run in arms.runs:
        table = run.requests
        column = "sent_s" if table["intended_s"].null_count() else "intended_s"
        rate, n = achieved_rps(run, column), table[column].drop_nulls().len()
        if run.asked_rps and rate:
            allowed = MAX_RATE_ERROR + (3 / math.sqrt(n - 1) if run.random_arrivals else 1 / (n - 1))
            worst = max(worst, abs(rate / run.asked_rps - 1))
            if abs(rate / run.asked_rps - 1) > allowed:
                problems.append(invalid(
                    f"guard 5, load fidelity: {run.name} asked for {run.asked_rps:g} requests/s and had {rate:.3g}",
                    "see why the tool did not keep its rate; take another schedule or another tool",
                ))  # fmt: skip
        if run.intended_is == SCHEDULE and column == "intended_s":
            lags.append(nearest_rank((1000 * (table["sent_s"] - table["intended_s"])).to_numpy(), 99))
            if lags[-1] > bounds.max_send_lag_p99_ms:
                problems.append(invalid(
                    f"guard 5, load fidelity: {run.name} sent late: p99 {lags[-1]:.1f} ms "
                    f"(guards.max_send_lag_p99_ms {bounds.max_send_lag_p99_ms:g})",
                    "leave the client a core of its own, or lower the rate",
                ))  # fmt: skip
    return Finding(5, {"largest_rate_error": worst, "lag_p99_ms": max(lags, default=None)}, problems[:2])


def failures(arms: Arms) -> Finding:
    """Guard 6: requests without an answer are counted here as misses, where the tools leave them out."""
    said = []
    for side, runs in arms.sides:
        missed = sum(run.requests.height - run.ok.height for run in runs)
        if missed:
            said.append(f"{missed} of {sum(run.requests.height for run in runs)} of the {side}")
    seen = {"sent": sum(run.requests.height for run in arms.runs), "ok": sum(run.ok.height for run in arms.runs)}
    if not said:
        return Finding(6, seen)
    text = f"guard 6: {' and '.join(said)} failed; they count as misses, which the tools' own percentiles leave out"
    return Finding(6, seen, [Problem("warning", text)])


def alike(arms: Arms) -> list[Finding]:
    """Guards 4, 13 and 14: the same load, client and warm-up in all runs, as far as the files say."""
    first = arms.runs[0]
    if len(arms.tools) > 1:
        said = f"guard 14, same conditions: by {' and '.join(arms.tools)}: the difference holds that of the clients"
        return [Finding(14, {"tools": arms.tools}, [Problem("unresolved", said, "measure both arms with one tool")])]
    findings = []
    for what, number, guard in (("load", 4, "guard 4, one axis: the load differs"),
                                ("conditions", 14, "guard 14, same conditions")):  # fmt: skip
        one = getattr(first, what)
        problems = []
        for run in arms.runs[1:]:
            other = getattr(run, what)
            differ = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
            if differ:
                shown = "; ".join(f"{key} ({say(one.get(key))}, {say(other.get(key))})" for key in differ)
                problems = [
                    invalid(f"{guard}: {first.name} and {run.name} differ in {shown}", "measure both arms alike")
                ]
                break
        findings.append(Finding(number, {"client": dict(one)} if number == 14 else {}, problems))
    others = [run for run in arms.runs if run.warmup != first.warmup]
    if others:
        said = f"guard 13, warm-up: {first.name} had {first.warmup}, {others[0].name} {others[0].warmup}"
        findings.append(Finding(13, {}, [invalid(said, "warm both arms up alike")]))
    elif first.warmup is not None:
        findings.append(Finding(13, {"warmup": first.warmup}))
    return findings


def alternates(arms: Arms) -> Finding:
    """Guard 11: the arms were measured in turn, by the times at which the files say that they began."""
    started = sorted((run.started_at or 0.0, side) for side, runs in arms.sides for run in runs)
    if len(started) < 4:
        return Finding(11, {})
    if any(run.started_at is None for run in arms.runs):
        said = "guard 11: the files do not say in which order the runs were measured"
        return Finding(11, {}, [Problem("unresolved", said, "keep the files as the tool wrote them")])
    longest = max(len(list(same)) for _, same in groupby(started, key=lambda entry: entry[1]))
    problems = []
    if longest > max(2, min(len(arms.baseline), len(arms.candidate)) // 2):
        problems = [Problem("unresolved", f"guard 11: {longest} runs of one arm came without one of the other between "
                            "them: a drift of the machine would look like an effect", "measure the arms in alternating "
                            "order")]  # fmt: skip
    return Finding(11, {"longest_run_of_one_arm": longest}, problems)


def stalls(arms: Arms, name: str, claimed_effect: float) -> Finding:
    """Guard 9, as of our own loads: calls far above the median of their run do not carry the effect."""
    problems, total = [], 0
    since = basis(arms.runs) is not None
    for side, runs in arms.sides:
        counts, moved = 0, 0.0
        for run in runs:
            if run.ok["e2e_s"].null_count() or run.requests["sent_s"].null_count():
                continue
            stalled = arms.stalled(run)
            if not stalled.any():
                continue
            counts += int(stalled.sum())
            kept = replace(run, requests=run.requests.filter(pl.Series(~stalled)))
            values = [metric(each, name, since, arms.bound) for each in (run, kept)]
            moved += math.inf if values[0] is None or values[1] is None else values[1] - values[0]
        total += counts
        if not counts:
            continue
        shift = moved / len(runs)
        said = f"guard 9, stalls: {counts} calls of the {side} took far longer than their like"
        if abs(shift) > abs(claimed_effect):
            said += f"; without them its mean moves by {shift:+.4g}, more than the {abs(claimed_effect):.4g} claimed"
            problems.append(invalid(said, "find what stalled, and measure again"))
        else:
            problems.append(Problem("warning", f"{said}; without them its mean moves by {shift:+.4g}"))
    return Finding(9, {"stalled": total}, problems)


def _as_cell(run: Run, from_intended: bool) -> pl.DataFrame:
    """The columns that guard 9 reads; where a file keeps no arrivals between first and last, they are spread evenly."""
    times: list[list[float]] = []
    for row in run.requests.select("sent_s", "ttft_s", "e2e_s", "gaps_s", "chunks").iter_rows(named=True):
        if row["e2e_s"] is None:
            times.append([])
            continue
        first = row["sent_s"] + (row["e2e_s"] if row["ttft_s"] is None else row["ttft_s"])
        if row["gaps_s"] is None:
            times.append(np.linspace(first, row["sent_s"] + row["e2e_s"], row["chunks"] or 1).tolist())
        else:
            times.append((first + np.cumsum([0.0, *row["gaps_s"]])).tolist())
    table = run.requests
    began = table["intended_s"] if from_intended else table["sent_s"]
    ended = (table["sent_s"] + table["e2e_s"]).fill_null(table["sent_s"])
    return pl.DataFrame({
        "intended_s": began, "ended_s": ended, "e2e_ms": latencies(run, from_intended)["e2e"],
        "asked_prompt_tokens": table["prompt_tokens"], "token_times": pl.Series(times, dtype=pl.List(pl.Float64)),
    })  # fmt: skip


# --- what no file shows ---------------------------------------------------------------------------------------------


def unproven_of(arms: Arms, axes: Sequence[Axis]) -> dict[int, list[str]]:
    """Guard -> what a verdict of ours rests on and these files do not show."""
    found: dict[int, list[str]] = {}

    def unproven(number: int, said: str) -> None:
        found.setdefault(number, []).append(said)

    if any(hit_rate(run) is None for run in arms.runs):
        unproven(1, "what the prefix cache gave (the server's counters are in no file)")
    if not all(same_prompts(one, other) for one, other in zip(arms.baseline, arms.candidate, strict=False)):
        unproven(1, "that both arms were sent the same prompts")
    unproven(2, "the server's own count of the tokens")
    unproven(3, "what the engine ran")
    unproven(4, "that nothing else was changed on the server" if axes else "what was changed: no setting in the files "
             "differs")  # fmt: skip
    if any(run.intended_is != SCHEDULE for run in arms.runs):
        unproven(5, "how late the client sent, against its schedule")
    unproven(7, "that no answer was cut off: finish reasons")
    unproven(10, "that the device was held alone")
    if any(run.warmup is None for run in arms.runs):
        unproven(13, "that both arms were warmed up alike, with prompts of their own")
    unproven(14, "hardware and versions of the server, and that it stayed the same")
    unproven(15, "the server's own account of its times")
    return found
