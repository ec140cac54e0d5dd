"""From the overrides of `oneaxis run -m` to the plan of a multirun: its points, the order of its jobs, its claims.

Hydra's own parser reads the overrides, so sweeps have its syntax: `a=1,2`, `choice(1,2)`, `range(0,1,0.1)`, `glob(*)`.
What is compared comes from one of four places: an override that sweeps; `experiment.axis` with `experiment.values`;
`experiment.changes`; or, where nothing sweeps, the overrides themselves against the committed defaults. The first value
is the baseline. Everything that can be known to be wrong is refused here, before the first job starts: a point that
the schema refuses, a point that differs from the baseline in no axis or in several, a claim on a metric that the run
will not have, an axis that no stage of the targets reads.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from oneaxis.artifacts import ARTIFACTS
from oneaxis.config import STAGE_SECTIONS, Config, derived_paths
from oneaxis.config.axes import GROUPS_NOT_AXES, differences, group_overrides, is_no_axis, same, settings
from oneaxis.config.compose import Composed, compose_all
from oneaxis.errors import UserError
from oneaxis.multirun.metric_names import cell_metric, metric_names
from oneaxis.multirun.record import MULTIRUN, Axis, Job, Plan, Point, multirun_folder, read_plan

CONF = "conf"
TIMED_STAGES = ("serve", "split", "sweep")
AD_HOC = "ad_hoc"
LONGEST_NAME = 80
MOST_POINTS = 500
SET_BY_MULTIRUN = "a multirun sets it for each job; allowed: experiment.repetitions=N"


@dataclass(frozen=True)
class Value:
    """One value of one sweep: the override that sets it, and how it is named."""

    override: str
    text: str


@dataclass(frozen=True)
class Sweep:
    """An override that sweeps, or the axis of an experiment."""

    key: str
    """As in the settings, without `+`."""
    values: Sequence[Value]


@dataclass(frozen=True)
class Asked:
    """The overrides of a command, sorted."""

    held: Sequence[str]
    """Set one value, for every point."""
    sweeps: Sequence[Sweep]
    launcher: Sequence[str]


@dataclass(frozen=True)
class Draft:
    """A point before it is compared: its name, its overrides, the points that hold its single changes, its control."""

    name: str
    overrides: Sequence[str]
    parts: Sequence[str] = ()
    control: str = ""


def make_plan(root: Path, overrides: Sequence[str], *, resume: str | None, now: datetime) -> Plan:
    """The plan of a multirun; its `snapshot` is empty until the caller fills it.

    Args:
        root: the project.
        overrides: of the command: sweeps, settings for every point, `hydra/launcher=...` and `hydra.launcher.*`.
        resume: the id of a multirun that did not end: its own plan is returned, with the launcher of this command.
        now: the time, for the id.

    Raises:
        UserError: one line with what is wrong, where, and what is allowed.
    """
    conf = root / CONF
    asked = read_overrides(conf, overrides)
    if resume is not None:
        return _resumed(root, resume, asked, overrides)
    first = _compose(conf, "the baseline", [*asked.held, *(sweep.values[0].override for sweep in asked.sweeps)])
    drafts = _drafts(conf, asked, first)
    composed = [_compose(conf, draft.name, draft.overrides) for draft in drafts]
    experiment = composed[0].config.experiment
    points = _compare(conf, drafts, composed, combine=experiment.combine)
    _check_inputs(root, points, composed, asked.launcher)

    reached = [reached_stages(root, one.config) for one in composed]
    _check_axes_reach_a_stage(points, reached)
    _check_axes_do_something(points, [one.config for one in composed])
    claims = _concrete_claims(points, composed, reached)
    _check_repetitions(experiment.repetitions, reached)
    # Not above: it imports the readers of tables, which a plain run does without.
    from oneaxis.judge.units import kind_of

    timed = experiment.repetitions > 1 or any(kind_of(claim["metric"]) == "repetitions" for claim in claims)

    singles = {axis.name for point in points for axis in point.axes}
    axis = singles.pop() if len(singles) == 1 else None
    name = experiment.name if experiment.name != AD_HOC else (axis or points[-1].axes[0].name).rpartition(".")[2]
    identity = _new_id(root, now, name)
    return Plan(
        id=identity,
        created_at=now.isoformat(timespec="seconds"),
        overrides=list(overrides),
        launcher=list(asked.launcher),
        experiment={**experiment.model_dump(mode="json"), "claims": claims},
        gate=composed[0].config.gate.model_dump(mode="json"),
        axis=axis,
        session=identity if timed else "default",
        snapshot="",
        points=points,
        jobs=job_order([point.name for point in points], experiment.repetitions),
    )


def job_order(points: Sequence[str], repetitions: int) -> list[Job]:
    """The points once per repetition, each second time backwards: what drifts with time then favours none of them."""
    return [
        Job(point, repetition)
        for repetition in range(repetitions)
        for point in (points if repetition % 2 == 0 else reversed(points))
    ]


# --- what the command asks for -------------------------------------------------------------------------------


def read_overrides(conf: Path, overrides: Sequence[str]) -> Asked:
    """Sort the overrides of a command into sweeps, settings for every point, and the launcher's.

    Raises:
        UserError: for what is not an override, sweeps without values, sweeps what is no axis, or is given twice.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if not (conf / "config.yaml").is_file():
        raise UserError(f"{conf}: holds no config.yaml; run oneaxis from the root of an oneaxis project")
    defaults = compose_all(conf).choices if any("glob(" in override for override in overrides) else {}
    held, sweeps, launcher, seen = [], [], [], set()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        for given in dict.fromkeys(overrides):
            try:
                override = parser.parse_overrides([given])[0]
            except HydraException as error:
                raise UserError(f"{given}: not an override; allowed: key=value, +key=value, ~key") from error
            key = override.key_or_group
            if override.is_hydra_override():
                if not (key == "hydra/launcher" or key.startswith("hydra.launcher.")) or override.is_sweep_override():
                    raise UserError(f"{given}: allowed of Hydra's: hydra/launcher=NAME and hydra.launcher.KEY=VALUE")
                launcher.append(given)
                continue
            if key.split(".")[0] == "measure":
                raise UserError(f"{given}: {SET_BY_MULTIRUN}")
            if key in seen:
                raise UserError(f"{given}: {key} is given twice; allowed: once")
            seen.add(key)
            if override.is_sweep_override():
                sweeps.append(Sweep(key, _sweep_values(conf, given, override, defaults.get(key))))
            else:
                held.append(given)
    return Asked(held, sweeps, launcher)


def _sweep_values(conf: Path, given: str, override: Any, default: str | None) -> list[Value]:
    """The values that an override sweeps over, in its order."""
    from hydra.core.override_parser.types import Glob, ValueType

    key = override.key_or_group
    if is_no_axis(key) or key in GROUPS_NOT_AXES:
        raise UserError(f"{given}: {key} is no axis, it says how runs are compared; allowed: one value")
    if not override.is_discrete_sweep():
        raise UserError(f"{given}: has no list of values; allowed: a=1,2, choice(1,2), range(1,3) or glob(*)")
    if getattr(override.value(), "shuffle", False):
        raise UserError(f"{given}: the first value is the baseline; allowed: values in an order of yours, no shuffle()")
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP and not (conf / key).is_dir():
        raise UserError(f"{given}: {key} is no group; allowed: glob() for the choices of a group of conf/")
    texts = [text.lower() if text in ("True", "False") else text for text in override.sweep_string_iterator()]
    if isinstance(override.value(), Glob):
        # The default comes first: with glob() the user gives no order, and the first value is the baseline.
        texts = [text for text in texts if text == default] + [text for text in texts if text != default]
    if not texts:
        options = ", ".join(sorted(path.stem for path in (conf / key).glob("*.yaml")))
        raise UserError(f"{given}: matches nothing; allowed: {options or 'at least one value'}")
    return [Value(f"{override.get_key_element()}={text}", text) for text in texts]


def _resumed(root: Path, multirun: str, asked: Asked, overrides: Sequence[str]) -> Plan:
    """The plan of a multirun that is gone on with: as written, but with this command's launcher if it names one."""
    plan = read_plan(multirun_folder(root, multirun))
    ours = [override for override in overrides if override not in asked.launcher]
    before = [override for override in plan.overrides if override not in plan.launcher]
    if ours and ours != before:
        raise UserError(f"{' '.join(ours)}: {multirun} was planned with {' '.join(before)}; allowed: the same, or none")
    return replace(plan, launcher=list(asked.launcher)) if asked.launcher else plan


# --- the points ----------------------------------------------------------------------------------------------


def _compose(conf: Path, name: str, overrides: Sequence[str]) -> Composed:
    try:
        return compose_all(conf, overrides)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _drafts(conf: Path, asked: Asked, first: Composed) -> list[Draft]:
    """The points to compare, the baseline first."""
    experiment = first.config.experiment
    if experiment.changes:
        if asked.sweeps:
            raise UserError(
                f"{asked.sweeps[0].key}: sweeps beside experiment.changes of {experiment.name}; allowed: one of them"
            )
        return _drafts_of_changes(asked.held, experiment)
    sweeps = list(asked.sweeps)
    if experiment.axis and experiment.axis not in [sweep.key for sweep in sweeps]:
        if not experiment.values:
            raise UserError(f"experiment.axis={experiment.axis}: has no values; allowed: experiment.values=[...], "
                            f"or an override that sweeps it: {experiment.axis}=a,b")  # fmt: skip
        for override in asked.held:
            if override.lstrip("+~").partition("=")[0] == experiment.axis:
                raise UserError(
                    f"{override}: {experiment.axis} is the axis of {experiment.name}, with values "
                    f"{_value_texts(experiment.values)}; allowed: several values, {experiment.axis}=a,b"
                )
        values = [_value(experiment.axis, value) for value in experiment.values]
        sweeps.insert(0, Sweep(experiment.axis, values))
    if sweeps:
        return _drafts_of_sweeps(asked.held, sweeps)
    return _drafts_of_settings(conf, asked.held, combine=experiment.combine)


def _drafts_of_changes(held: Sequence[str], experiment: Any) -> list[Draft]:
    drafts = [Draft("baseline", held)]
    for change in experiment.changes:
        control = _ref_safe(change.control) if change.control else ""
        drafts.append(Draft(_ref_safe(change.name), [*held, *change.overrides], control=control))
    if experiment.combine:
        combined = experiment.combined()
        if len(combined) < 2:
            raise UserError(f"experiment.combine: {experiment.name} has {len(combined)} change besides controls; "
                            "allowed: two at least")  # fmt: skip
        together = [override for change in combined for override in change.overrides]
        parts = [_ref_safe(change.name) for change in combined]
        drafts.append(Draft(_name("+".join(parts)), [*held, *together], parts))
    return drafts


def _drafts_of_sweeps(held: Sequence[str], sweeps: Sequence[Sweep]) -> list[Draft]:
    """Every combination of the values; one that changes several sweeps has as parts those that change one of them."""
    labels = _labels([sweep.key for sweep in sweeps])
    for sweep in sweeps:
        if len(sweep.values) < 2:
            raise UserError(f"{sweep.key}: one value, {sweep.values[0].text}; allowed: two at least, baseline first")

    def name(values: Sequence[Value]) -> str:
        return ",".join(f"{label}={_short(value.text)}" for label, value in zip(labels, values, strict=True))

    number = math.prod(len(sweep.values) for sweep in sweeps)
    if number > MOST_POINTS:
        raise UserError(f"{', '.join(sweep.key for sweep in sweeps)}: {number} points; allowed: at most {MOST_POINTS}")
    names: dict[tuple[int, ...], str] = {}
    chosen: dict[tuple[int, ...], list[Value]] = {}
    for place in itertools.product(*(range(len(sweep.values)) for sweep in sweeps)):
        chosen[place] = [sweep.values[index] for sweep, index in zip(sweeps, place, strict=True)]
        names[place] = _unique(_name(name(chosen[place])), chosen[place], names.values())
    drafts = []
    for place, values in chosen.items():
        changed = [position for position, index in enumerate(place) if index]
        alone = [tuple(place[p] if p == position else 0 for p in range(len(place))) for position in changed]
        parts = [names[one] for one in alone] if len(changed) > 1 else []
        drafts.append(Draft(names[place], [*held, *(value.override for value in values)], parts))
    return drafts


def _drafts_of_settings(conf: Path, held: Sequence[str], *, combine: bool) -> list[Draft]:
    """Where nothing sweeps: the overrides against the committed default; with `combine` also each change alone.

    A group's choice and the settings of its section are one change: `model=hub` is nothing without `model.id`.
    """

    def key(override: str) -> str:
        return override.lstrip("+~").partition("=")[0]

    changing = [o for o in held if not is_no_axis(key(o)) and key(o) not in GROUPS_NOT_AXES]
    if not changing:
        raise UserError("nothing to compare: no override sweeps, and no experiment has an axis; allowed: key=a,b, "
                        "group=a,b, key=value against the default, or experiment=NAME")  # fmt: skip
    rest = [override for override in held if override not in changing]
    groups = [key(override) for override in group_overrides(conf, changing)]
    changes: dict[str, list[str]] = {}
    for override in changing:
        section = key(override).split(".")[0]
        changes.setdefault(section if section in groups else key(override), []).append(override)
    names = [
        _name(",".join(f"{label}={_short(o.partition('=')[2])}" for label, o in zip(labels, change, strict=True)))
        for change in changes.values()
        for labels in [_labels([key(override) for override in change])]
    ]
    if len(changes) == 1:
        default = _compose(conf, "default", rest)
        name = next(iter(changes))
        value = default.choices.get(name, settings(default).get(name, "unset"))
        baseline = _name(f"{_labels([name])[0]}={_short(shown(value))}")
        return [Draft("default" if baseline == names[0] else baseline, rest), Draft(names[0], held)]
    together = Draft(_name(",".join(names)), held, names if combine else [])
    singles = zip(names, changes.values(), strict=True) if combine else []
    return [Draft("default", rest), *(Draft(name, [*rest, *change]) for name, change in singles), together]


def _compare(conf: Path, drafts: Sequence[Draft], composed: Sequence[Composed], *, combine: bool) -> list[Point]:
    """The points with their axes; refused where two are the same, or one is more than one axis away.

    Raises:
        UserError: naming the points and what differs.
    """
    points = [Point(drafts[0].name, "baseline", list(drafts[0].overrides), [], [])]
    for draft, one in zip(drafts[1:], composed[1:], strict=True):
        axes = differences(conf, composed[0], one)
        role = "combination" if len(axes) > 1 else "single"
        parts = list(draft.parts)
        points.append(Point(draft.name, role, list(draft.overrides), axes, parts, draft.control))  # type: ignore[arg-type]
    several = [point for point in points if len(point.axes) > 1]
    if several and not combine:
        raise UserError(_too_many(points[0], several))
    for index, other in itertools.combinations(range(len(points)), 2):
        if same(settings(composed[index]), settings(composed[other])):
            raise UserError(f"{points[other].name}: the same settings as {points[index].name}, nothing changes; "
                            "allowed: values that differ from each other and from the baseline")  # fmt: skip
    for point in points[1:]:
        alone = [part for part in points if part.name in point.parts]
        if len(point.axes) > 1 and not (alone and all(part.role == "single" for part in alone)):
            raise UserError(f"{point.name}: one change that moves {len(point.axes)} axes, {_list_axes(point.axes)}; "
                            f"allowed: each a change of its own{_as_choice(conf, point.axes)}")  # fmt: skip
        if point.parts and len(point.axes) == 1:
            raise UserError(f"{point.name}: differs from the baseline in {point.axes[0].name} alone, which its parts "
                            "move too (a choice may bring the very value that is swept), so it combines nothing; "
                            "allowed: sweeps of different axes, or one sweep")  # fmt: skip
        control = next((other for other in points if other.name == point.control), None)
        if control and [axis.name for axis in control.axes] != [axis.name for axis in point.axes]:
            raise UserError(f"{point.name}: moves {_list_axes(point.axes)} and its control {control.name} "
                            f"{_list_axes(control.axes)}; allowed: a control on the same axis")  # fmt: skip
    return points


def _too_many(baseline: Point, several: Sequence[Point]) -> str:
    point, more = several[0], len(several) - 1
    others = f" ({more} more {'points do' if more > 1 else 'point does'} too)" if more else ""
    hold = " (to hold a setting in every point, sweep the other one: key=a,b)" if baseline.name == "default" else ""
    return (
        f"{point.name} differs from {baseline.name} in {len(point.axes)} axes: {_list_axes(point.axes)}{others}; "
        f"allowed: one axis{hold}, or --combine (experiment.combine=true), which also runs each single change"
    )


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _list_axes(axes: Iterable[Axis]) -> str:
    return "; ".join(
        f"{axis.name} ({shown(axis.before)} -> {shown(axis.after)}"
        + (f", which moves {_few(list(axis.leaves))})" if axis.kind == "group" else ")")
        for axis in axes
    )


def _as_choice(conf: Path, axes: Sequence[Axis]) -> str:
    """The way out where settings of one section only make sense together: a choice of its own."""
    sections = {axis.name.split(".")[0] for axis in axes}
    one = sections.pop() if len(sections) == 1 else ""
    return f", or a file in conf/{one}/ that sets them together" if one and (conf / one).is_dir() else ""


def _check_inputs(root: Path, points: Sequence[Point], composed: Sequence[Composed], launcher: Sequence[str]) -> None:
    from oneaxis.multirun.launch import runs_elsewhere
    from oneaxis.pipeline import check_inputs

    for point, one in zip(points, composed, strict=True):
        try:
            check_inputs(root, one.config, here=not runs_elsewhere(launcher))
        except UserError as error:
            raise UserError(f"{point.name}: {error}") from error


# --- names ---------------------------------------------------------------------------------------------------


def _labels(keys: Sequence[str]) -> list[str]:
    """The shortest ends of dotted keys that tell them apart: `alpha`; `pairs.source.path` and `items.source.path`."""
    for length in range(1, max(key.count(".") for key in keys) + 2):
        ends = [".".join(key.split(".")[-length:]) for key in keys]
        if len(set(ends)) == len(ends):
            break
    return [_safe(end) for end in ends]


def _value(axis: str, value: Any) -> Value:
    """A value of `experiment.values` as an override."""
    from hydra.core.override_parser.types import Quote, QuotedString

    text = shown(value)
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in ("true", "false", "null", "nan", "inf")
    if isinstance(value, str) and not plain:
        text = str(QuotedString(value, Quote.single).with_quotes())
    return Value(f"{axis}={text}", shown(value))


def shown(value: Any) -> str:
    """A value as people write it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(one)}" for key, one in value.items()) + "}"
    return str(value)


def _value_texts(values: Sequence[Any]) -> str:
    return ", ".join(map(shown, values))


def _short(text: str) -> str:
    """A value for a point's name: `[qkv,o]` -> `qkv+o`, `'a b'` -> `a-b`, `[]` -> `empty`."""
    bare = text.strip().strip("'\"")
    return _safe(bare.strip("[]{}").replace(",", "+")) or "empty"


def _safe(text: str) -> str:
    return re.sub(r"^-+(?!\d)|-+$", "", re.sub(r"[^A-Za-z0-9=.,+_-]+", "-", text))


def _name(text: str) -> str:
    """A name that a file and a git ref can have, at most `LONGEST_NAME` long."""
    text = _ref_safe(text)
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 9].rstrip('.')}-{_digest(text)}"


def _ref_safe(text: str) -> str:
    text = re.sub(r"\.{2,}", ".", text).strip(".")
    return re.sub(r"\.lock$", "-lock", text) or "empty"


def _unique(name: str, values: Sequence[Value], taken: Iterable[str]) -> str:
    """`name`, with a digest of its values where it is taken (also in a file system that ignores case)."""
    if name.casefold() in {other.casefold() for other in taken}:
        return f"{name}-{_digest(' '.join(value.override for value in values))}"
    return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _new_id(root: Path, now: datetime, name: str) -> str:
    """`20260131-142530-alpha`, with a number at the end where a multirun of that second and name exists."""
    stem = f"{now:%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:30].strip('.-') or 'multirun'}"
    for number in itertools.count(1):
        identity = stem if number == 1 else f"{stem}-{number}"
        if not (root / MULTIRUN / identity).exists():
            return identity
    raise AssertionError("unreachable")


# --- what the run will reach ---------------------------------------------------------------------------------


def reached_stages(root: Path, config: Config) -> list[str]:
    """The stages that `experiment.targets` needs with these settings, in the order of the DAG; all without targets.

    Read from `dvc.yaml`, since which checkpoint is served, and so which stage makes it, follows from the settings.
    """
    file = root / "dvc.yaml"
    stages = _stages(file, file.stat().st_mtime_ns)
    paths = derived_paths(config.model_dump(mode="json"))
    waiting: list[str] = [*config.experiment.targets] or [stage for stage in STAGE_SECTIONS if stage in stages]
    found: set[str] = set()
    while waiting:
        stage = waiting.pop()
        if stage in found:
            continue
        if stage not in stages:
            raise UserError(f"experiment.targets={stage}: no such stage in dvc.yaml; allowed: {', '.join(stages)}")
        found.add(stage)
        for dependency in stages[stage].get("deps", []):
            path = re.sub(r"\$\{paths\.(\w+)\}", lambda match: paths[match[1]], dependency)
            if path.startswith(f"{ARTIFACTS}/"):
                waiting.append(path.split("/")[1].split(".")[0])
    return [stage for stage in STAGE_SECTIONS if stage in found]


@lru_cache(maxsize=8)
def _stages(path: Path, mtime_ns: int) -> dict[str, Any]:
    """The stages of a dvc.yaml; every point and every check asks for the same file, and it takes long to parse."""
    return dict(YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))["stages"])


def _check_axes_reach_a_stage(points: Sequence[Point], reached: Sequence[Sequence[str]]) -> None:
    for point, stages in zip(points[1:], reached[1:], strict=True):
        running = dict.fromkeys([*reached[0], *stages])
        read = {section for stage in running for section in STAGE_SECTIONS[stage]}
        for axis in point.axes:
            if not read & {leaf.split(".")[0] for leaf in axis.leaves}:
                raise UserError(
                    f"{point.name}: no stage that runs reads {axis.name} ({', '.join(running)}), so nothing would "
                    f"change; allowed: experiment.targets that reach one of "
                    f"{', '.join(_readers(axis)) or 'the stages'}"
                )


def _check_axes_do_something(points: Sequence[Point], configs: Sequence[Config]) -> None:
    before = _idle(configs[0])
    for point, config in zip(points[1:], configs[1:], strict=True):
        # What is idle on one side only is not refused: there it may matter.
        idle = {name: blamed for name, blamed in _idle(config).items() if name in before}
        for axis in point.axes:
            if idle.keys() >= set(axis.leaves):
                raise UserError(f"{point.name}: {axis.name} does nothing with {idle[min(axis.leaves)]}, so all points "
                                "would be the same; allowed: another axis, or that setting changed for all "
                                "points")  # fmt: skip


def _idle(config: Config) -> dict[str, str]:
    return config.quantize.idle() | config.train.idle() | config.extract.idle()


def _readers(axis: Axis) -> list[str]:
    sections = {leaf.split(".")[0] for leaf in axis.leaves}
    return [stage for stage, read in STAGE_SECTIONS.items() if sections & set(read)]


def _check_repetitions(repetitions: int, reached: Sequence[Sequence[str]]) -> None:
    if repetitions > 1 and not any(stage in stages for stages in reached for stage in TIMED_STAGES):
        raise UserError(
            f"experiment.repetitions={repetitions}: nothing that is timed runs ({', '.join(reached[0])}), and the same "
            "inputs give the same result; allowed: 1, or targets that reach serve or sweep"
        )


def _concrete_claims(
    points: Sequence[Point], composed: Sequence[Composed], reached: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """The claims with the metric names of this run.

    Raises:
        UserError: for a metric that a point will not have, as far as its settings tell.
    """
    from oneaxis.judge.units import better_of, share_problem

    claims = []
    for claim in composed[0].config.experiment.claims:
        metric = cell_metric(claim.metric, composed[0].config.load)
        for point, one, stages in zip(points, composed, reached, strict=True):
            _check_metric(claim.metric, metric, point.name, one.config, stages)
        usual = better_of(metric)
        if usual and claim.better != usual and not metric.startswith("train_dpo/"):
            raise UserError(f"experiment.claims: {claim.metric}: better={claim.better}; allowed: {usual}, or a margin "
                            "that may be lost")  # fmt: skip
        if said := share_problem(metric, claim.bar, claim.margin):
            raise UserError(f"experiment.claims: {said}")
        claims.append({**claim.model_dump(mode="json"), "metric": metric})
    names = [claim["metric"] for claim in claims]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"experiment.claims: {name} is claimed twice; allowed: once")
    return claims


def _check_metric(written: str, metric: str, point: str, config: Config, stages: Sequence[str]) -> None:
    stage = metric.split("/")[0]
    where = f"experiment.claims: {written}"
    if stage not in STAGE_SECTIONS:
        raise UserError(f"{where}: no stage is named {stage}; allowed: {', '.join(STAGE_SECTIONS)}")
    if stage not in stages:
        raise UserError(f"{where}: {stage} does not run in {point} ({', '.join(stages)}); allowed: a metric of "
                        "these, or experiment.targets that reach it")  # fmt: skip
    if cell_metric(written, config.load) != metric:
        raise UserError(f"{where}: is {cell_metric(written, config.load)} in {point} and {metric} in the "
                        "baseline, which cannot be compared; allowed: a level that both have")  # fmt: skip
    names = metric_names(config, stage)
    if metric not in names:
        close = get_close_matches(metric, sorted(names), n=3, cutoff=0.5) or sorted(names)[:3]
        raise UserError(f"{where}: {point} has no such metric; allowed: {', '.join(close)}"
                        + (", ..." if len(names) > len(close) else ""))  # fmt: skip
