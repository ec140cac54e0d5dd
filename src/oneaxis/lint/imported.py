"""The child process of `oneaxis lint`: imports a module and writes down its models' schemas and lines.

    python -P -m oneaxis.lint.imported NAME ANSWER

Importing runs the module, which may print, exit, change the folder or read the command line: none of that reaches the
lint. ANSWER is a file that gets JSON: `{"models": [{"where", "schema", "places"}], "errors": [text]}`.
"""

import ast
import enum
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from oneaxis.errors import UserError
from oneaxis.lint.tree import escape

HERE = Path.cwd()
"""Before a module changes it."""


def main() -> None:
    """Write the answer for the name in `sys.argv`, and end at once, whatever threads the module has started."""
    name, target = sys.argv[1], Path(sys.argv[2]).resolve()
    sys.argv = [name]
    answer: dict[str, list[Any]] = {"models": [], "errors": []}
    try:
        for found in models(name):
            answer["errors" if isinstance(found, UserError) else "models"].append(
                str(found) if isinstance(found, UserError) else found
            )
    except UserError as error:
        answer["errors"].append(str(error))
    try:
        target.write_text(json.dumps(answer))
    except OSError as error:
        print(f"oneaxis: {error.strerror}: {target}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def models(name: str) -> Iterator[dict[str, Any] | UserError]:
    """What a name stands for: `where`, `schema`, and `places`, the file and line of each pointer that has its own.

    A model that has no JSON Schema is an error among the others.

    Raises:
        UserError: it cannot be imported, or is no model.
    """
    source, _, wanted = (name, "", "") if ":" not in name or name.endswith(".py") else name.rpartition(":")
    module = _import(source)
    if wanted:
        found: Any = module
        for part in wanted.split("."):
            found = getattr(found, part, None)
        if not _is_model(found):
            raise UserError(f"{name}: {source} has no Pydantic model {wanted!r}; allowed: {_known(module)}")
        chosen = {wanted: found}
    else:
        chosen = _roots(module)
        if not chosen:
            raise UserError(f"{name}: defines no Pydantic model; allowed: a file with one, or a schema")
    for own, model in chosen.items():
        where = f"{source}:{own}"
        try:
            schema = _schema(model, where)
        except UserError as error:
            yield error
            continue
        yield {"where": where, "schema": schema, "places": dict(_places(model, own, schema, module, where))}


def _is_model(each: Any) -> bool:
    return isinstance(each, type) and issubclass(each, BaseModel)


def _roots(module: ModuleType) -> dict[str, type[BaseModel]]:
    """The models that a module defines, by name, without those that are part of another one of it."""
    own: dict[str, type[BaseModel]] = {}
    for name, each in vars(module).items():
        # Pydantic puts `Page[int]` into the module under that name: a part of what uses it.
        if name.isidentifier() and _is_model(each) and each.__module__ == module.__name__ and not _is_template(each):
            own.setdefault(next((known for known, other in own.items() if other is each), name), each)
    names = list(own)
    inside = {name: {found for found in _classes(own[name]) if found is not own[name]} for name in names}
    return {
        name: own[name]
        for index, name in enumerate(names)
        if not any(
            own[name] in inside[other] and (own[other] not in inside[name] or names.index(other) < index)
            for other in names
            if other != name
        )
    }


def _is_template(model: type[BaseModel]) -> bool:
    """Whether a generic model is only there for `Model[int]` to be made of it."""
    return bool(model.__pydantic_generic_metadata__["parameters"]) and any(
        each.__pydantic_generic_metadata__["origin"] is model for each in model.__subclasses__()
    )


def _known(module: ModuleType) -> str:
    names = [
        name
        for name, each in vars(module).items()
        if name.isidentifier() and _is_model(each) and not each.__module__.startswith("pydantic.")
    ]
    return ", ".join(names) or "a module with one"


def _import(source: str) -> ModuleType:
    roots = [HERE, HERE / "src"]
    try:
        if not source.endswith(".py"):
            sys.path[:0] = [str(root) for root in roots if root.is_dir()]
            return importlib.import_module(source)
        path = Path(source).resolve()
        if not path.is_file():
            raise UserError(f"{source}: not found; allowed: a Python file")
        root, parts, is_part = _package(path)
        roots = [
            *([] if is_part else [path.parent]),
            root,
            *(above for above in path.parents if above.name == "src"),
            *roots,
        ]
        sys.path[:0] = dict.fromkeys(str(each) for each in roots if each.is_dir())
        if is_part:
            module = importlib.import_module(".".join(parts))
            if Path(module.__file__ or "").resolve() != path:
                raise UserError(f"{source}: {'.'.join(parts)} is {module.__file__}; allowed: a package of another name")
            return module
        # A name of its own: a file may be called like a module of Python.
        name = f"oneaxis_lint_{path.stem}"
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
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{source}.".startswith(f"{error.name}."):
            raise UserError(
                f"{source}: no such file or module; allowed: a file, a folder, or a module that imports here, as in "
                "package.module:Model"
            ) from error
        # Whatever a user's module does as it is imported, to end or to be interrupted included.
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise UserError(f"{source}: cannot be imported: {said}; allowed: a module that imports here") from error


def _package(path: Path) -> tuple[Path, list[str], bool]:
    """The folder from which a file is imported, its dotted name's parts, and whether it needs to be in its package.

    The folders with an `__init__.py` are its packages; without one, as many as its relative imports go up. A file that
    imports nothing of its package can stand alone, whatever the package itself would import.
    """
    folder, parts = path.parent, [path.stem] if path.stem != "__init__" else []
    try:
        imports = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        # To be told of as it is imported.
        imports = []
    up = max((each.level for each in imports if isinstance(each, ast.ImportFrom)), default=0)
    while folder.name.isidentifier() and ((folder / "__init__.py").is_file() or len(parts) <= up):
        parts.insert(0, folder.name)
        folder = folder.parent
    named = {alias.name for each in imports if isinstance(each, ast.Import) for alias in each.names}
    named |= {each.module or "" for each in imports if isinstance(each, ast.ImportFrom)}
    is_part = up > 0 or (parts[:-1] != [] and any(name.split(".")[0] == parts[0] for name in named))
    return folder, parts, is_part


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


def _places(
    model: type[BaseModel], name: str, schema: dict[str, Any], module: ModuleType, where: str
) -> Iterator[tuple[str, tuple[str, int | None]]]:
    """File and line of a schema's classes and fields, by pointer; of the whole always."""
    yield "", _place(model, None) or _assigned(module, name) or (where, None)
    owners: list[tuple[str, type, Any]] = [("", model, schema)]
    # As pydantic names its definitions.
    named = {re.sub(r"[^a-zA-Z0-9.\-_]", "_", each.__name__): each for each in _classes(model)}
    for key, definition in schema.get("$defs", {}).items():
        if key in named:
            pointer = f"/$defs/{escape(key)}"
            owners.append((pointer, named[key], definition))
            if place := _place(named[key], None):
                yield pointer, place
    for pointer, owner, part in owners:
        for key in part.get("properties", {}) if issubclass(owner, BaseModel) else ():
            if place := _place(owner, _field(owner, key)):
                yield f"{pointer}/properties/{escape(key)}", place


def _field(model: type[BaseModel], key: str) -> str:
    for name, field in model.model_fields.items():
        if key in (field.validation_alias, field.alias):
            return name
    return key


def _place(owner: type, name: str | None) -> tuple[str, int] | None:
    """Where a class, or a field of it, is written; None for one that create_model or a prompt made."""
    try:
        if name is not None:
            for base in owner.__mro__:
                if name in inspect.get_annotations(base) and (place := _place_in(base, name)):
                    return place
        for base in owner.__mro__:
            # `Page[int]` is written where `Page` is; but RootModel and the like are not the user's.
            made = getattr(base, "__pydantic_generic_metadata__", {}).get("origin")
            if made is None:
                return None if base.__module__.startswith("pydantic.") else _place_in(base, None)
    except (OSError, TypeError, SyntaxError):
        pass
    return None


def _place_in(owner: type, name: str | None) -> tuple[str, int] | None:
    # A class that pydantic makes of a generic one has its annotations, and no text.
    if getattr(owner, "__pydantic_generic_metadata__", {}).get("origin") is not None:
        return None
    lines, first = inspect.getsourcelines(owner)
    if name is not None:
        (body,) = ast.parse(textwrap.dedent("".join(lines))).body
        assert isinstance(body, ast.ClassDef)
        for statement in body.body:
            if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", None) == name:
                first += statement.lineno - 1
                break
    return _shown(Path(inspect.getsourcefile(owner) or "")), first


def _assigned(module: ModuleType, name: str) -> tuple[str, int] | None:
    """Where a module says `name = ...`."""
    try:
        path = Path(inspect.getsourcefile(module) or "")
        for statement in ast.parse(path.read_bytes()).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(getattr(target, "id", None) == name for target in targets):
                return _shown(path), statement.lineno
    except (OSError, TypeError, SyntaxError, ValueError):
        pass
    return None


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(HERE))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    main()
