"""Lint a JSON Schema, or put one into an order in which a model can think first. The library's door.

from oneaxis.lint.schema import lint_schema
for finding in lint_schema(json.loads(text)):
    print(finding.code, finding.pointer, finding.message)
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from oneaxis.errors import UserError
from oneaxis.lint.engines import engine_rules
from oneaxis.lint.finding import CODES, Finding
from oneaxis.lint.order import roles
from oneaxis.lint.rules import ASSERTIONS, rules
from oneaxis.lint.tokens import Tokenizer
from oneaxis.lint.tree import Node, Schema, escape, everywhere, properties

IGNORE = re.compile(r"oneaxis:\s*ignore\s+((?:OV\d*\b[,\s]*)+)")
"""In a `$comment`: codes, or their beginnings, that are accepted in this schema and below it."""
MEANT = re.compile(r"\b(?:[O0]V\w+|[o0]v\w*\d\w*)")
"""What looks like a code, behind them."""


def lint_schema(schema: Any, where: str = "schema", tokenizer: Tokenizer | None = None) -> list[Finding]:
    """All findings of a schema, sorted by code and then by place.

    Args:
        schema: the JSON Schema as data; its own order of keys counts.
        where: names it in errors.
        tokenizer: whose tokens OV006 compares; without one a stand-in does.

    Raises:
        UserError: it is no JSON Schema; a reference leads nowhere or in a circle; a `$comment` ignores no code.
    """
    check(schema, where)
    tree = Schema(schema, where)
    nodes = list(everywhere(tree))
    accepted = [(node.pointer, prefixes) for node in nodes if (prefixes := _ignored(node, where))]
    place = {node.pointer: index for index, node in enumerate(nodes)}
    found = dict.fromkeys([*rules(tree, tokenizer), *engine_rules(tree)])
    kept = [
        finding
        for finding in found
        if not any(
            (finding.pointer + "/").startswith(pointer + "/") and finding.code.startswith(prefixes)
            for pointer, prefixes in accepted
        )
    ]
    return sorted(kept, key=lambda finding: (finding.code, place.get(_nearest(finding.pointer, place), 0)))


def _nearest(pointer: str, place: Mapping[str, int]) -> str:
    while pointer not in place:
        pointer = pointer.rpartition("/")[0]
    return pointer


def _ignored(node: Node, where: str) -> tuple[str, ...]:
    comment = node.get("$comment")
    match = IGNORE.search(comment) if isinstance(comment, str) else None
    if match is None:
        if isinstance(comment, str) and "oneaxis: ignore" in comment:
            raise UserError(f"{where}: {node.pointer}/$comment: ignores no code; allowed: oneaxis: ignore OV001, ...")
        return ()
    # A word that was to be a code, and is none, would leave its finding without a word of why.
    prefixes = tuple(match[1].replace(",", " ").split()) + tuple(MEANT.findall(comment[match.end() :]))
    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in CODES):
            raise UserError(f"{where}: {node.pointer}/$comment: {prefix} is no code; allowed: {', '.join(CODES)}")
    return prefixes


def check(schema: Any, where: str) -> None:
    """Whether this is a JSON Schema, by the meta-schema that it names (2020-12 if it names none).

    Raises:
        UserError: it is not.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        shown = json.dumps(schema)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        raise UserError(f"{where}: {shown} is no JSON Schema; allowed: an object with `type`, `anyOf`, ...")
    if not set(schema) & (ASSERTIONS | {"$defs", "definitions"}):
        shown = ", ".join(list(schema)[:4]) or "nothing"
        raise UserError(
            f"{where}: no JSON Schema: it says {shown}; allowed: `type`, `properties`, `$ref`, `anyOf`, ..."
        )
    dialect = schema.get("$schema", "")
    if not isinstance(dialect, str):
        raise UserError(f"{where}: /$schema: {str(dialect)[:40]!r}; allowed: the address of a dialect, as a text")
    try:
        # Patterns are ECMA's, which Python's `re` cannot judge: no format is checked.
        validator_for(schema, default=Draft202012Validator).check_schema(schema, format_checker=FormatChecker(()))
    except SchemaError as error:
        at = "".join(f"/{escape(str(part))}" for part in error.absolute_path)
        message = error.message if len(error.message) < 120 else error.message[:117] + "..."
        raise UserError(f"{where}: {at or '/'}: {message}; allowed: what JSON Schema has") from error
    except ValueError as error:
        # Of urllib, to which jsonschema gives the address.
        raise UserError(f"{where}: /$schema: {dialect[:80]!r}: {error}; allowed: the address of a dialect") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep; allowed: what jsonschema can check") from error


def schemas(document: Any) -> Iterator[tuple[str, Any]]:
    """The schemas of a document, with their pointers: itself, or what OpenAI's wrappings hold.

    Known are `response_format` (`{"type": "json_schema", "json_schema": {...}}`), its inside (`{"name", "schema"}`),
    tools (`{"type": "function", "function": {"parameters"}}`), and a list of tools.
    """
    if isinstance(document, list):
        for index, each in enumerate(document):
            for pointer, schema in schemas(each):
                yield f"/{index}{pointer}", schema
    elif (isinstance(document, dict) and document.get("type") in ("json_schema", "function")) or _wrapped(document):
        for key in ("json_schema", "function", "schema", "parameters", "input_schema"):
            if isinstance(document.get(key), dict):
                for pointer, schema in schemas(document[key]):
                    yield f"/{key}{pointer}", schema
                return
    else:
        yield "", document


def _wrapped(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("name"), str)
        and any(isinstance(document.get(key), dict) for key in ("schema", "parameters", "input_schema"))
        and not isinstance(document.get("type"), str | list)
        and "properties" not in document
    )


def orders(schema: Any, where: str = "schema") -> dict[str, list[str]]:
    """What `--fix` would change: by the pointer of a `properties` object, its keys in a better order.

    No value, key or constraint changes, so the same answers are valid before and after.
    """
    tree = Schema(schema, where)
    found = {}
    for node in everywhere(tree):
        members = properties(node)
        better = roles(tree, members).mended() if members else []
        if better != list(members):
            found[f"{node.pointer}/properties"] = better
    return found


def under(findings: list[Finding], pointer: str) -> list[Finding]:
    """The same findings, of a schema that stands at a pointer of its document.

    Of a tool's arguments without OV001 and OV007: a model chooses them, none has to be found in a source.
    """
    chosen = pointer.endswith(("/parameters", "/input_schema"))
    return [
        replace(finding, pointer=pointer + finding.pointer)
        for finding in findings
        if not (chosen and finding.code in ("OV001", "OV007"))
    ]
