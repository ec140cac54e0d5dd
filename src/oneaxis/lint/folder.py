"""The files that a lint is asked for: those named, once each, and of a folder those that hold a schema.

In a folder nobody has said what a file is. A .json or .yaml file is meant if its data is one of these:

    a schema     `$schema` of json-schema.org; or an object or array with its members; or keys that JSON Schema has and
                 no others, one of which says something about a value (`type`, `enum`, `anyOf`, `$ref`, `$defs`, ...)
    a wrapping   of a schema: `response_format`, a tool; a list of tools, or of schemas
    a request    with a constraint, tools, or a penalty

and if it has `.schema.` in its name, whatever it holds. Others are counted; one that cannot be read is a mistake.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oneaxis.errors import UserError
from oneaxis.lint.document import MAX_BYTES, STDIN, read_data
from oneaxis.lint.finding import Mistake
from oneaxis.lint.requests import is_constrained
from oneaxis.lint.rules import ASSERTIONS
from oneaxis.lint.schema import schemas
from oneaxis.lint.tree import TYPES

SUFFIXES = (".json", ".yaml", ".yml")
SKIPPED = ("node_modules", "__pycache__", "venv", "site-packages")
COMMENTED = ("tsconfig", "jsconfig")
"""Files whose tools let them have comments, which JSON has not."""
WORDS = ASSERTIONS | {
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs",
    "definitions", "title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples", "example",
    "contentEncoding", "contentMediaType", "contentSchema", "nullable", "discriminator", "xml", "externalDocs",
}  # fmt: skip
"""What JSON Schema says, in any draft, and OpenAPI's additions."""


class Files:
    """The files of the command line's words, found as they are asked for."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.mistakes: list[Mistake] = []
        self.num_unread = self.num_passed_over = 0

    def __iter__(self) -> Iterator[str]:
        seen = set()
        for path in self.paths:
            for file in self._below(path) if path != STDIN and os.path.isdir(path) else (path,):
                there = os.path.exists(file)
                known = os.path.realpath(file) if there else file
                if known not in seen:
                    seen.add(known)
                    yield str(Path(file)) if there else file

    def _below(self, path: str) -> Iterator[str]:
        num_found, num_mistakes = 0, len(self.mistakes)

        def unread(error: OSError) -> None:
            name = str(error.filename)
            self.mistakes.append(
                Mistake(name, f"{name}: {error.strerror}; allowed: a folder that can be read, or its schemas by name")
            )

        for folder, below, names in os.walk(path, onerror=unread):
            below[:] = sorted(name for name in below if not name.startswith(".") and name not in SKIPPED)
            for name in sorted(names):
                known = name.lower().endswith((*SUFFIXES, ".jsonl")) and not name.startswith(COMMENTED)
                if known and self._is_meant(file := str(Path(folder, name)), name):
                    num_found += 1
                    yield file
        if not num_found and len(self.mistakes) == num_mistakes:
            self.mistakes.append(
                Mistake(path, f"{path}: no schema in this folder; allowed: *.json or *.yaml that hold one")
            )

    def _is_meant(self, file: str, name: str) -> bool:
        named = ".schema." in name
        try:
            about = os.stat(file)
            # Something like a pipe would be waited for; and megabytes are data.
            other = not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES or name.lower().endswith(".jsonl")
            if named or (not other and is_meant(read_data(Path(file)))):
                return True
            self.num_passed_over += 1
        except OSError as error:
            self.mistakes.append(Mistake(file, f"{file}: {error.strerror}; allowed: a file that can be read"))
            self.num_unread += 1
        except UserError as error:
            self.mistakes.append(Mistake(file, str(error)))
            self.num_unread += 1
        except RecursionError:
            # Deeper than any schema that can be linted.
            self.num_passed_over += 1
        return False


def is_meant(data: Any) -> bool:
    """Whether data is a schema, holds one as OpenAI's wrappings do, or is a request with one or with a penalty."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(each, dict) and is_meant(each) for each in data)
    if not isinstance(data, dict):
        return False
    if is_constrained(data):
        return True
    said = data.get("type") in ("json_schema", "function")
    return any(_is_schema(schema) or (said and pointer) for pointer, schema in schemas(data))


def _is_schema(data: Any) -> bool:
    if not isinstance(data, dict):
        return False
    if "json-schema.org" in str(data.get("$schema", "")):
        return True
    members = {"object": ("properties", "additionalProperties"), "array": ("items", "prefixItems")}
    if any(data.get("type") == kind and set(keys) & set(data) for kind, keys in members.items()):
        return True
    return _says_only_that(data) and any(_tells(key, value) for key, value in data.items())


def _says_only_that(data: Any) -> bool:
    return isinstance(data, bool) or (
        isinstance(data, dict) and all(key in WORDS or key.startswith("x-") for key in data)
    )


def _tells(key: str, value: Any) -> bool:
    """Whether a keyword of JSON Schema is used as one: `items` and `type` are words of much other data."""
    if key == "type":
        said = value if isinstance(value, list) else [value]
        return bool(said) and all(each in TYPES for each in said)
    if key == "enum":
        return isinstance(value, list)
    if key == "$ref":
        return isinstance(value, str)
    if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return isinstance(value, list) and bool(value) and all(_says_only_that(each) for each in value)
    if key in ("properties", "patternProperties", "$defs", "definitions"):
        return isinstance(value, dict) and any(each != {} and _says_only_that(each) for each in value.values())
    return key in ("items", "additionalProperties", "not") and _is_schema(value)
