"""Read a JSON or YAML file with the line of each part, and put the properties of a schema into another order in place.

Reordering moves pieces of text, so that everything else keeps its bytes: in JSON the members of an object change
places between the commas, in YAML the lines of a key do, with the comment lines above it. The result is read again
and must hold the same data in the new order, or nothing is written."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean
from ruamel.yaml.scalarfloat import ScalarFloat
from ruamel.yaml.scalarint import ScalarInt

from oneaxis.errors import UserError
from oneaxis.lint.tree import escape

MAX_BYTES = 5_000_000
"""A schema is a few kilobytes; more is another file."""
MAX_DEPTH = 200
MAX_VALUES = 200_000
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass
class Document:
    """A file's text, its data as JSON has it, and where each part stands."""

    path: Path
    text: str
    data: Any
    lines: dict[str, int]
    """Line of each JSON pointer, from 1: of the key, or of an item."""
    members: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    """For JSON, by an object's pointer: each key with the start and the end of its member in the text."""
    blocks: dict[str, Any] = field(default_factory=dict)
    """For YAML, by a mapping's pointer: ruamel's mapping."""

    def line(self, pointer: str) -> int | None:
        """The line of a pointer, or of the nearest part around it."""
        while pointer and pointer not in self.lines:
            pointer = pointer.rpartition("/")[0]
        return self.lines.get(pointer)


def read_document(path: Path) -> Document:
    """Read a `.yaml` or `.yml` file as YAML 1.2, any other as JSON.

    Raises:
        UserError: it is not there, too large, not UTF-8, not JSON or YAML, nested too deep, or has a key twice.
    """
    return parse(path, read_text(path))


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        UserError: it is not there, too large, or not UTF-8.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"{path}: {size / 1e6:.0f} MB; allowed: up to {MAX_BYTES / 1e6:.0f} MB")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; allowed: UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; allowed: a file that can be read") from error


def parse(path: Path, text: str) -> Document:
    """The document that a text holds; `path` says in which language, and names it."""
    document = _yaml(path, text) if path.suffix.lower() in YAML_SUFFIXES else _json(path, text)
    count = 0
    level = [document.data]
    while level:
        count += len(level)
        if count > MAX_VALUES:
            raise UserError(f"{path}: more than {MAX_VALUES} values; allowed: fewer")
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return document


def load_json(text: str, where: str) -> Any:
    """JSON without NaN, without a key twice, and not nested too deep.

    Raises:
        UserError: it is not that.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"{where}: the key {twice!r} stands twice in one object; allowed: once")
        return found

    def no(name: str) -> Any:
        raise UserError(f"{where}: {name} is not JSON; allowed: finite numbers")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=no)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.lineno}: not JSON: {error.msg}, column {error.colno}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep; allowed: {MAX_DEPTH} levels") from error
    except ValueError as error:
        # A number with more digits than Python converts.
        raise UserError(f"{where}: {error}") from error


_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^,\]}\s]+")


def _json(path: Path, text: str) -> Document:
    data = load_json(text, str(path))
    document = Document(path, text, data, {})
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    offsets: dict[str, int] = {}

    def skip(at: int) -> int:
        return _SPACE.match(text, at).end()  # type: ignore[union-attr]

    def scan(at: int, pointer: str, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise UserError(f"{path}: nested too deep; allowed: {MAX_DEPTH} levels")
        offsets.setdefault(pointer, at)
        if text[at] == '"':
            return int(scanstring(text, at + 1, True)[1])
        if text[at] not in "{[":
            return _SCALAR.match(text, at).end()  # type: ignore[union-attr]
        closing = "}" if text[at] == "{" else "]"
        members: list[tuple[str, int, int]] = []
        index, at = 0, skip(at + 1)
        while text[at] != closing:
            if closing == "}":
                start = at
                key, at = scanstring(text, at + 1, True)
                below = f"{pointer}/{escape(key)}"
                offsets[below] = start
                at = scan(skip(skip(at) + 1), below, depth + 1)
                members.append((key, start, at))
            else:
                at = scan(at, f"{pointer}/{index}", depth + 1)
                index += 1
            at = skip(at)
            if text[at] == ",":
                at = skip(at + 1)
        if closing == "}":
            document.members[pointer] = members
        return at + 1

    scan(skip(0), "", 0)
    line = 0
    for pointer, offset in sorted(offsets.items(), key=lambda item: item[1]):
        while line < len(starts) and starts[line] <= offset:
            line += 1
        document.lines[pointer] = line
    return document


def _yaml(path: Path, text: str) -> Document:
    loader = YAML(typ="rt")
    try:
        loaded = loader.load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).strip().splitlines()[0]
        raise UserError(f"{where}: not YAML: {problem}") from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: not YAML that can be read: {error}") from error
    document = Document(path, text, None, {"": 1})
    count = 0

    def plain(each: Any, pointer: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise UserError(f"{path}: nested too deep or too large; allowed: {MAX_DEPTH} levels, {MAX_VALUES} values")
        if isinstance(each, CommentedMap):
            document.blocks[pointer] = each
            found = {}
            for key, below in each.items():
                if not isinstance(key, str):
                    raise UserError(f"{path}: the key {key!r} under {pointer or '/'} is no text; allowed: quote it")
                at = f"{pointer}/{escape(key)}"
                place = each.lc.data.get(key) if each.lc.data else None
                if place:
                    document.lines[at] = place[0] + 1
                found[str(key)] = plain(below, at, depth + 1)
            return found
        if isinstance(each, CommentedSeq):
            for index in range(len(each)):
                place = each.lc.data.get(index) if each.lc.data else None
                if place:
                    document.lines[f"{pointer}/{index}"] = place[0] + 1
            return [plain(below, f"{pointer}/{index}", depth + 1) for index, below in enumerate(each)]
        if isinstance(each, ScalarBoolean):
            return bool(each)
        if isinstance(each, TaggedScalar):
            raise UserError(f"{path}: a YAML tag at {pointer or '/'}; allowed: what JSON has")
        for kind, plainly in ((bool, bool), (ScalarInt, int), (int, int), (ScalarFloat, float), (float, float)):
            if isinstance(each, kind):
                return plainly(each)
        if each is None or isinstance(each, str):
            return None if each is None else str(each)
        raise UserError(f"{path}: {each} at {pointer or '/'} is no JSON; allowed: quote it")

    document.data = plain(loaded, "", 0)
    return document


def reorder(document: Document, orders: Mapping[str, Sequence[str]]) -> Document | None:
    """The document with the keys of some objects in another order, and nothing else changed.

    Args:
        document: as read.
        orders: by the pointer of an object, all of its keys in the order that they shall have.

    Returns:
        The new document; None where its text cannot be rearranged (YAML in flow style, an alias before its anchor).
    """
    # From the inside out: moving an inner object does not touch what is around it.
    for pointer in sorted(orders, key=lambda pointer: -pointer.count("/")):
        order = list(orders[pointer])
        text = _swap_json(document, pointer, order) if document.members else _swap_yaml(document, pointer, order)
        if text is None:
            return None
        try:
            changed = parse(document.path, text)
        except UserError:
            return None
        if changed.data != document.data or list(_at(changed.data, pointer)) != order:
            return None
        if _orders(changed.data, pointer) != _orders(document.data, pointer):
            return None
        document = changed
    return document


def _at(data: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


def _orders(data: Any, left_out: str) -> list[tuple[str, tuple[str, ...]]]:
    """The key order of every object but one, to compare."""
    found, stack = [], [("", data)]
    while stack:
        pointer, each = stack.pop()
        if isinstance(each, dict):
            if pointer != left_out:
                found.append((pointer, tuple(each)))
            stack += [(f"{pointer}/{escape(key)}", below) for key, below in each.items()]
        elif isinstance(each, list):
            stack += [(f"{pointer}/{index}", below) for index, below in enumerate(each)]
    return sorted(found)


def _swap_json(document: Document, pointer: str, order: list[str]) -> str | None:
    members = document.members[pointer]
    pieces = {key: document.text[start:end] for key, start, end in members}
    text, shift = document.text, 0
    for (_, start, end), key in zip(members, order, strict=True):
        text = text[: start + shift] + pieces[key] + text[end + shift :]
        shift += len(pieces[key]) - (end - start)
    return text


def _swap_yaml(document: Document, pointer: str, order: list[str]) -> str | None:
    block = document.blocks[pointer]
    if block.fa.flow_style():
        return None
    lines = document.text.splitlines(keepends=True)
    known = block.lc.data or {}
    places: list[tuple[int, int]] = [(known[key][0], known[key][1]) for key in block if key in known]
    if len(places) < len(block) or len({column for _, column in places}) > 1:
        return None
    column = places[0][1]
    begins = []
    for line, _ in places:
        if lines[line][:column].strip():
            return None
        while line and re.match(rf" {{{column}}}#", lines[line - 1]) and line - 1 not in begins:
            line -= 1
        begins.append(line)
    end = places[-1][0] + 1
    for number in range(end, len(lines)):
        stripped = lines[number].strip()
        indent = len(lines[number]) - len(lines[number].lstrip(" "))
        if stripped and not (indent > column or (indent == column and stripped.startswith("- "))):
            break
        if stripped:
            end = number + 1
    newline = "\r\n" if "\r\n" in document.text else "\n"
    ends = [*begins[1:], end]
    pieces = {}
    for key, start, stop in zip(block, begins, ends, strict=True):
        piece = "".join(lines[start:stop])
        pieces[key] = piece if piece.endswith("\n") else piece + newline
    moved = "".join(pieces[key] for key in order)
    if not lines[end - 1].endswith("\n"):
        moved = moved.removesuffix(newline)
    return "".join(lines[: begins[0]]) + moved + "".join(lines[end:])


def write_text(path: Path, text: str, like: bytes) -> None:
    """Replace a file at once, or not at all; it keeps its mode, its byte order mark, and the link that leads to it."""
    path = path.resolve()
    mark = b"\xef\xbb\xbf" if like.startswith(b"\xef\xbb\xbf") else b""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(mark + text.encode())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
