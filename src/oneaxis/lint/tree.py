"""A JSON Schema as a tree of nodes with pointers: references followed, alternatives spread out, recursion survived.

Three ways to go over it:

    everywhere(schema)   each subschema of the document once, used or not: what an engine's checks see
    generated(schema)    each subschema from which a value can be generated, through references: what a model writes
    Value                the alternatives of one value (anyOf, oneOf, references, single allOf), down to leaves
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from oneaxis.errors import UserError

MAX_NODES = 100_000
"""Subschemas of a document that are looked at; more is a mistake, or an attack by aliases."""

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLES = (
    "items", "additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "additionalItems",
    "unevaluatedItems", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
GENERATED = (
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems",
    "additionalItems", "unevaluatedItems", "allOf", "anyOf", "oneOf",
)  # fmt: skip
"""Keywords whose subschemas describe a value that is written, as against one that is tested (`not`, `if`, ...)."""
SHAPES = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
"""Keywords from which xgrammar takes a type that is not said."""
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def escape(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def unescape(part: str) -> str:
    """The other way round."""
    return part.replace("~1", "/").replace("~0", "~")


@dataclass(frozen=True)
class Node:
    """A subschema, where it stands."""

    pointer: str
    schema: Any
    """A dict, or a bool."""

    def at(self, *keys: str | int) -> "Node":
        """The subschema below these keys."""
        pointer, schema = self.pointer, self.schema
        for key in keys:
            pointer, schema = f"{pointer}/{escape(str(key))}", schema[key]
        return Node(pointer, schema)

    def get(self, keyword: str, default: Any = None) -> Any:
        """A keyword's value; of a bool schema nothing."""
        return self.schema.get(keyword, default) if isinstance(self.schema, dict) else default

    def has(self, *keywords: str) -> bool:
        """Whether any of them is there."""
        return isinstance(self.schema, dict) and any(keyword in self.schema for keyword in keywords)


def children(node: Node, keywords: Sequence[str] = (*MAPS, *LISTS, *SINGLES)) -> Iterator[tuple[str, Node]]:
    """The subschemas directly below a node, with the keyword that each stands under."""
    if not isinstance(node.schema, dict):
        return
    for keyword in dict.fromkeys(keywords):
        value = node.schema.get(keyword)
        if keyword in MAPS and isinstance(value, dict):
            for key in value:
                if isinstance(value[key], dict | bool):
                    yield keyword, node.at(keyword, key)
        elif keyword in LISTS and isinstance(value, list):
            for index in range(len(value)):
                yield keyword, node.at(keyword, index)
        elif keyword in SINGLES and isinstance(value, dict | bool):
            yield keyword, node.at(keyword)


@dataclass(frozen=True)
class Schema:
    """A whole schema document; `where` names it in messages."""

    root: Any
    where: str = "schema"
    _found: dict[str, "Node | None"] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def top(self) -> Node:
        """The root."""
        return Node("", self.root)

    def target(self, node: Node) -> Node | None:
        """What a node's `$ref` leads to, through references that lead to references; None outside the document.

        Raises:
            UserError: it leads nowhere, or in a circle.
        """
        seen = [node.pointer]
        while isinstance(reference := node.get("$ref"), str):
            if reference not in self._found:
                self._found[reference] = self._find(reference)
            found = self._found[reference]
            if found is None:
                return None
            if found.pointer in seen:
                circle = " -> ".join(f"#{pointer}" for pointer in [*seen, found.pointer])
                raise UserError(f"{self.where}: $ref goes in a circle: {circle}; allowed: one that ends in a schema")
            node = found
            seen.append(node.pointer)
        return node

    def _find(self, reference: str) -> Node | None:
        own = self.root.get("$id") if isinstance(self.root, dict) else None
        if isinstance(own, str) and reference.startswith(own.split("#")[0] + "#"):
            reference = reference[len(own.split("#")[0]) :]
        if not reference.startswith("#"):
            return None
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            return next((node for node in everywhere(self) if node.get("$anchor") == fragment), None)
        node = self.top
        for part in fragment.split("/")[1:]:
            key = unescape(part)
            if isinstance(node.schema, dict) and key in node.schema:
                node = node.at(key)
            elif isinstance(node.schema, list) and re.fullmatch(r"\d+", key) and int(key) < len(node.schema):
                node = node.at(int(key))
            else:
                raise UserError(f"{self.where}: $ref {reference!r} leads nowhere; allowed: a schema in this document")
        if not isinstance(node.schema, dict | bool):
            raise UserError(f"{self.where}: $ref {reference!r} leads to no schema; allowed: a schema in this document")
        return node


def everywhere(schema: Schema) -> Iterator[Node]:
    """Each subschema of the document once, in the document's order.

    Raises:
        UserError: more than MAX_NODES.
    """
    stack, count = [schema.top], 0
    while stack:
        node = stack.pop()
        count += 1
        if count > MAX_NODES:
            raise UserError(f"{schema.where}: more than {MAX_NODES} subschemas; allowed: fewer")
        yield node
        stack.extend(reversed([child for _, child in children(node)]))


def starts(schema: Schema) -> list[Node]:
    """Where values begin: the root, or each definition of a document that only defines."""
    keys = (
        set(schema.root) - {"$schema", "$id", "$comment", "title", "description"}
        if isinstance(schema.root, dict)
        else set()
    )
    if keys and keys <= {"$defs", "definitions"}:
        return [node for _, node in children(schema.top, ("$defs", "definitions"))]
    return [schema.top]


def generated(schema: Schema) -> Iterator[Node]:
    """Each subschema from which a value can be generated, once, through references.

    Raises:
        UserError: a reference that leads nowhere or in a circle; more than MAX_NODES.
    """
    stack, seen = list(reversed(starts(schema))), set[str]()
    while stack:
        node = stack.pop()
        if node.pointer in seen:
            continue
        seen.add(node.pointer)
        if len(seen) > MAX_NODES:
            raise UserError(f"{schema.where}: more than {MAX_NODES} subschemas; allowed: fewer")
        yield node
        below = [child for keyword, child in children(node, GENERATED) if not _no_room(node, keyword)]
        if node.has("$ref") and (target := schema.target(node)) is not None:
            below.append(target)
        stack.extend(reversed(below))


def _no_room(node: Node, keyword: str) -> bool:
    """Whether an array or object is full before anything under this keyword can be written."""
    if keyword in ("items", "unevaluatedItems", "additionalItems"):
        most, fixed = node.get("maxItems"), node.get("prefixItems")
        return isinstance(most, int) and most <= (len(fixed) if isinstance(fixed, list) else 0)
    return keyword in ("additionalProperties", "patternProperties") and node.get("maxProperties") == 0


def types(node: Node) -> set[str]:
    """The JSON types that a leaf allows, as far as its own keywords say; all of them if they do not."""
    said = node.get("type")
    if isinstance(said, str):
        return {said}
    if isinstance(said, list):
        return {name for name in said if isinstance(name, str)}
    if node.has("enum", "const"):
        return {type_of(value) for value in constants(node) or []}
    for name, keywords in SHAPES.items():
        if node.has(*keywords):
            return {name}
    return set(TYPES) if node.schema is not False else set()


def constants(node: Node) -> list[Any] | None:
    """The values of `enum` or `const`; None without."""
    if node.has("const"):
        return [node.get("const")]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def distinct(values: Sequence[Any]) -> list[Any]:
    """The values, each once; to JSON 1 and 1.0 are one value, and true is another."""
    seen: dict[str, Any] = {}
    for value in values:
        seen.setdefault(json.dumps(_plain(value), sort_keys=True), value)
    return list(seen.values())


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


@dataclass(frozen=True)
class Value:
    """The alternatives of one value."""

    node: Node
    leaves: tuple[Node, ...]
    known: bool
    """Whether the leaves are all that it allows and no more: false for conjunctions and for what is outside."""

    @property
    def types(self) -> set[str]:
        """The types of all alternatives."""
        return set().union(*(types(leaf) for leaf in self.leaves))

    @property
    def null(self) -> bool:
        """Whether null is allowed, for all that is known."""
        return not self.known or any(
            None in (fixed or []) if (fixed := constants(leaf)) is not None else "null" in types(leaf)
            for leaf in self.leaves
        )

    @property
    def choice(self) -> list[Any] | None:
        """The values, where nothing but two or more constants (and null) can be chosen; None otherwise."""
        if not self.known:
            return None
        values: list[Any] = []
        for leaf in self.leaves:
            if (fixed := constants(leaf)) is not None:
                values += [value for value in fixed if value is not None]
            elif types(leaf) != {"null"}:
                return None
        values = distinct(values)
        return values if len(values) > 1 else None

    @property
    def place(self) -> str:
        """Where a choice is written down: at its only leaf with constants, or else at the value."""
        fixed = [leaf for leaf in self.leaves if constants(leaf) is not None]
        return fixed[0].pointer if len(fixed) == 1 else self.node.pointer


def value(schema: Schema, node: Node) -> Value:
    """Spread out what a value at this node may be.

    Raises:
        UserError: a reference that leads nowhere or in a circle.
    """
    leaves: list[Node] = []
    known = True
    stack, seen = [node], set[str]()
    while stack:
        here = stack.pop()
        if here.pointer in seen:
            continue
        seen.add(here.pointer)
        if here.has("$dynamicRef", "$recursiveRef"):
            known = False
        elif here.has("$ref"):
            target = schema.target(here)
            if target is None:
                known = False
            else:
                stack.append(target)
        elif here.has("anyOf", "oneOf"):
            stack.extend(reversed([child for _, child in children(here, ("anyOf", "oneOf"))]))
        elif here.has("allOf"):
            branches = [child for _, child in children(here, ("allOf",))]
            if len(branches) == 1:
                stack.append(branches[0])
            else:
                known = False
        elif here.schema is not False:
            leaves.append(here)
    return Value(node, tuple(leaves), known)


def required(node: Node) -> list[str]:
    """The keys that an object must have."""
    names = node.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def properties(node: Node) -> dict[str, Node]:
    """The declared properties of an object, in the order in which they are written."""
    found = node.get("properties")
    return {name: node.at("properties", name) for name in found} if isinstance(found, Mapping) else {}
