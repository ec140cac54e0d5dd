"""Read a JSON or YAML file with the line of each part, and put the properties of a schema into another order in place.

Reordering moves pieces of text, so that everything else keeps its bytes: in JSON the members of an object change
places between the commas, in YAML the lines of a key do, with the comment lines above it. The result is read again
and must hold the same data in the new order, or nothing is written."""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
STDIN = "-"


class CannotMove(Exception):
    """The text of a document cannot be put into another order; says why, in a few words."""


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
        with open(0 if str(path) == STDIN else path, "rb", closefd=str(path) != STDIN) as file:
            read = file.read(MAX_BYTES + 1)
            size = max(len(read), os.fstat(file.fileno()).st_size)
        if size > MAX_BYTES:
            raise UserError(f"{path}: {size / 1e6:.0f} MB; allowed: up to {MAX_BYTES / 1e6:.0f} MB")
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; allowed: UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; allowed: a file that can be read") from error


def parse(path: Path, text: str) -> Document:
    """The document that a text holds; `path` says in which language, and names it."""
    document = _yaml(path, text) if is_yaml(path, text) else _json(path, text)
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


def read_data(path: Path) -> Any:
    """What a file of a folder holds, to see whether it is a schema: what is sound, but no JSON, is taken as text.

    Raises:
        UserError: it is not there, not UTF-8, not JSON or YAML, or has a key twice.
    """
    text = read_text(path)
    if not is_yaml(path, text):
        return load_json(text, str(path))
    return _Plain(Document(path, text, None, {}), lenient=True).of(_load_yaml(path, text))


def read_lines(path: Path) -> Iterator[tuple[int, "Document | UserError"]]:
    """The JSON values of a file with one a line: each with its line, or what is wrong with it.

    A value may also go over several lines (a request as it was printed, what `jq` writes).

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open("rb") as lines:
            first = True
            for number, line in enumerate(iter(lambda: lines.readline(MAX_BYTES + 1), b""), 1):
                if not line.strip():
                    continue
                found = _value(path, number, line)
                if first and isinstance(found, UserError) and (spread := _over_lines(path, line)):
                    yield from spread
                    return
                first = False
                yield number, found
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; allowed: a file that can be read") from error


def _over_lines(path: Path, line: bytes) -> "list[tuple[int, Document | UserError]]":
    """The values of a file whose first line is no JSON, if its first value then goes over several lines."""
    try:
        found = list(values(path, read_text(path)))
    except UserError:
        return []
    return found if line.strip() in (b"{", b"[") or not isinstance(found[0][1], UserError) else []


def _value(path: Path, number: int, line: bytes) -> "Document | UserError":
    where = f"{path}:{number}"
    if len(line) > MAX_BYTES:
        return UserError(f"{where}: {len(line) / 1e6:.0f} MB; allowed: up to {MAX_BYTES / 1e6:.0f} MB a line")
    try:
        text = line.decode("utf-8-sig").strip()
        return Document(path, text, load_json(text, where, number), {"": 1})
    except UnicodeDecodeError:
        return UserError(f"{where}: not UTF-8; allowed: UTF-8 text")
    except UserError as error:
        return error


def values(path: Path, text: str) -> Iterator[tuple[int, "Document | UserError"]]:
    """The JSON values of a text, one after another: each with the line where it begins, or what is wrong with it."""
    decoder = json.JSONDecoder()
    at = _SPACE.match(text).end()  # type: ignore[union-attr]
    number = 1 + text.count("\n", 0, at)
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
            yield number, _json(path, text[at:end], number)
        except json.JSONDecodeError as error:
            # From here on nobody can tell where the next one begins.
            yield number, UserError(f"{path}:{error.lineno}: not JSON: {error.msg}, column {error.colno}")
            return
        except RecursionError:
            yield number, UserError(f"{path}:{number}: nested too deep; allowed: {MAX_DEPTH} levels")
            return
        except ValueError:
            yield number, UserError(f"{path}:{number}: {_DIGITS}")
            return
        except UserError as error:
            yield number, error
        after = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        number += text.count("\n", at, after)
        at = after


def is_yaml(path: Path, text: str) -> bool:
    """Whether a text is to be read as YAML: by its file's name, and from standard input by how it begins."""
    if str(path) == STDIN:
        return not (text.strip() == "" or text.lstrip().startswith(("{", "[")))
    return path.suffix.lower() in YAML_SUFFIXES


def load_json(text: str, where: str, line: int | None = None) -> Any:
    """JSON without NaN, without a key twice, and not nested too deep. `line`: it is this one of a file, in `where`.

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
        at = where if line is not None else f"{where}:{error.lineno}"
        raise UserError(f"{at}: not JSON: {error.msg}, column {error.colno}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep; allowed: {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise UserError(f"{where}: {_DIGITS}") from error


_DIGITS = f"a number of more than {sys.get_int_max_str_digits()} digits; allowed: fewer"
"""What Python refuses to convert."""
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^,\]}\s]+")


def _json(path: Path, text: str, first: int | None = None) -> Document:
    data = load_json(text, str(path) if first is None else f"{path}:{first}", first)
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


def _load_yaml(path: Path, text: str) -> Any:
    """The document of a text as ruamel has it; of several ones a list."""
    try:
        loaded = list(YAML(typ="rt").load_all(text))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error).strip().splitlines()[0]
        raise UserError(f"{where}: not YAML: {problem}") from error
    except Exception as error:
        # What ruamel's constructors raise for `!!int x`, a mapping as a key, 10,000 digits, ...
        said = (
            _DIGITS if "integer string conversion" in str(error) else f"{error or type(error).__name__}".splitlines()[0]
        )
        raise UserError(f"{path}: not YAML that can be read: {said}") from error
    return loaded[0] if len(loaded) == 1 else loaded


def _yaml(path: Path, text: str) -> Document:
    loaded = _load_yaml(path, text)
    if isinstance(loaded, list) and not isinstance(loaded, CommentedSeq):
        raise UserError(f"{path}: {len(loaded) or 'no'} YAML documents; allowed: one")
    document = Document(path, text, None, {"": 1})
    document.data = _Plain(document).of(loaded)
    return document


class _Plain:
    """Makes of what ruamel has loaded what JSON has, and notes the line of each part.

    Lenient, it takes what is no JSON (tags, dates, keys that are no text) as text, and stops at the limits.
    """

    def __init__(self, document: Document, lenient: bool = False) -> None:
        self.document, self.lenient, self.count = document, lenient, 0

    def of(self, each: Any, pointer: str = "", depth: int = 0) -> Any:
        document, path = self.document, self.document.path
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_VALUES:
            if self.lenient:
                return None
            raise UserError(f"{path}: nested too deep or too large; allowed: {MAX_DEPTH} levels, {MAX_VALUES} values")
        if isinstance(each, CommentedMap):
            document.blocks[pointer] = each
            found = {}
            for key, below in each.items():
                if not isinstance(key, str) and not self.lenient:
                    raise UserError(f"{path}: the key {key!r} under {pointer or '/'} is no text; allowed: quote it")
                at = f"{pointer}/{escape(str(key))}"
                place = each.lc.data.get(key) if each.lc.data else None
                if place:
                    document.lines[at] = place[0] + 1
                found[str(key)] = self.of(below, at, depth + 1)
            return found
        if isinstance(each, CommentedSeq) or (self.lenient and isinstance(each, list)):
            places = each.lc.data if isinstance(each, CommentedSeq) else None
            for index in range(len(each)):
                place = places.get(index) if places else None
                if place:
                    document.lines[f"{pointer}/{index}"] = place[0] + 1
            return [self.of(below, f"{pointer}/{index}", depth + 1) for index, below in enumerate(each)]
        if isinstance(each, ScalarBoolean):
            return bool(each)
        if isinstance(each, TaggedScalar) and not self.lenient:
            raise UserError(f"{path}: a YAML tag at {pointer or '/'}; allowed: what JSON has")
        for kind, plainly in ((bool, bool), (ScalarInt, int), (int, int), (ScalarFloat, float), (float, float)):
            if isinstance(each, kind):
                return plainly(each)
        if each is None or isinstance(each, str):
            return None if each is None else str(each)
        if self.lenient:
            return str(each)
        raise UserError(f"{path}: {each} at {pointer or '/'} is no JSON; allowed: quote it")


def reorder(document: Document, orders: Mapping[str, Sequence[str]]) -> Document:
    """The document with the keys of some objects in another order, and nothing else changed.

    Args:
        document: as read.
        orders: by the pointer of an object, all of its keys in the order that they shall have.

    Raises:
        CannotMove: its text cannot be rearranged (YAML in flow style, an alias before its anchor, ...).
    """
    # From the inside out: moving an inner object does not touch what is around it.
    for pointer in sorted(orders, key=lambda pointer: -pointer.count("/")):
        order = list(orders[pointer])
        text = _swap_json(document, pointer, order) if document.members else _swap_yaml(document, pointer, order)
        try:
            changed = parse(document.path, text)
        except UserError:
            changed = None
        if (
            changed is None
            or changed.data != document.data
            or list(_at(changed.data, pointer)) != order
            or _orders(changed.data, pointer) != _orders(document.data, pointer)
        ):
            raise CannotMove(
                f"the lines under {pointer} mean something else in another order (an alias before its anchor, a block "
                "whose last empty lines count, a text that goes on left of its key)"
            )
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


def _swap_json(document: Document, pointer: str, order: list[str]) -> str:
    members = document.members[pointer]
    pieces = {key: document.text[start:end] for key, start, end in members}
    text, shift = document.text, 0
    for (_, start, end), key in zip(members, order, strict=True):
        text = text[: start + shift] + pieces[key] + text[end + shift :]
        shift += len(pieces[key]) - (end - start)
    return text


def _swap_yaml(document: Document, pointer: str, order: list[str]) -> str:
    block = document.blocks[pointer]
    if block.fa.flow_style():
        raise CannotMove(f"{pointer} is in flow style, {{...}}")
    lines = document.text.splitlines(keepends=True)
    known = block.lc.data or {}
    places: list[tuple[int, int]] = [(known[key][0], known[key][1]) for key in block if key in known]
    own_lines = f"not each key under {pointer} begins a line of its own (`? key`, a merge with <<)"
    if len(places) < len(block) or len({column for _, column in places}) > 1:
        raise CannotMove(own_lines)
    column = places[0][1]
    begins = []
    for line, _ in places:
        if lines[line][:column].strip():
            raise CannotMove(own_lines)
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


def write_text(path: Path, text: str) -> int:
    """Replace a file at once, or not at all; it keeps its mode, its byte order mark, and the link that leads to it.

    Returns:
        How many other hard links there are: they keep the old text.

    Raises:
        UserError: it is read-only, or cannot be written.
    """
    target = path.resolve()
    name = ""
    try:
        before = target.stat()
        # Root may write all the same, but its owner meant it.
        if not before.st_mode & 0o222 or not os.access(target, os.W_OK):
            raise UserError(f"{path}: not fixed: read-only; allowed: a file that can be written")
        mark = b"\xef\xbb\xbf" if target.read_bytes().startswith(b"\xef\xbb\xbf") else b""
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".oneaxis-")
        with os.fdopen(handle, "wb") as file:
            file.write(mark + text.encode())
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"{path}: not fixed: {error.strerror}; allowed: a file that can be replaced") from error
        raise
    return before.st_nlink - 1
