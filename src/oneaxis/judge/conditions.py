"""Whether two arms may be compared at all: the guards that need both of them, as pure functions of their records.

The guards of one run (1, 2, 3, 5 to 10, 13) are judged by the sweep itself. Here are those of a comparison: 1 the
arms' prefix-cache hit rates, 3 what the engine runs in both, 4 one axis, and the inputs that it does not reach, 9
stalls, 10 stray tenants, 11 one session and alternating order, 12 the bar before the run, 13 equal warm-up, 14 equal
conditions. Each gives a finding: what it saw, and problems: *invalid* voids the comparison, *unresolved* keeps it from
deciding, a *warning* is to be kept in mind. `ledger` puts them beside what the runs said of themselves.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import polars as pl

from oneaxis.artifacts import MANIFEST
from oneaxis.config.axes import ABSENT
from oneaxis.config.schema import STAGE_SECTIONS
from oneaxis.draft.engine import ARGUMENT
from oneaxis.judge.founded import figure, read_load, read_requests, reused
from oneaxis.judge.ledger import Finding
from oneaxis.judge.records import UPSTREAM, Record, differences
from oneaxis.judge.stalls import STALL_MADS, without_stalls
from oneaxis.judge.units import CELL_LATENCY, Problem
from oneaxis.judge.validity import differences as engine_differences
from oneaxis.judge.validity import judge_run, why_invalid
from oneaxis.multirun.record import Axis

STRAY_LOAD = 1.5
"""A load average above this many times the CPUs, before a stage, is the work of others (guard 10)."""
KV_SHORTFALL = 0.9
"""A candidate's KV capacity under this share of the baseline's is the work of others, or of more than the axis."""
DEFAULT_SESSION = "default"

Arms = tuple[Sequence[Record], Sequence[Record]]


def invalid(reason: str, recommendation: str) -> Problem:
    """A problem that voids the comparison."""
    return Problem("invalid", reason, recommendation)


# --- each arm by itself ---------------------------------------------------------------------------------------------


def _changed(record: Record, stage: str) -> Iterator[Problem]:
    """Files that a verdict on this stage may read, and that are not what their stage wrote."""
    to_do = "restore it (`dvc checkout`), or measure again"
    if stage == "sweep" and stage not in record.results.manifests:
        yield invalid(f"{record.name}: artifacts/sweep/{MANIFEST} is missing: nothing shows what was written", to_do)
    for name in (stage, "serve") if stage == "sweep" else (stage,):
        for file in record.results.changed(name):
            yield invalid(f"{record.name}: artifacts/{name}/{file} was changed since its {MANIFEST} was written", to_do)


def arms_valid(arms: Arms, stage: str) -> Iterator[Problem | Finding]:
    """Every run ended, ran with its own settings, and is VALID in the stages that the metric rests on.

    What a guard of a single run says is a finding of that guard.
    """
    relied_on = (*UPSTREAM[stage], stage, *(("serve",) if stage == "sweep" else ()))
    found: dict[tuple[int | None, str], list[str]] = {}
    for record in (record for arm in arms for record in arm):
        if not record.ended:
            said = f"{record.status.state}: {record.status.message}" if record.status else "did not end"
            yield invalid(
                f"{record.name} {said}", "finish it: `oneaxis run -m --resume ID` (ID: the folder's name in multirun/)"
            )
            continue
        yield from _changed(record, stage)
        stale = [name for name in record.stale if name in relied_on]
        if stale:
            said = f"{record.name}: {', '.join(stale)} ran with other settings than its params.yaml"
            yield invalid(said, "run it again")
        reasons = why_invalid(record.results, relied_on)
        scored = stage == "score" and record.settings.get("score", {}).get("engine") == "vllm"
        if scored or stage == "extract":
            # An engine other than the one asked for gives other answers where it scores or is asked.
            reasons += [(3, f"engine: {difference}") for difference in engine_differences(record.results)]
        for numbered in reasons:
            found.setdefault(numbered, []).append(record.name)
    for (number, reason), names in found.items():
        problem = invalid(f"{_names(names)} INVALID: {reason}", "mend what the guard names, then measure again")
        yield problem if number is None else Finding(number, {}, [problem])
    yield from _harmed(arms, relied_on)
    yield from _other_stages(arms, relied_on)


def _harmed(arms: Arms, relied_on: Sequence[str]) -> Iterator[Problem]:
    """A policy whose training was severe, or displaced, is said beside whatever else it won."""
    if "train_dpo" not in relied_on:
        return
    for record in (arm[0] for arm in arms if arm):
        found = record.results.document("train_dpo", "displacement.json")
        if found and found["verdict"] in ("severe", "displacement"):
            reasons = found.get("reasons") or []
            said = f": {reasons[0]}" if reasons else ""
            yield Problem("warning", f"{record.name}: preference training was judged {found['verdict']}{said}")


def _other_stages(arms: Arms, relied_on: Sequence[str]) -> Iterator[Problem]:
    """A run that is INVALID where the metric does not look is said, and voids nothing."""
    apart = [stage for stage in ("sweep", "score") if stage not in relied_on]
    found: dict[str, list[str]] = {}
    for record in (record for arm in arms for record in arm):
        there = [stage for stage in apart if stage in record.results.manifests]
        for reason in judge_run(record.results, there).reasons:
            found.setdefault(reason, []).append(record.name)
    for reason, names in found.items():
        yield Problem("warning", f"{_names(names)} INVALID elsewhere: {reason}; this metric does not rest on it")


def _names(names: Sequence[str]) -> str:
    """`b r0 is`, `b r0 and c r0 are`, `b r0, b r1 and 10 more runs are`."""
    if len(names) == 1:
        return f"{names[0]} is"
    shown = names if len(names) == 2 else [*names[:2], f"{len(names) - 2} more runs"]
    return f"{', '.join(shown[:-1])} and {shown[-1]} are"


# --- 4. one axis ----------------------------------------------------------------------------------------------------


def grouped_axes(found: Mapping[str, tuple[Any, Any]]) -> list[Axis]:
    """The axes in which two runs differ, where nobody declared them: another `kind` is another choice of its group."""
    groups = {key.partition(".")[0] for key in found if re.fullmatch(r"\w+\.kind", key)}
    axes = []
    for group in sorted(groups):
        leaves = {key: list(pair) for key, pair in found.items() if key.startswith(f"{group}.")}
        axes.append(Axis(group, "group", *found[f"{group}.kind"], leaves=leaves))
    axes += [
        Axis(key, "key", *pair, leaves={key: list(pair)})
        for key, pair in found.items()
        if key.partition(".")[0] not in groups
    ]
    return axes


def moved_keys(axis: Axis) -> Sequence[str]:
    """The settings that an axis moves."""
    return list(axis.leaves) or [axis.name]


def one_axis(
    baseline: Record, candidate: Record, declared: Sequence[Axis] | None, combination: bool
) -> tuple[list[Axis], Finding]:
    """Guard 4, from the settings themselves: what differs is what was declared, and it is one axis.

    Args:
        declared: as the plan says; None: nobody declared anything, and the difference speaks.
        combination: several axes are declared, and the parts are compared too.
    """
    found = differences(baseline.settings, candidate.settings)
    axes = grouped_axes(found) if declared is None else list(declared)
    problems = []
    allowed = {key for axis in axes for key in moved_keys(axis)}
    undeclared = {key: pair for key, pair in found.items() if not _under(key, allowed)}
    if undeclared:
        said = f"guard 4, one axis: also differs: {_listed(undeclared)}"
        problems.append(invalid(said, "change one axis, or declare a combination"))
    for axis in axes if declared is not None else ():
        for key, pair in axis.leaves.items():
            if key in found and not all(_same(*values) for values in zip(found[key], pair, strict=True)):
                problems.append(invalid(
                    f"guard 4, one axis: {key} was declared {say(pair[0])} -> {say(pair[1])} and is "
                    f"{say(found[key][0])} -> {say(found[key][1])}", "run the multirun again",
                ))  # fmt: skip
    if len(axes) > 1 and not combination:
        problems.append(invalid(
            f"guard 4, one axis: {len(axes)} axes differ: {_listed({a.name: (a.before, a.after) for a in axes})}",
            "compare runs that differ in one axis; several at once are a combination: `oneaxis run -m --combine`",
        ))  # fmt: skip
    if not found:
        problems.append(Problem("warning", "the settings of both arms are the same: only noise can differ"))
    evidence = {"axes": [axis.name for axis in axes], "settings_that_differ": len(found)}
    return axes, Finding(4, evidence, problems)


def _under(key: str, declared: Iterable[str]) -> bool:
    """A declared mapping covers the keys inside it."""
    return any(key == name or key.startswith(f"{name}.") for name in declared)


def _same(found: Any, declared: Any) -> bool:
    return found == declared or (found == ABSENT and declared is None)


def _listed(found: Mapping[str, Sequence[Any]]) -> str:
    shown = [f"{key} ({say(pair[0])} -> {say(pair[1])})" for key, pair in list(found.items())[:6]]
    return ", ".join(shown) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def say(value: Any) -> str:
    """A setting as it is written in an override."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def reaches(axes: Sequence[Axis], stages: Sequence[str]) -> bool:
    """Whether one of the axes moves a setting that one of the stages reads."""
    read = {section for stage in stages for section in STAGE_SECTIONS[stage]} - {"measure"}
    return any(key.partition(".")[0] in read for axis in axes for key in moved_keys(axis))


# --- inputs ---------------------------------------------------------------------------------------------------------

LAST_BITS = ("filter_pairs", "calibrate", "quantize")
"""Stages whose files may differ in their last bits between machines. Another text, model or policy is another input."""


def arms_uniform(arms: Arms) -> Finding:
    """Guard 4: the runs of an arm are repetitions of one run, with settings that differ in nothing."""
    problems = []
    for arm in arms:
        for record in arm[1:]:
            moved = differences(arm[0].settings, record.settings)
            if moved:
                key, (before, after) = next(iter(moved.items()))
                said = f"guard 4, one axis: {record.name} is no repetition of {arm[0].name}: {key} {say(before)} -> "
                more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
                problems.append(invalid(f"{said}{say(after)}{more}", "measure an arm with one set of settings"))
                break
    return Finding(4, {"runs_of_an_arm_alike": not problems}, problems)


def same_inputs(baseline: Record, candidate: Record, axes: Sequence[Axis], stage: str) -> Finding:
    """Guard 4: files that the axis does not reach must be the same, by the hashes that the manifests hold."""
    problems: list[Problem] = []
    compared = 0
    for upstream in UPSTREAM[stage]:
        if reaches(axes, (upstream, *UPSTREAM[upstream])):
            continue
        files = [record.results.manifests.get(upstream, {}).get("files", {}) for record in (baseline, candidate)]
        compared += len(files[0].keys() & files[1].keys())
        differ = sorted(
            name for name in files[0].keys() & files[1].keys() if files[0][name]["sha256"] != files[1][name]["sha256"]
        )
        if not differ:
            continue
        reason = f"the inputs differ, and the axis does not explain it: artifacts/{upstream}/{differ[0]}"
        reason += f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        if upstream in LAST_BITS:
            problems.append(Problem("warning", reason))
        else:
            problems.append(invalid(reason, "measure both arms in one multirun, so that they share their inputs"))
    return Finding(4, {"input_files_compared": compared}, problems)


def same_arrivals(runs: Sequence[tuple[Record, Record]], axes: Sequence[Axis]) -> Finding | None:
    """Guard 4: both runs of a pair were sent the same requests at the same moments."""
    if reaches(axes, ("fetch_model", "prepare_data")) or any(_moved(axis, "load", "seed") for axis in axes):
        return None
    equal = 0
    for one, other in runs:
        if not all("sweep" in record.results.manifests for record in (one, other)):
            # There is no load to compare, which is said elsewhere.
            continue
        hashes = [
            record.results.manifests.get("sweep", {}).get("files", {}).get("arrivals.parquet", {}).get("sha256")
            for record in (one, other)
        ]
        if hashes[0] != hashes[1]:
            return Finding(4, {"pairs_with_equal_arrivals": equal}, [invalid(
                f"the inputs differ, and the axis does not explain it: artifacts/sweep/arrivals.parquet of {one.name} "
                f"and {other.name}", "pair runs of one session and one repetition: their arrivals are drawn alike",
            )])  # fmt: skip
        equal += 1
    return Finding(4, {"pairs_with_equal_arrivals": equal})


def _moved(axis: Axis, *sections: str) -> bool:
    return any(key.partition(".")[0] in sections for key in moved_keys(axis))


# --- 3. realised config, across the arms ----------------------------------------------------------------------------

ALWAYS_EQUAL = ("device", "vllm_version")
FOLLOWS_CHECKPOINT = ("quantization", "kernels", "kv_cache_tokens")


def realised_alike(baseline: Record, candidate: Record, axes: Sequence[Axis], stage: str) -> list[Finding]:
    """Guard 3 over two arms: what the engine runs differs only where the axis explains it; guard 10: its room.

    The stages `split` and `diverge` start engines of their own, and say what they run.
    """
    where = stage if stage in ("split", "diverge") else "serve"
    documents = [record.results.document(where, "realised.json") for record in (baseline, candidate)]
    if None in documents:
        missing = [r.name for r, found in zip((baseline, candidate), documents, strict=True) if found is None]
        said = f"guard 3, realised config: artifacts/{where}/realised.json of {' and '.join(missing)} is missing"
        return [Finding(3, {"settings_compared": 0}, [invalid(said, f"run the stage {where} in both arms")])]
    one, other = documents
    assert one is not None
    assert other is not None
    if stage == "split":
        return [finding for engine in sorted(one.keys() | other.keys())
                for finding in _alike(one.get(engine, {}), other.get(engine, {}), axes)]  # fmt: skip
    return [*_alike(one, other, axes), *_untold(other, axes)]


def _untold(candidate: Mapping[str, Any], axes: Sequence[Axis]) -> list[Finding]:
    """A setting that the axis moves and the engine does not tell is not shown to have been there."""
    untold = sorted({key for axis in axes for key in moved_keys(axis)}.intersection(candidate.get("unverified", [])))
    if not untold:
        return []
    said = f"guard 3, realised config: the engine does not tell {', '.join(untold)}, so that the change is not shown"
    to_do = "look for it in the engine's log, or move a setting that the engine tells"
    return [Finding(3, {"unverified": untold}, [Problem("unresolved", said, to_do)])]


def _alike(one: Mapping[str, Any], other: Mapping[str, Any], axes: Sequence[Axis]) -> list[Finding]:
    moved = {key for axis in axes for key in moved_keys(axis)}
    serve_moved = {key.removeprefix("serve.") for key in moved if key.startswith("serve.")}
    if any(_moved(axis, "draft") for axis in axes):
        # The section is handed to the engine as this argument.
        serve_moved.add(f"engine_args.{ARGUMENT}")
    if any(_moved(axis, "split") for axis in axes):
        serve_moved.add("engine_args.kv_transfer_config")
    checkpoint_moved = any(_moved(axis, "model", "train", "quantize", "pairs", "data") for axis in axes)
    model_moved = any(_moved(axis, "model") for axis in axes)
    problems, followed = [], []
    resolved = [document.get("resolved", {}) for document in (one, other)]
    for key in sorted(resolved[0].keys() | resolved[1].keys()):
        before, after = (values.get(key, ABSENT) for values in resolved)
        if before == after:
            continue
        asked = key in one.get("asked", {}) or key in other.get("asked", {})
        own = key in serve_moved or (model_moved and key != "threads")
        follows = not asked and (bool(serve_moved) or (checkpoint_moved and key in FOLLOWS_CHECKPOINT))
        if key not in ALWAYS_EQUAL and own:
            continue
        if key not in ALWAYS_EQUAL and follows:
            followed.append(f"{key} {say(before)} -> {say(after)}")
            continue
        problems.append(invalid(
            f"guard 3, realised config: the engines differ beyond the axis: {key} {say(before)} -> {say(after)}",
            "make the engine run the same in both arms (artifacts/serve/realised.json)",
        ))  # fmt: skip
    if one.get("checkpoint") != other.get("checkpoint") and not checkpoint_moved:
        problems.append(invalid("guard 3, realised config: the checkpoints ask for different things (config.json)",
                                "serve the same checkpoint in both arms"))  # fmt: skip
    if followed:
        problems.append(Problem("warning", f"follows from the axis: {'; '.join(followed)}"))
    evidence = {"settings_compared": len(resolved[0].keys() | resolved[1].keys()), "follow_from_the_axis": followed}
    # Another model has keys and values of another size.
    capacity = [] if model_moved else _kv_capacity(resolved, serve_moved)
    return [Finding(3, evidence, problems), *capacity]


def _kv_capacity(resolved: Sequence[Mapping[str, Any]], serve_moved: set[str]) -> list[Finding]:
    tokens = [values.get("kv_cache_tokens") for values in resolved]
    if serve_moved or not tokens[0] or tokens[1] is None:
        return []
    evidence = {"kv_cache_tokens": tokens}
    if tokens[1] >= KV_SHORTFALL * tokens[0]:
        return [Finding(10, evidence)]
    return [Finding(10, evidence, [invalid(
        f"guard 10, stray tenants: the candidate's engine had room for {tokens[1]:,} tokens of KV cache, the "
        f"baseline's for {tokens[0]:,}", "free the device's memory of other processes, and measure again",
    )])]  # fmt: skip


# --- 1 and 13: caches and warm-up ------------------------------------------------------------------------------------


def hit_rates_agree(arms: Arms, axes: Sequence[Axis]) -> Finding | None:
    """Guard 1 over two arms: the server's prefix cache gave both the same share."""
    if any("serve.prefix_caching" in axis.leaves or _moved(axis, "load") for axis in axes):
        return None
    names = [
        {name for record in arm for name in record.results.metrics if re.match(r"^sweep/.*prefix_hit_rate$", name)}
        for arm in arms
    ]
    bound = float(arms[0][0].settings.get("guards", {}).get("max_prefix_hit_rate", 0.01))
    apart = 0.0
    for name in sorted(names[0] & names[1]):
        rates = [[rate for r in arm if (rate := r.results.metrics.get(name)) is not None] for arm in arms]
        means = [sum(values) / len(values) for values in rates]
        apart = max(apart, abs(means[0] - means[1]))
        if apart > bound:
            return Finding(1, {"hit_rates_apart": apart}, [invalid(
                f"guard 1, unique prompts: the arms' prefix-cache hit rates disagree: {name} {means[0]:.1%} and "
                f"{means[1]:.1%} (guards.max_prefix_hit_rate {bound:.1%})",
                "both arms need prompts of their own and an empty cache",
            )])  # fmt: skip
    return Finding(1, {"hit_rates_apart": apart})


def warmed_alike(runs: Sequence[tuple[Record, Record]]) -> Finding:
    """Guard 13: the warm-up before each cell was the same in both arms, and its requests succeeded."""
    alike = 0
    for one, other in runs:
        cells = [record.results.observed("sweep").get("cells") or [] for record in (one, other)]
        facts = [
            [(c["shape"], c["level"], c["warmup_requests"], c["warmup_ok"], c["prefix_cache_reset"]) for c in each]
            for each in cells
        ]
        for a, b in zip(*facts, strict=False):
            if a != b:
                return Finding(13, {"cells_warmed_alike": alike}, [invalid(
                    f"guard 13, warm-up: {one.name} and {other.name} were not warmed up alike at {a[0]} "
                    f"{a[1]}: {a[3]} of {a[2]} requests succeeded, and {b[3]} of {b[2]}",
                    "set load.warmup_requests for both, and see why one failed",
                )])  # fmt: skip
            alike += 1
    return Finding(13, {"cells_warmed_alike": alike})


# --- 14. the same conditions -----------------------------------------------------------------------------------------


def _provenance(record: Record, stage: str) -> Mapping[str, Any]:
    return record.results.provenance.get(stage, {})


def _facts(record: Record, stage: str) -> dict[str, Any]:
    found = _provenance(record, stage)
    return {**found.get("versions", {}), **found.get("hardware", {})}


def same_conditions(arms: Arms, stage: str, timed: bool) -> Finding:
    """Guard 14: versions, machine, boot and threads of all runs; a difference voids a timing and warns otherwise."""
    records = [record for arm in arms for record in arm]
    without = [record.name for record in records if not _provenance(record, stage)]
    if without:
        missing = f"guard 14, conditions: no provenance of {stage} in {', '.join(without)}"
        lost = invalid(missing, "run the stage again") if timed else Problem("warning", missing)
        return Finding(14, {"runs": len(records), "facts_compared": 0}, [lost])
    problems = []
    first = _facts(records[0], stage)
    for record in records[1:]:
        facts = _facts(record, stage)
        differ = [key for key in sorted(first.keys() | facts.keys()) if first.get(key) != facts.get(key)]
        # The boot says which machine ran it only where time was measured.
        differ = differ if timed else [key for key in differ if key not in ("boot_id", "memory_gib")]
        if differ:
            said = f"guard 14, conditions: {records[0].name} and {record.name} differ in " + "; ".join(
                f"{key} ({first.get(key)}, {facts.get(key)})" for key in differ[:4]
            )
            problems.append(
                invalid(said, "measure both arms in one multirun on one machine") if timed else Problem("warning", said)
            )
            break
    commits = {_provenance(record, stage).get("git", {}).get("commit") for record in records} - {None}
    if len(commits) > 1:
        problems.append(Problem("warning", f"{stage} ran from {len(commits)} different commits"))
    starts = sorted({str(_provenance(record, stage).get("observed", {}).get("start", "")) for record in records} - {""})
    if len(starts) > 1:
        # The stage that times the start itself never forks, so this touches what is measured after the warm-up only.
        problems.append(Problem("warning", f"{stage}'s engines were not started alike ({', '.join(starts)})"))
    return Finding(14, {"runs": len(records), "facts_compared": len(first)}, problems)


def one_session(arms: Arms, stage: str) -> Finding:
    """Guard 11: all runs are of one session of their own, no two are the same measurement, and the arms alternate."""
    records = [record for arm in arms for record in arm]
    measured = [_provenance(record, stage).get("params", {}).get("measure", {}) for record in records]
    sessions = Counter(measure.get("session") for measure in measured)
    seen = {"runs": len(records), "sessions": len(sessions)}
    if len(sessions) > 1:
        return Finding(11, seen, [invalid(f"guard 11: measured in different sessions: {', '.join(map(str, sessions))}",
                        "measure both arms in one multirun")])  # fmt: skip
    if DEFAULT_SESSION in sessions:
        return Finding(11, seen, [invalid(
            f"guard 11: timings of session `{DEFAULT_SESSION}` may come from the cache, and two runs of it never "
            "support a claim", "measure in a multirun that judges timings (`experiment.repetitions=6`)",
        )])  # fmt: skip
    started = sorted(
        (str(_provenance(record, stage).get("started_at")), side, record.name)
        for side, arm in enumerate(arms)
        for record in arm
    )
    for before, after in pairwise(started):
        if before[0] == after[0]:
            said = f"guard 11: {before[2]} and {after[2]} are one measurement, made at {before[0]}"
            return Finding(11, seen, [invalid(said, "each repetition needs a measurement of its own")])
    longest = max(len(list(run)) for _, run in groupby(started, key=lambda entry: entry[1]))
    seen["longest_run_of_one_arm"] = longest
    if len(records) >= 4 and longest > max(2, min(len(arm) for arm in arms) // 2):
        return Finding(11, seen, [Problem(
            "unresolved", f"guard 11: {longest} runs of one arm came without one of the other between them: a drift of "
            "the machine would look like an effect", "measure the arms in alternating order",
        )])  # fmt: skip
    return Finding(11, seen)


def stray_tenants(arms: Arms, stage: str) -> Finding:
    """Guard 10: the machine was not busy with something else when a timed stage was given its device."""
    busiest = 0.0
    problems: list[Problem] = []
    for record in (record for arm in arms for record in arm):
        found = _provenance(record, stage)
        load, cpus = found.get("load_before"), found.get("hardware", {}).get("cpus")
        if not load or not cpus:
            continue
        busiest = max(busiest, load[0] / cpus)
        if load[0] <= STRAY_LOAD * cpus:
            continue
        said = f"guard 10, stray tenants: {record.name}: load average {load[0]:.1f} on {cpus} CPUs as {stage} began"
        if (found.get("lease") or {}).get("waited_s", 0.0) > 0:
            # The average is over a minute, and may still count the work that the stage has waited for.
            problems.append(Problem("warning", f"{said}, just after it had waited for others"))
        else:
            again = "stop what else runs on the machine, and measure again"
            problems.append(Problem("unresolved", said, again))
    worst = [problem for problem in problems if problem.kind == "unresolved"] or problems
    return Finding(10, {"load_per_cpu_before": busiest}, worst[:1])


# --- 12. the bar before the run --------------------------------------------------------------------------------------


def bar_before_run(arms: Arms, stage: str, written_at: str | None, expected: float | None, timed: bool) -> Finding:
    """Guard 12: the claim was written before what it speaks of was measured, and says what is expected.

    Args:
        written_at: when the plan that holds the claim was written; None: at judging time.
    """
    if written_at is None:
        late = Problem("warning", "guard 12: the bar was given when judging, not before the run")
        return Finding(12, {"written_at": None}, [late])
    problems = []
    early = [
        record
        for arm in arms
        for record in arm
        if (started := _provenance(record, stage).get("started_at")) and str(started) < _comparable(written_at)
    ]
    if early:
        said = f"guard 12: {early[0].name} was measured before the claim was written"
        problems.append(
            invalid(said, "a timing must be measured after its plan: start a new multirun") if timed
            else Problem("warning", f"{said} (it was restored from the cache)")
        )  # fmt: skip
    if expected is None:
        problems.append(Problem("warning", "guard 12: no effect was expected in writing (`expected: null`)"))
    return Finding(12, {"written_at": written_at, "expected": expected, "runs_before_it": len(early)}, problems)


def _comparable(moment: str) -> str:
    """ISO times in UTC compare as text but for how they write the zone."""
    return moment.replace("Z", "+00:00")


# --- 9. stalls -------------------------------------------------------------------------------------------------------


def stalls(arms: Arms, metric: str, claimed_effect: float) -> Finding:
    """Guard 9: calls beyond the robust bound are reported, and void the comparison when they carry the headline.

    What a stalled call is, is said in `oneaxis.judge.stalls`.

    Args:
        claimed_effect: the size that matters, in the metric's unit: expected, else the bar, else the effect seen.
    """
    problems: list[Problem] = []
    evidence: dict[str, Any] = {}
    for arm, side in zip(arms, ("baseline", "candidate"), strict=True):
        counts, moves = 0, []
        for record in arm:
            requests = read_requests(record)
            if requests is None:
                continue
            load, _ = read_load(record)
            cells = requests if metric.endswith("/capacity_tok_s") else _cell(requests, metric)
            if cells is None or cells.is_empty():
                continue
            kept = without_stalls(cells, load, reused(record, requests, load))
            counts += cells.height - kept.height
            if kept.height < cells.height:
                before, after = (figure(record, table, metric) for table in (cells, kept))
                moves.append(None if before is None or after is None else after - before)
        evidence[f"stalled_{side}"] = counts
        if not counts:
            continue
        shift = sum(move for move in moves if move is not None) / len(arm)
        beyond = f"more than {STALL_MADS:g} MADs above the median of their cell"
        said = f"guard 9, stalls: {counts} calls of the {side} stalled ({beyond})"
        if None in moves or abs(shift) > abs(claimed_effect):
            said += f"; without them its mean moves by {shift:+.4g}, more than the {abs(claimed_effect):.4g} claimed"
            problems.append(invalid(said, "find what stalled (artifacts/sweep/requests.parquet), and measure again"))
        else:
            problems.append(Problem("warning", f"{said}; without them its mean moves by {shift:+.4g}"))
    return Finding(9, evidence, problems)


def _cell(requests: pl.DataFrame, metric: str) -> pl.DataFrame | None:
    match = CELL_LATENCY.match(metric)
    if not match:
        return None
    return requests.filter((pl.col("shape") == match["shape"]) & (pl.col("level") == match["level"]))
