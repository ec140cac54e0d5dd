"""`oneaxis lint PATH...`: what a schema, a Pydantic model or a request makes a model do wrong, for a person or for CI.

    oneaxis lint schema.json answer.yaml schemas/    JSON Schemas; of a folder, the files that look like one
    oneaxis lint app.models:Answer models.py         Pydantic models; their module is imported
    oneaxis lint requests.jsonl                      request bodies, one a line: penalties, and the schemas in them
    oneaxis lint --fix schema.json                   put reasoning before its answer, and confidence after it
    oneaxis lint --format github --ignore OV007 .    annotations on a pull request
    oneaxis lint --list                              every code in a line

A `$comment` "oneaxis: ignore OV001" in a schema accepts a finding there and below. Exit codes: 0 nothing found, 1
findings, 2 something could not be read.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneaxis.errors import UserError

if TYPE_CHECKING:
    from oneaxis.lint.finding import Finding
    from oneaxis.lint.tokens import Tokenizer

SUFFIXES = (".json", ".yaml", ".yml")
SKIPPED = ("node_modules", "__pycache__", "venv", "site-packages")


def add_lint_parser(commands: Any) -> None:
    """Add `lint` to the command line's parsers."""
    parser = commands.add_parser(
        "lint",
        help="schemas, Pydantic models and requests: what makes a model answer wrongly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="file, folder, module:Model, file.py, or *.jsonl")
    parser.add_argument(
        "--fix", action="store_true", help="reorder properties where that mends it (JSON and YAML files)"
    )
    parser.add_argument("--format", choices=["text", "json", "github"], default="text")
    parser.add_argument("--select", action="append", default=[], metavar="CODES", help="only these, or what begins so")
    parser.add_argument("--ignore", action="append", default=[], metavar="CODES", help="not these, or what begins so")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="a local folder with tokenizer.json, for OV006")
    parser.add_argument("--generation-config", type=Path, metavar="PATH",
                        help="generation_config.json of the served model, or its folder: penalties that a request "
                        "inherits")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print every code and stop")
    parser.set_defaults(action=_run)


def _run(options: argparse.Namespace) -> int:
    from oneaxis.lint.finding import CODES, chosen
    from oneaxis.lint.tokens import Tokenizer

    if options.list:
        for code, each in CODES.items():
            print(f"{code}  {each.name:24} {each.severity:8} {each.summary}")
        return 0
    if not options.paths:
        raise UserError("lint: say what; allowed: files, folders, module:Model, file.py, requests.jsonl, or --list")
    select, ignore = (
        [code for word in words for code in word.split(",")] for words in (options.select, options.ignore)
    )  # fmt: skip
    chosen([], select, ignore)
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    defaults = _defaults(options.generation_config)
    found: list[Finding] = []
    mistakes: list[UserError] = []
    num_files = num_fixed = 0
    for path in _files(options.paths, mistakes):
        num_files += 1
        try:
            if options.fix:
                num_fixed += _fix(path, select, ignore)
            found += chosen(lint_path(path, tokenizer, defaults, mistakes), select, ignore)
        except UserError as error:
            mistakes.append(error)
    _show(found, options.format, num_files, num_fixed)
    for mistake in mistakes:
        print(f"oneaxis: {mistake}", file=sys.stderr)
    return 2 if mistakes else 1 if found else 0


def lint_path(
    path: str,
    tokenizer: "Tokenizer | None" = None,
    defaults: dict[str, Any] | None = None,
    mistakes: "list[UserError] | None" = None,
) -> "list[Finding]":
    """All findings of one file or model, with file and line, sorted by place.

    Args:
        path: a schema file, a .jsonl file of requests, `module:Model` or a .py file.
        tokenizer: whose tokens OV006 compares.
        defaults: sampling settings that a server fills in where a request says nothing.
        mistakes: gets what is wrong with one of several models; the others are linted all the same.

    Raises:
        UserError: it cannot be read, or is not what its name says.
    """
    from oneaxis.lint.models import is_model_name

    if is_model_name(path):
        found = _models(path, tokenizer, [] if mistakes is None else mistakes)
    elif path.lower().endswith(".jsonl"):
        found = _requests(Path(path), tokenizer, defaults)
    else:
        found = _document(Path(path), tokenizer)
    return sorted(found, key=lambda finding: (finding.file, finding.line or 0, finding.code))


def _document(path: Path, tokenizer: "Tokenizer | None") -> "Iterator[Finding]":
    from oneaxis.lint.document import read_document
    from oneaxis.lint.schema import lint_schema, schemas, under

    document = read_document(path)
    for pointer, schema in schemas(document.data):
        where = f"{path}:{pointer}" if pointer else str(path)
        for finding in under(lint_schema(schema, where, tokenizer), pointer):
            yield replace(finding, file=str(path), line=document.line(finding.pointer))


def _models(name: str, tokenizer: "Tokenizer | None", mistakes: list[UserError]) -> "Iterator[Finding]":
    from oneaxis.lint.models import read_models
    from oneaxis.lint.schema import lint_schema

    models, errors = read_models(name)
    mistakes += errors
    for model in models:
        for finding in lint_schema(model.schema, model.where, tokenizer):
            file, line = model.place(finding.pointer)
            # The property in its class is what a person edits: no tool rewrites it.
            yield replace(finding, file=file, line=line, fixable=False)


def _requests(path: Path, tokenizer: "Tokenizer | None", defaults: dict[str, Any] | None) -> "Iterator[Finding]":
    from oneaxis.lint.document import MAX_BYTES, load_json
    from oneaxis.lint.requests import guard, request_of, schemas_of
    from oneaxis.lint.schema import lint_schema, under

    seen: set[str] = set()
    number = 0
    try:
        with path.open("rb") as lines:
            for index, line in enumerate(iter(lambda: lines.readline(MAX_BYTES + 1), b""), 1):
                where = f"{path}:{index}"
                if not line.strip():
                    continue
                if len(line) > MAX_BYTES:
                    raise UserError(
                        f"{where}: {len(line) / 1e6:.0f} MB; allowed: up to {MAX_BYTES / 1e6:.0f} MB a line"
                    )
                number += 1
                try:
                    text = line.decode("utf-8-sig").strip()
                except UnicodeDecodeError as error:
                    raise UserError(f"{where}: not UTF-8; allowed: UTF-8 text") from error
                base, request = request_of(load_json(text, where), where)
                try:
                    found = guard(request, defaults)
                    inside = list(schemas_of(request))
                except UserError as error:
                    raise UserError(f"{where}: {error}") from error
                for pointer, schema in inside:
                    # A schema that many requests carry is told of once, where it comes first.
                    key = json.dumps(schema)
                    if key not in seen:
                        seen.add(key)
                        found += under(lint_schema(schema, f"{where}: {pointer}", tokenizer), pointer)
                for finding in under(found, base):
                    yield replace(finding, file=str(path), line=index, fixable=False)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; allowed: a file that can be read") from error
    if number == 0:
        raise UserError(f"{path}: no request in it; allowed: one JSON object a line")


def _fix(path: str, select: Sequence[str], ignore: Sequence[str]) -> int:
    """Reorder a file's properties where OV004 or OV005 asks for it; the number of objects that changed."""
    from oneaxis.lint.document import read_document, reorder, write_text
    from oneaxis.lint.finding import chosen
    from oneaxis.lint.models import is_model_name
    from oneaxis.lint.schema import lint_schema, orders, schemas

    if is_model_name(path) or path.lower().endswith(".jsonl"):
        return 0
    document = read_document(Path(path))
    wanted: dict[str, list[str]] = {}
    for pointer, schema in schemas(document.data):
        where = f"{path}:{pointer}" if pointer else path
        found = [finding for finding in chosen(lint_schema(schema, where), select, ignore) if finding.fixable]
        objects = {finding.pointer.rpartition("/")[0] for finding in found}
        wanted |= {pointer + at: order for at, order in orders(schema, path).items() if at in objects}
    if not wanted:
        return 0
    fixed = reorder(document, wanted)
    if fixed is None:
        raise UserError(f"{path}: its text cannot be rearranged (flow style, or an alias before its anchor); allowed: "
                        "block style, or by hand")  # fmt: skip
    file = Path(path)
    write_text(file, fixed.text, file.read_bytes())
    return len(wanted)


def _defaults(path: Path | None) -> dict[str, Any] | None:
    from oneaxis.lint.document import load_json, read_text

    if path is None:
        return None
    file = path / "generation_config.json" if path.is_dir() else path
    found = load_json(read_text(file), str(file))
    if not isinstance(found, dict):
        raise UserError(f"{file}: no object; allowed: a generation_config.json")
    return found


def _files(paths: Sequence[str], mistakes: list[UserError]) -> Iterator[str]:
    """The files that are meant: those named, and of a folder those that look like a schema."""
    for path in paths:
        if not Path(path).is_dir():
            yield path
            continue
        found = 0
        for folder, below, names in os.walk(path):
            below[:] = sorted(name for name in below if not name.startswith(".") and name not in SKIPPED)
            for name in sorted(names):
                file = os.path.join(folder, name)
                if name.lower().endswith(SUFFIXES) and _is_schema(Path(file)):
                    found += 1
                    yield file
        if not found:
            mistakes.append(UserError(f"{path}: no schema in this folder; allowed: *.json or *.yaml that hold one"))


def _is_schema(path: Path) -> bool:
    from oneaxis.lint.document import read_document
    from oneaxis.lint.schema import looks_like_a_schema

    # A file that says that it is a schema, and is none, has to be heard of; any other may be broken as it likes.
    try:
        return ".schema." in path.name or looks_like_a_schema(read_document(path).data)
    except UserError:
        return False


def _show(found: "Sequence[Finding]", form: str, num_files: int, num_fixed: int) -> None:
    if form == "json":
        keys = ("code", "name", "severity", "file", "line", "pointer", "message", "fix", "fixable")
        print(json.dumps([{key: getattr(finding, key) for key in keys} for finding in found], indent=2))
        return
    for finding in found:
        if form == "github":
            print(_annotation(finding))
        else:
            line = "" if finding.line is None else f":{finding.line}"
            star = " [*]" if finding.fixable else ""
            print(f"{finding.file}{line}: {finding.code}{star} {finding.message}")
            print(f"    at {finding.pointer or '/'}: {finding.fix}")
    if form == "github":
        return
    if num_fixed:
        print(f"fixed {num_fixed} object{'s' * (num_fixed > 1)}")
    if found:
        kinds = Counter(finding.severity for finding in found)
        from oneaxis.lint.finding import SEVERITIES

        counts = ", ".join(f"{kinds[kind]} {kind}{'s' * (kinds[kind] > 1 and kind != 'info')}"
                           for kind in SEVERITIES if kinds[kind])  # fmt: skip
        fixable = sum(finding.fixable for finding in found)
        print(f"found {counts}" + (f"; {fixable} [*] fixable by --fix" if fixable else ""))
    else:
        print(f"nothing found in {num_files} file{'s' * (num_files != 1)}")


def _annotation(finding: "Finding") -> str:
    """A workflow command of GitHub Actions."""
    level = {"error": "error", "warning": "warning", "info": "notice"}[finding.severity]

    def text(said: str) -> str:
        return said.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(said: str) -> str:
        return text(said).replace(":", "%3A").replace(",", "%2C")

    line = "" if finding.line is None else f",line={finding.line}"
    title = value(f"{finding.code} {finding.name}")
    return f"::{level} file={value(finding.file)}{line},title={title}::" + text(
        f"{finding.pointer or '/'}: {finding.message}; {finding.fix}"
    )
