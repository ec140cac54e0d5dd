"""Pydantic models: their JSON Schema, and the line of the class or field that each part of it comes from.

A model is imported, which runs its module. It is named as `package.module:Model`, or by a .py file: all models that the
file defines and that are not part of another one there, or `file.py:Model`.
"""

import ast
import contextlib
import enum
import importlib
import importlib.util
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from oneaxis.errors import UserError
from oneaxis.lint.tree import unescape


@dataclass(frozen=True)
class Model:
    """A model, and its schema as `model_json_schema()` has it: what a client sends."""

    where: str
    type: type[BaseModel]
    schema: dict[str, Any]

    def place(self, pointer: str) -> tuple[str, int | None]:
        """File and line of a part of the schema: of its field if it is known, or else of its class."""
        parts = [unescape(part) for part in pointer.split("/")[1:]]
        owner: type = self.type
        if parts[:1] == ["$defs"] and len(parts) > 1:
            owner = next((each for each in _classes(self.type) if each.__name__ == parts[1]), self.type)
            parts = parts[2:]
        try:
            if issubclass(owner, BaseModel) and parts[:1] == ["properties"] and len(parts) > 1:
                name = _field(owner, parts[1])
                for base in owner.__mro__:
                    if name in inspect.get_annotations(base):
                        return _file(base), _line(base, name)
            return _file(owner), _line(owner, None)
        except (OSError, TypeError, SyntaxError):
            # Made by create_model, or typed into a prompt: there is no source.
            return self.where, None


def is_model_name(path: str) -> bool:
    """Whether a word of the command line names models rather than a schema file or a folder."""
    return path.endswith(".py") or (":" in path and not Path(path).exists())


def read_models(name: str) -> list[Model]:
    """The models that a name stands for.

    Raises:
        UserError: it cannot be imported, is no model, or has no JSON Schema.
    """
    source, _, wanted = (name, "", "") if name.endswith(".py") else name.rpartition(":")
    module = _import(source)
    if wanted:
        found: Any = module
        for part in wanted.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            raise UserError(f"{name}: {source} has no Pydantic model {wanted!r}; allowed: {_known(module)}")
        return [Model(name, found, _schema(found, name))]
    own = [each for each in vars(module).values() if _is_own(each, module)]
    own = list({id(each): each for each in own}.values())
    if not own:
        raise UserError(f"{name}: defines no Pydantic model; allowed: a file with one, or a schema")
    inside = {each: {found for found in _classes(each) if found is not each} for each in own}
    roots = [
        each
        for index, each in enumerate(own)
        if not any(
            each in inside[other] and (other not in inside[each] or own.index(other) < index)
            for other in own
            if other is not each
        )
    ]
    return [Model(f"{name}:{each.__name__}", each, _schema(each, f"{name}:{each.__name__}")) for each in roots]


def _is_own(each: Any, module: ModuleType) -> bool:
    return isinstance(each, type) and issubclass(each, BaseModel) and each.__module__ == module.__name__


def _known(module: ModuleType) -> str:
    names = [
        name
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, BaseModel) and each is not BaseModel
    ]
    return ", ".join(names) or "a module with one"


def _import(source: str) -> ModuleType:
    before = list(sys.path)
    try:
        # What a module prints as it is imported is not part of our answer.
        with contextlib.redirect_stdout(sys.stderr):
            if not source.endswith(".py"):
                sys.path.insert(0, str(Path.cwd()))
                return importlib.import_module(source)
            path = Path(source).resolve()
            if not path.is_file():
                raise UserError(f"{source}: not found; allowed: a Python file")
            sys.path.insert(0, str(path.parent))
            name = f"oneaxis_lint_{path.stem}_{abs(hash(path))}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # Pydantic looks up forward references here.
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # Whatever a user's module does as it is imported.
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise UserError(f"{source}: cannot be imported: {said}; allowed: a module that imports here") from error
    finally:
        sys.path[:] = before


def _schema(model: type[BaseModel], where: str) -> dict[str, Any]:
    try:
        return model.model_json_schema()
    except (PydanticUserError, NameError, RecursionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{where}: has no JSON Schema: {lines[0]}; allowed: fields that JSON can hold") from error


def _classes(model: type[BaseModel]) -> Iterator[type]:
    """A model and the models and enums in its fields."""
    seen: list[Any] = []
    stack: list[Any] = [model]
    while stack:
        each = stack.pop()
        if any(each is other for other in seen):
            continue
        seen.append(each)
        if isinstance(each, type) and issubclass(each, enum.Enum):
            yield each
        elif isinstance(each, type) and issubclass(each, BaseModel):
            yield each
            stack += [field.annotation for field in each.model_fields.values()]
        else:
            stack += typing.get_args(each)
            # `type Name = ...` of Python 3.12.
            if hasattr(each, "__value__"):
                stack.append(each.__value__)


def _field(model: type[BaseModel], key: str) -> str:
    for name, field in model.model_fields.items():
        if key in (field.validation_alias, field.alias):
            return name
    return key


def _file(owner: type) -> str:
    found = Path(inspect.getsourcefile(owner) or "")
    try:
        return str(found.relative_to(Path.cwd()))
    except ValueError:
        return str(found)


def _line(owner: type, name: str | None) -> int:
    lines, first = inspect.getsourcelines(owner)
    if name is not None:
        (body,) = ast.parse(textwrap.dedent("".join(lines))).body
        assert isinstance(body, ast.ClassDef)
        for statement in body.body:
            if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", None) == name:
                return first + statement.lineno - 1
    return first
