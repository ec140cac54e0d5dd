"""Whether one run's numbers may be used: VALID, or INVALID with every reason, and what to keep in mind either way.

The report of a run and the verdict of a comparison read the same function. A run is INVALID when a guard failed, when
the engine does not run as asked, when a measurement is missing, or when the training was stopped early by its
threshold: such a policy is none of the settings'. A finding that is bad but well measured (displacement) is a warning,
not a reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneaxis.config.schema import STAGE_SECTIONS
from oneaxis.judge.guards import exclusive_device

if TYPE_CHECKING:
    # The report reads this module too.
    from oneaxis.report.results import Results


OF_ONE_RUN = (1, 2, 3, 5, 6, 7, 8, 9, 10, 13, 15)
"""The guards that each sweep itself judges; the others take two arms."""
SINCE = {8: "draws.parquet", 15: "server_histograms.parquet"}
"""Guards that older sweeps did not have -> the file of the sweep that came with them."""


@dataclass(frozen=True)
class Validity:
    """VALID or INVALID with every reason, and what to keep in mind either way."""

    valid: bool
    reasons: Sequence[str]
    warnings: Sequence[str]


def judge_run(results: "Results", stages: Sequence[str] = tuple(STAGE_SECTIONS)) -> Validity:
    """Whether the numbers of `stages` may be used.

    Args:
        stages: those that the reader relies on; the guards of others do not touch their numbers.
    """
    reasons = [reason for _, reason in why_invalid(results, stages)]
    return Validity(valid=not reasons, reasons=reasons, warnings=_warnings(results))


def why_invalid(results: "Results", stages: Sequence[str]) -> list[tuple[int | None, str]]:
    """Each reason with the number of the guard that gives it; None where it is no guard's."""
    found: list[tuple[int | None, str]] = []
    if "sweep" in stages:
        found += _load(results)
    if {"serve", "sweep"} & set(stages) and 3 not in [number for number, _ in found]:
        # The load's own third guard says the same of the same engine; one line is enough.
        found += [(3, f"engine: {difference}") for difference in differences(results)]
    divided = ("split",) if results.section("split").get("kind", "none") != "none" else ()
    found += _leases(results, [stage for stage in ("serve", *divided, "sweep") if stage in stages])
    return found + [(None, reason) for reason in _not_measured(results, stages)]


def _not_measured(results: "Results", stages: Sequence[str]) -> list[str]:
    """What ended early, or is missing."""
    reasons = []
    stopped = (results.document("train_dpo", "displacement.json") or {}).get("stopped")
    if "train_dpo" in stages and stopped:
        reasons.append(f"train_dpo: {stopped['reason']}; the policy is that of an unfinished training")
    if "split" in stages:
        told = results.document("split", "summary.json") or {}
        reasons += [f"split: {reason}" for reason in told.get("invalid", [])]
    if "diverge" in stages:
        told = results.document("diverge", "summary.json") or {}
        reasons += [f"diverge: {reason}" for reason in told.get("invalid", [])]
    summary = results.document("score", "summary.json")
    if "score" in stages and (not summary or not summary.get("tasks")):
        reasons.append("score: no items were scored")
    asked = "extract" in results.manifests and results.section("extract").get("kind", "none") != "none"
    if "extract" in stages and asked and not results.metrics.get("extract/answers"):
        reasons.append("extract: no document was answered")
    quantised = "quantize" in results.manifests and results.section("quantize")["kind"] != "none"
    if "quantize" in stages and quantised and "quantize/delta_nll" not in results.metrics:
        reasons.append("quantize: perplexity was not measured on the written checkpoint")
    return reasons


def _load(results: "Results") -> list[tuple[int | None, str]]:
    guards = results.document("sweep", "guards.json")
    if not guards:
        return [(None, "load: no guard vouches for it (sweep wrote no guards.json)")]
    failed: list[tuple[int | None, str]] = [
        (guard["guard"], f"guard {guard['guard']}, {guard['name']}: {guard['reason']}")
        for guard in guards if not guard["valid"]
    ]  # fmt: skip
    recorded = {guard["guard"] for guard in guards}
    files = results.manifests.get("sweep", {}).get("files", {})
    absent = [number for number in OF_ONE_RUN if number not in recorded]
    absent = [number for number in absent if number not in SINCE or SINCE[number] in files]
    if absent:
        failed.append((None, f"load: sweep/guards.json has no guard {', '.join(map(str, absent))}"))
    return failed


def _leases(results: "Results", timed: Sequence[str]) -> list[tuple[int | None, str]]:
    """A load measured by the stage has this guard among its own; the engine's start has it here alone."""
    reasons: list[tuple[int | None, str]] = []
    for stage in timed:
        held = exclusive_device(results.provenance.get(stage, {}).get("lease"))
        guards = results.document("sweep", "guards.json") if stage == "sweep" else None
        said_so = any(guard["guard"] == held.number and not guard["valid"] for guard in guards or [])
        if stage in results.provenance and not held.valid and not said_so:
            reasons.append((held.number, f"{stage}: {held.reason}"))
    return reasons


def _warnings(results: "Results") -> list[str]:
    warnings = []
    displacement = results.document("train_dpo", "displacement.json")
    if displacement and displacement["verdict"] != "healthy":
        said = "" if displacement["verdict"] == "no clear change" else "; ".join(displacement.get("reasons") or [])
        warnings.append(f"preference training: {displacement['verdict']}" + (f" ({said})" if said else ""))
    warnings += [f"preference training: {said}" for said in (displacement or {}).get("warnings", [])]
    if results.section("model").get("kind") != "random":
        odd = [answer["prompt"] for answer in results.document("serve", "smoke.json") or [] if not answer["sane"]]
        warnings += [f"odd answer of the served model to {prompt!r}" for prompt in odd]
    warnings += [f"split: {said}" for said in (results.document("split", "summary.json") or {}).get("warnings", [])]
    told = results.document("diverge", "summary.json") or {}
    warnings += [f"diverge: {said}" for said in told.get("warnings", [])]
    realised = results.document("serve", "realised.json") or {}
    warnings += [f"engine: {caution}" for caution in realised.get("cautions", [])]
    dirty = sorted(stage for stage, facts in results.provenance.items() if facts.get("git", {}).get("dirty"))
    if dirty:
        warnings.append(f"the work tree had uncommitted changes while {len(dirty)} stages ran: the commit alone "
                        "does not give these numbers again")  # fmt: skip
    boots = {facts.get("hardware", {}).get("boot_id") for stage, facts in results.provenance.items()
             if stage in ("serve", "sweep")}  # fmt: skip
    if len(boots) > 1:
        warnings.append("serve and sweep were measured on different boots or machines")
    return warnings


def differences(results: "Results") -> list[str]:
    """What the engine runs otherwise than asked, one line each."""
    realised = results.document("serve", "realised.json") or {}
    return [_difference(found) for found in realised.get("differences", [])]


def _difference(found: Any) -> str:
    from oneaxis.report import text

    if isinstance(found, Mapping):
        name = found.get("name") or found.get("key") or found.get("setting") or "setting"
        rest = {key: value for key, value in found.items() if value != name}
        return f"{name}: {text.evidence(rest)}"
    return str(found)
