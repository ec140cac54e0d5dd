"""`oneaxis lint PATH...`: what a schema, a Pydantic model or a request makes a model do wrong, for a person or for CI.

    oneaxis lint schema.json answer.yaml schemas/    JSON Schemas; of a folder, the files that hold one
    oneaxis lint app.models:Answer models.py         Pydantic models; their module is imported
    oneaxis lint requests.jsonl request.json         request bodies: penalties, and the schemas in them
    oneaxis lint -                                   what standard input says, as one of the files above
    oneaxis lint --fix schema.json                   put reasoning before its answer, and confidence after it
    oneaxis lint --format github --ignore OV007 .    annotations on a pull request
    oneaxis lint --list                              every code in a line

A `$comment` "oneaxis: ignore OV001" in a schema accepts a finding there and below. Exit codes: 0 nothing found or
hints alone, 1 errors or warnings, 2 something could not be read or written.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneaxis.errors import UserError

if TYPE_CHECKING:
    from oneaxis.lint.document import Document
    from oneaxis.lint.finding import Finding
    from oneaxis.lint.tokens import Tokenizer

MAX_MISTAKES = 10
"""Lines of a file of requests that are told of, where they cannot be read."""


def add_lint_parser(commands: Any) -> None:
    """Add `lint` to the command line's parsers."""
    parser = commands.add_parser(
        "lint",
        help="schemas, Pydantic models and requests: what makes a model answer wrongly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="file, folder, module:Model, file.py, *.jsonl, or -")
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
    from oneaxis.lint.finding import CODES, Mistake, chosen
    from oneaxis.lint.folder import Files
    from oneaxis.lint.show import Report, show
    from oneaxis.lint.tokens import Tokenizer

    if options.list:
        for code, each in CODES.items():
            print(f"{code}  {each.name:24} {each.severity:8} {each.summary}")
        return 0
    if not options.paths:
        raise UserError("lint: say what; allowed: files, folders, module:Model, file.py, requests.jsonl, -, or --list")
    select, ignore = (
        [code for word in words for code in word.split(",")] for words in (options.select, options.ignore)
    )  # fmt: skip
    chosen([], select, ignore)
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    defaults = _defaults(options.generation_config)
    report, files = Report(), Files(options.paths)
    for path in files:
        found, mistakes = lint_path(path, tokenizer, defaults)
        found = chosen(found, select, ignore)
        report.num_unread += bool(mistakes)
        report.num_read += not mistakes
        if options.fix and any(finding.fixable for finding in found):
            try:
                num_fixed, note = _fix(path, found)
                report.num_fixed += num_fixed
                report.notes += [note] if note else []
                if num_fixed:
                    found, mistakes = lint_path(path, tokenizer, defaults)
                    found = chosen(found, select, ignore)
            except UserError as error:
                mistakes.append(error)
            # What is still there, no second run will mend.
            found = [replace(finding, fixable=False) for finding in found]
        report.found += found
        report.mistakes += [Mistake(path, str(mistake)) for mistake in mistakes]
    report.mistakes += files.mistakes
    report.num_unread += files.num_unread
    report.num_passed_over = files.num_passed_over
    try:
        show(report, options.format)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still in the buffer would be tried again at the end, and fail with Python's own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UserError(f"the output cannot be written: {error.strerror}; allowed: a place with room for it") from error
    # A hint fails nothing.
    return 2 if report.mistakes else 1 if any(finding.severity != "info" for finding in report.found) else 0


def lint_path(
    path: str, tokenizer: "Tokenizer | None" = None, defaults: Mapping[str, Any] | None = None
) -> "tuple[list[Finding], list[UserError]]":
    """All findings of one file or model, with file and line, sorted by place; and what of it could not be read.

    Args:
        path: a schema or request in JSON or YAML, a .jsonl file of requests, `module:Model`, a .py file, or - for
            standard input.
        tokenizer: whose tokens OV006 compares.
        defaults: sampling settings that a server fills in where a request says nothing.
    """
    from oneaxis.lint.document import STDIN, is_yaml, parse, read_document, read_lines, read_text, values
    from oneaxis.lint.models import is_model_name

    found: list[Finding] = []
    mistakes: list[UserError] = []
    try:
        if is_model_name(path):
            _models(path, tokenizer, found, mistakes)
        elif path.lower().endswith(".jsonl"):
            _requests(path, read_lines(Path(path)), tokenizer, defaults, found, mistakes)
        elif path == STDIN and not is_yaml(Path(path), text := read_text(Path(path))):
            lines = list(values(Path(path), text))
            if not lines:
                raise UserError(f"{path}: empty; allowed: a schema or requests on standard input")
            if len(lines) > 1:
                _requests(path, lines, tokenizer, defaults, found, mistakes)
            for number, document in lines if len(lines) == 1 else ():
                if isinstance(document, UserError):
                    raise document
                _document(document, path, number, tokenizer, defaults, found, mistakes)
        else:
            document = parse(Path(path), text) if path == STDIN else read_document(Path(path))
            _document(document, path, 1, tokenizer, defaults, found, mistakes)
    except UserError as error:
        mistakes.append(error)
    if path == STDIN:
        # There is no file to put into another order.
        found = [replace(finding, fixable=False) for finding in found]
    return sorted(found, key=lambda finding: (finding.file, finding.line or 0, finding.code)), mistakes


def _document(
    document: "Document", path: str, first: int, tokenizer: "Tokenizer | None", defaults: Mapping[str, Any] | None,
    found: "list[Finding]", mistakes: list[UserError],
) -> None:  # fmt: skip
    """A document's own findings: a schema, what OpenAI's wrappings hold, requests, or a list of them.

    Args:
        document: as read.
        path: its file.
        first: the line of the file with which its text begins.
        tokenizer: as in `lint_path`, like `defaults`.
        defaults: see there.
        found: gets the findings.
        mistakes: gets what keeps a part from being read: the others are linted all the same.
    """
    from oneaxis.lint.requests import body_of
    from oneaxis.lint.schema import lint_schema, schemas, under

    listed = document.data if isinstance(document.data, list) else [document.data]
    num_schemas = 0
    for index, each in enumerate(listed):
        base = f"/{index}" if isinstance(document.data, list) else ""
        here: list[Finding] = []
        if request := body_of(each):
            num_schemas += 1
            where = f"{path}:{base}{request[0]}" if base + request[0] else path
            here = [replace(finding, fixable=False) for finding in
                    _request(request[1], where, set(), tokenizer, defaults, mistakes)]  # fmt: skip
            here = under(here, base + request[0])
        for pointer, schema in schemas(each) if request is None else ():
            num_schemas += 1
            at = base + pointer
            try:
                here += under(lint_schema(schema, f"{path}:{at}" if at else path, tokenizer), at)
            except UserError as error:
                mistakes.append(error)
        for finding in here:
            line = document.line(finding.pointer)
            found.append(replace(finding, file=path, line=None if line is None else line + first - 1))
    if not num_schemas:
        raise UserError(f"{path}: no schema in it; allowed: a JSON Schema, a response_format, tools, or a request")


def _models(name: str, tokenizer: "Tokenizer | None", found: "list[Finding]", mistakes: list[UserError]) -> None:
    from oneaxis.lint.models import read_models
    from oneaxis.lint.schema import lint_schema

    models, errors = read_models(name)
    mistakes += errors
    for model in models:
        try:
            for finding in lint_schema(model.schema, model.where, tokenizer):
                file, line = model.place(finding.pointer)
                # The property in its class is what a person edits: no tool rewrites it.
                found.append(replace(finding, file=file, line=line, fixable=False))
        except UserError as error:
            mistakes.append(error)


def _requests(
    path: str, lines: "Iterable[tuple[int, Document | UserError]]", tokenizer: "Tokenizer | None",
    defaults: Mapping[str, Any] | None, found: "list[Finding]", mistakes: list[UserError],
) -> None:  # fmt: skip
    from oneaxis.lint.document import MAX_DEPTH
    from oneaxis.lint.requests import body_of
    from oneaxis.lint.schema import under

    seen: set[str] = set()
    number = num_bad = 0
    for number, document in lines:
        wrong: list[UserError] = []
        if isinstance(document, UserError):
            wrong.append(document)
        elif (request := body_of(document.data)) is None:
            wrong.append(
                UserError(f"{path}:{number}: no request; allowed: an object with `messages`, `prompt`, `input`, "
                          "`response_format` or `tools`, or a batch's `body`")
            )  # fmt: skip
        else:
            try:
                here = _request(request[1], f"{path}:{number}", seen, tokenizer, defaults, wrong)
            except RecursionError:
                here = []
                wrong.append(UserError(f"{path}:{number}: nested too deep; allowed: {MAX_DEPTH} levels"))
            for finding in under(here, request[0]):
                line = (document.line(finding.pointer) or 1) + number - 1
                found.append(replace(finding, file=path, line=line, fixable=False))
        num_bad += bool(wrong)
        mistakes += wrong if num_bad <= MAX_MISTAKES else []
    if num_bad > MAX_MISTAKES:
        mistakes.append(UserError(f"{path}: {num_bad - MAX_MISTAKES} more lines that cannot be read"))
    if number == 0:
        raise UserError(f"{path}: no request in it; allowed: one JSON object a line")


def _request(
    request: Mapping[str, Any], where: str, seen: set[str], tokenizer: "Tokenizer | None",
    defaults: Mapping[str, Any] | None, mistakes: list[UserError],
) -> "list[Finding]":  # fmt: skip
    """The findings of a request body; `seen` holds the schemas that were told of, which are not told of again."""
    from oneaxis.lint.requests import TEXT_FIXES, guard, schemas_of, texts_of
    from oneaxis.lint.schema import lint_schema, schemas, under

    found: list[Finding] = []
    inside: list[tuple[str, Any, bool]] = []
    try:
        found += guard(request, defaults)
    except UserError as error:
        mistakes.append(UserError(f"{where}: {error}"))
    try:
        for at, carried in schemas_of(request):
            inside += [(at + pointer, schema, True) for pointer, schema in schemas(carried)]
        inside += [(at, schema, False) for at, schema in texts_of(request)]
    except UserError as error:
        mistakes.append(UserError(f"{where}: {error}"))
    for pointer, schema, is_json in inside:
        key = json.dumps([schema, is_json])
        if key in seen:
            continue
        seen.add(key)
        try:
            # To an engine what constrains a text is no JSON, so nothing is said of what it makes of the schema; and a
            # tokenizer would be asked for the tokens behind a quote.
            each = lint_schema(schema, f"{where}: {pointer}", tokenizer if is_json else None)
            if not is_json:
                each = [
                    replace(finding, fix=TEXT_FIXES.get(finding.code, finding.fix))
                    for finding in each
                    if finding.code < "OV1"
                ]
            found += under(each, pointer)
        except UserError as error:
            mistakes.append(error)
    return found


def _fix(path: str, found: "Sequence[Finding]") -> tuple[int, str]:
    """Reorder a file's properties where findings ask for it.

    Returns:
        How many objects have changed; and a note: why none has, or what else did.

    Raises:
        UserError: the file cannot be written.
    """
    from oneaxis.lint.document import CannotMove, read_document, reorder, write_text
    from oneaxis.lint.schema import orders, schemas

    document = read_document(Path(path))
    objects = {finding.pointer.rpartition("/")[0] for finding in found if finding.fixable}
    wanted: dict[str, list[str]] = {}
    for pointer, schema in schemas(document.data):
        if isinstance(schema, dict) and any(at.startswith(pointer) for at in objects):
            wanted |= {pointer + at: order for at, order in orders(schema, path).items() if pointer + at in objects}
    if not wanted:
        return 0, ""
    try:
        others = write_text(Path(path), reorder(document, wanted).text)
    except CannotMove as reason:
        return 0, f"{path}: not fixed: {reason}; to be moved by hand"
    links = f"{others} other hard links keep" if others > 1 else "another hard link keeps"
    return len(wanted), f"{path}: fixed; {links} the old text" if others else ""


def _defaults(path: Path | None) -> dict[str, Any] | None:
    from oneaxis.lint.document import load_json, read_text
    from oneaxis.lint.requests import check_defaults

    if path is None:
        return None
    file = path / "generation_config.json" if path.is_dir() else path
    found = load_json(read_text(file), str(file))
    if not isinstance(found, dict):
        raise UserError(f"{file}: no object; allowed: a generation_config.json")
    check_defaults(found, str(file))
    return found
