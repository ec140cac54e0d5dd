"""The difference of two composed configurations as a set of axes: what the rule of one axis is checked by.

An *axis* is what differs between two runs in one respect: a group's choice with every setting that it moves (a
`profile` may move settings of other sections, and other groups' choices), or a single setting. How runs are compared
and named (`experiment`, `gate`, `measure`, `report.title`) is no axis. A list is one setting; the keys of a free
mapping (`serve.engine_args`) are a setting each. A setting that is written as a reference to another (`${key}`) follows
that one and is no axis of its own.

A group's choice explains a setting when both sides are as the choices alone, without single keys, have them; or when
the setting exists on one side only, because the choice brings it (`quantize=none` has no alpha); or when the choice is
not valid without it (`data=mine` needs a path). So
`quantize=none` against `quantize=w8a8_int8_dynamic quantize.smooth.alpha=0.7` is one axis, and
`quantize=w8a8_int8_dynamic` against `quantize=w8a8_int8_static quantize.smooth.alpha=0.7` is two.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneaxis.config.compose import Composed, compose, compose_unresolved
from oneaxis.errors import UserError
from oneaxis.multirun.record import Axis

ABSENT = "absent"
"""Stands in an axis for the value of a setting that one side does not have, as in a verdict."""

NOT_AXES = ("measure", "report.title", "experiment", "gate")
GROUPS_NOT_AXES = ("experiment", "gate", "measure")

Leaves = dict[str, Any]


def differences(conf_dir: Path, before: Composed, after: Composed) -> list[Axis]:
    """The axes in which `after` differs from `before`: groups first, then single settings, each in the schema's order.

    Their `leaves` together are exactly the settings that differ, each in one axis.
    """
    old, new = settings(before), settings(after)
    moved = [key for key in {**old, **new} if not same(old.get(key, ABSENT), new.get(key, ABSENT))]
    if not moved:
        return []
    raw_old, raw_new = flatten(before.unresolved), flatten(after.unresolved)
    follows = [key for key in moved if _references(raw_old.get(key)) and raw_old.get(key) == raw_new.get(key)]
    own = [key for key in moved if key not in follows]

    owners = _explained(conf_dir, before, after, own, raw_old, raw_new)
    axes: dict[str, dict[str, list[Any]]] = {}
    for key in own:
        axes.setdefault(owners.get(key, key), {})[key] = [old.get(key, ABSENT), new.get(key, ABSENT)]
    for key in follows:
        targets = _references(raw_old[key])
        owner = next((name for name, leaves in axes.items() if targets & set(leaves)), next(iter(axes), key))
        axes.setdefault(owner, {})[key] = [old.get(key, ABSENT), new.get(key, ABSENT)]

    groups = [name for name in {**before.choices, **after.choices} if name in set(owners.values())]
    found = [
        Axis(name, "group", before.choices.get(name), after.choices.get(name), axes.pop(name))
        for name in sorted(groups, key=list(axes).index)
    ]
    return found + [Axis(name, "key", leaves[name][0], leaves[name][1], leaves) for name, leaves in axes.items()]


def settings(composed: Composed) -> Leaves:
    """Every setting that can be an axis: dotted key -> value, in the schema's order."""
    flat = flatten(composed.config.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if not is_no_axis(key)}


def is_no_axis(key: str) -> bool:
    """Whether a key or group says how runs are compared or named, not what they do."""
    return any(key == name or key.startswith(f"{name}.") for name in NOT_AXES)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Leaves:
    """Nested mappings as dotted keys. Lists stay whole; an empty mapping has no key."""
    flat: Leaves = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def same(one: Any, other: Any) -> bool:
    """Equality that tells `true` from 1, and not 1 from 1.0, inside lists too."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(isinstance(one, bool) == isinstance(other, bool) and one == other)


def _references(value: Any) -> set[str]:
    return set(re.findall(r"\$\{([\w.]+)\}", value)) if isinstance(value, str) else set()


def _explained(
    conf_dir: Path, before: Composed, after: Composed, own: Sequence[str], raw_old: Leaves, raw_new: Leaves
) -> dict[str, str]:
    """The settings that the changed choices explain: dotted key -> group."""
    changed = [
        group
        for group in {**before.choices, **after.choices}
        if before.choices.get(group) != after.choices.get(group) and group not in GROUPS_NOT_AXES
    ]
    if not changed:
        return {}
    chosen = group_overrides(conf_dir, before.overrides)
    plain = flatten(compose_unresolved(conf_dir, chosen)[0])
    swaps = {group: f"{group}={choice}" if (choice := after.choices.get(group)) else f"~{group}" for group in changed}
    swapped, brought = {}, {}
    for group in changed:
        values, brought[group] = compose_unresolved(conf_dir, [*chosen, swaps[group]])
        swapped[group] = flatten(values)
    # A choice that another group's choice brings with it (`profile=tiny` chooses the model) is no axis of its own.
    tops = [
        group
        for group in changed
        if not any(other != group and brought[other].get(group) == after.choices.get(group) for other in changed)
    ]
    # Not the groups of `after`'s own overrides: an experiment's file sets keys too, which no choice explains.
    target = flatten(compose_unresolved(conf_dir, [*chosen, *(swaps[group] for group in tops)])[0])
    owners = {}
    for key in own:
        was, is_now = plain.get(key, ABSENT), target.get(key, ABSENT)
        as_chosen = same(raw_old.get(key, ABSENT), was) and same(raw_new.get(key, ABSENT), is_now)
        brought_along = (was == ABSENT and key not in raw_old and is_now != ABSENT) or (
            is_now == ABSENT and key not in raw_new and was != ABSENT
        )
        if as_chosen or brought_along:
            moves = [group for group in tops if not same(swapped[group].get(key, ABSENT), was)]
            fits = [group for group in moves if same(swapped[group].get(key, ABSENT), is_now)]
            owners[key] = (fits + moves + tops)[0]
    for group in tops:
        for key in own:
            if (
                key not in owners
                and key.startswith(f"{group}.")
                and (_needs(conf_dir, before, key) or _needs(conf_dir, after, key))
            ):
                owners[key] = group
    return owners


def _needs(conf_dir: Path, composed: Composed, key: str) -> bool:
    """Whether the settings are valid only with their override of `key` (`data=mine` needs its path)."""
    sets_it = [
        override
        for override in composed.overrides
        if f"{key}.".startswith(override.lstrip("+~").partition("=")[0] + ".")
        and override not in group_overrides(conf_dir, composed.overrides)
    ]
    if not sets_it:
        return False
    rest = [override for override in composed.overrides if override not in sets_it]
    try:
        compose(conf_dir, rest)
    except UserError:
        return True
    return False


def group_overrides(conf_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Those overrides that choose, add or remove a group."""
    return [o for o in overrides if (conf_dir / re.split(r"[=@]", o.lstrip("+~"))[0].strip()).is_dir()]
