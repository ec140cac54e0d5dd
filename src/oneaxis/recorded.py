"""What a run wrote as JSON, read back and held to its kind: manifests, metrics and other objects.

Whoever reads a record that a person may have cut, copied or edited reads it here: a wrong kind is one line that names
the file, and nothing later has to ask again. `artifacts` writes; the stages depend on it, and not on this.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

from oneaxis.artifacts import read_json
from oneaxis.errors import UserError

Kind = Any
"""What a value is: a type; `NUMBER`; an object by the kinds of its members (a mapping); rows of a kind (a list of it);
or any of several (a tuple)."""
Kinds = Mapping[str, Kind]
"""Member -> what it is, where it is there."""


class Whole(dict[str, Kind]):
    """Kinds of members that all have to be there."""


NUMBER = float
"""Whole or not; true and false are none."""
JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number",
                               float: "a number", NoneType: "null"}  # fmt: skip
LONGEST_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def read_object(path: Path, members: Kinds = MappingProxyType({})) -> dict[str, Any]:
    """A JSON file that holds an object.

    Args:
        members: what some of its members are, where they are there.

    Raises:
        UserError: when it is missing, broken or something else, naming the file.
    """
    held = read_json(path)
    if not isinstance(held, dict):
        raise UserError(f"{path}: holds {shown(held)}; allowed: an object")
    _check_members(path, held, members, "")
    return held


def _check_members(path: Path, held: Mapping[str, Any], members: Kinds, at: str) -> None:
    for name, kind in members.items():
        if name in held:
            _check(path, held[name], kind, f"{at}{name}")
        elif isinstance(members, Whole):
            raise UserError(f"{path}: {at}{name} is missing; allowed: {_names(kind)}")


def _check(path: Path, value: Any, kind: Kind, where: str) -> None:
    """Raise a UserError unless the value is of the kind."""
    for one in kind if isinstance(kind, tuple) else (kind,):
        if isinstance(one, Mapping):
            if isinstance(value, dict):
                return _check_members(path, value, one, f"{where}.")
        elif isinstance(one, list):
            if isinstance(value, list):
                for place, each in enumerate(value):
                    _check(path, each, one[0], f"{where}.{place}")
                return None
        elif _is(value, one):
            return None
    raise UserError(f"{path}: {where} is {shown(value)}; allowed: {_names(kind)}")


def _is(value: Any, kind: type) -> bool:
    """Whether a value is of a plain type; true and false are no numbers."""
    return isinstance(value, int | float if kind is NUMBER else kind) and (kind is bool or not isinstance(value, bool))


def read_rows(path: Path, members: Kinds) -> list[dict[str, Any]]:
    """A JSON file that holds a list of objects.

    Args:
        members: what each of them has.

    Raises:
        UserError: when it is missing, broken or something else, naming the file.
    """
    held = read_json(path)
    if not isinstance(held, list):
        raise UserError(f"{path}: holds {shown(held)}; allowed: a list of objects")
    for row in held:
        if not isinstance(row, dict):
            raise UserError(f"{path}: {shown(row)} is no entry of it; allowed: an object with {', '.join(members)}")
        for name, kind in members.items():
            if not _is(row.get(name), kind):
                raise UserError(f"{path}: {name} is {shown(row.get(name))} in an entry; allowed: {_names(kind)}")
    return held


def _names(kind: Kind) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    held = [dict if isinstance(one, Mapping) else list if isinstance(one, list) else one for one in kinds]
    return " or ".join(JSON_NAMES[one] for one in held)


def shown(value: Any) -> str:
    """A value of a JSON file as it stands there, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def read_manifest(path: Path) -> dict[str, Any]:
    """What `write_manifest` wrote: `params`, `notes` and `files` are objects where they are there.

    Raises:
        UserError: when it is missing, broken or something else, naming the file.
    """
    held = read_object(path, {"params": dict, "notes": dict, "files": dict})
    for name, facts in held.get("files", {}).items():
        if not isinstance(facts, dict) or not isinstance(facts.get("sha256"), str):
            raise UserError(f"{path}: files.{name} is {shown(facts)}; allowed: an object with bytes and sha256")
    return held


def check_sections(path: Path, params: Mapping[str, Any]) -> None:
    """Settings by section are objects, but for the seed.

    Args:
        path: the file that holds them.

    Raises:
        UserError: for a section that is none.
    """
    for name, section in params.items():
        if name != "seed" and not isinstance(section, dict):
            raise UserError(f"{path}: section {name} is {shown(section)}; allowed: an object of settings")


def read_metrics(path: Path) -> dict[str, float]:
    """A stage's metrics: finite numbers by name.

    Raises:
        UserError: when the file is missing or broken, or a value is no finite number.
    """
    held = read_object(path)
    for name, value in held.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise UserError(f"{path}: {name} is {shown(value)}; allowed: a finite number")
    return held
