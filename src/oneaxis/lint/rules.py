"""What is wrong with a schema as such (OV001 to OV010), whatever engine enforces it.

A constrained answer always parses; what goes wrong moves into the values. Each rule names a place where the truth is
not among what may be written, where writing need not end, or where the order forbids thinking first."""

import re
import re._parser as regex_parser  # type: ignore[import-not-found]
from collections.abc import Iterator
from typing import Any

from oneaxis.lint.finding import Finding
from oneaxis.lint.order import is_confidence, is_reasoning, roles, words
from oneaxis.lint.tokens import Tokenizer, alike
from oneaxis.lint.tree import (
    GENERATED,
    Node,
    Schema,
    Value,
    children,
    constants,
    generated,
    properties,
    required,
    starts,
    types,
    value,
)

WAYS_OUT = frozenset((
    "unknown", "other", "others", "none", "unclear", "undetermined", "undecided", "unsure", "uncertain",
    "unspecified", "undefined", "unidentified", "unrecognized", "unrecognised", "unreadable", "illegible",
    "missing", "absent", "abstain", "unanswerable", "inconclusive", "ambiguous", "na", "nil", "null", "neither",
    "irrelevant", "unavailable", "indeterminate",
))  # fmt: skip
"""Words of a value by which a model can say that none of the others holds, or that it cannot tell."""
NEGATED = frozenset((
    "applicable", "available", "given", "stated", "specified", "known", "sure", "found", "mentioned", "tell",
    "determine",
))  # fmt: skip
"""With not, cannot or no before: `not applicable`, `cannot_tell`."""
FORMATS = frozenset((
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
))  # fmt: skip
"""Those that vLLM 0.32 lets through to xgrammar 0.2.8, which enforces them."""
ASSERTIONS = frozenset((
    "type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum",
    "maxLength", "minLength", "pattern", "format", "items", "prefixItems", "additionalItems", "unevaluatedItems",
    "maxItems", "minItems", "uniqueItems", "contains", "minContains", "maxContains", "properties",
    "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "maxProperties",
    "minProperties", "required", "dependentRequired", "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf",
    "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Keywords that say something about a value; all others describe it."""


def rules(schema: Schema, tokenizer: Tokenizer | None = None) -> Iterator[Finding]:
    """All findings of OV001 to OV010, in the order in which the schema is generated.

    Raises:
        UserError: a reference that leads nowhere or in a circle; more subschemas than are looked at.
    """
    for start in starts(schema):
        yield from _value(schema, start, True, "", tokenizer)
    for node in generated(schema):
        yield from _string(node)
        yield from _array(node)
        yield from _object(schema, node, tokenizer)
    yield from _recursion(schema)


def _value(schema: Schema, node: Node, forced: bool, name: str, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """A value that is written: the root, a property, an item. `forced`: it cannot be left out."""
    if not ASSERTIONS.intersection(node.schema if isinstance(node.schema, dict) else ()) and node.schema is not False:
        yield Finding("OV008", node.pointer, "any JSON is allowed here, of any length and depth", "say its type")
        return
    found = value(schema, node)
    if found.choice is not None:
        yield from _choice(found, found.choice, forced, tokenizer)
    elif forced and name:
        yield from _must(name, found)


def _choice(found: Value, values: list[Any], forced: bool, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    shown = ", ".join(_short(each) for each in values[:4]) + (", ..." if len(values) > 4 else "")
    if forced and not found.null and not any(_way_out(each) for each in values):
        yield Finding(
            "OV001",
            found.place,
            f"one of {shown} must be answered, also where none of them is true or can be told",
            'add a value such as "unknown", allow null, or leave the property out of `required`; and tell the model '
            "when to use it",
        )
    for group, shared in alike(values, tokenizer):
        names = ", ".join(_short(each) for each in group)
        how = f"begin with the same token {shared!r}" if tokenizer else f"both begin with {shared!r}"
        yield Finding(
            "OV006",
            found.place,
            f"{names} {how if tokenizer or len(group) == 2 else how.replace('both', 'all')}: "
            "the probability of the first token does not tell them apart",
            "choose values that differ from the first token on" + ("" if tokenizer else "; --tokenizer tells for sure"),
            severity="" if tokenizer else "info",
        )


def _must(name: str, found: Value) -> Iterator[Finding]:
    if found.null or not found.leaves or is_reasoning(name, found) or is_confidence(name, found):
        return
    kinds = found.types
    if all(constants(leaf) is not None for leaf in found.leaves) and "boolean" not in kinds:
        return
    empty = ("array" in kinds and any(not leaf.get("minItems") for leaf in found.leaves)) or "object" in kinds
    if not empty:
        what = " or ".join(sorted(kinds))
        yield Finding(
            "OV007",
            found.node.pointer,
            f"{name!r} must be answered with {what}, also where the source does not say it",
            "allow null, or leave it out of `required`",
        )


def _way_out(each: Any) -> bool:
    if not isinstance(each, str):
        return False
    said = words(each)
    if not said or WAYS_OUT.intersection(said):
        return True
    if said in (["n", "a"], ["cant", "tell"], ["can", "t", "tell"]):
        return True
    return bool({"not", "no", "cannot", "non"}.intersection(said)) and bool(NEGATED.intersection(said))


def _string(node: Node) -> Iterator[Finding]:
    said = node.get("type")
    if not ("string" in said if isinstance(said, list) else said == "string"):
        return
    if node.has("enum", "const", "maxLength", "$ref", "anyOf", "oneOf", "allOf") or node.get("format") in FORMATS:
        return
    pattern = node.get("pattern")
    if pattern is None:
        fix = "add `maxLength`" + ("" if node.get("format") is None else ", or a pattern that ends")
        yield Finding("OV002", node.pointer, "this string may go on until max_tokens cuts it", fix)
    elif isinstance(pattern, str) and not _ends(pattern):
        # vLLM refuses maxLength beside a pattern on xgrammar (OV102): the bound belongs into the pattern.
        yield Finding(
            "OV002",
            node.pointer,
            f"the pattern {_short(pattern)} has no longest match",
            "bound its repeats, as in {0,200} for *",
        )


def _ends(pattern: str) -> bool:
    """Whether a pattern has a longest match; true where Python cannot read it."""
    try:
        return int(regex_parser.parse(pattern).getwidth()[1]) < int(regex_parser.MAXREPEAT)
    except (re.error, OverflowError, RecursionError):
        return True


def _array(node: Node) -> Iterator[Finding]:
    said = node.get("type")
    kinds = {said} if isinstance(said, str) else set(said or ())
    if node.has("enum", "const", "$ref"):
        return
    if ("array" in kinds or (not kinds and node.has("items", "prefixItems"))) and not node.has("maxItems"):
        rest = node.get("items", node.get("unevaluatedItems")) if node.has("prefixItems") else node.get("items")
        if rest is not False:
            yield Finding("OV003", node.pointer, "this array may go on until max_tokens cuts it", "add `maxItems`")
    if "array" in kinds and not node.has("items", "prefixItems", "contains", "unevaluatedItems"):
        yield Finding("OV008", node.pointer, "the items of this array may be any JSON", "say what `items` are")
    more = node.get("additionalProperties", node.get("unevaluatedProperties"))
    bare = "object" in kinds and not node.has("properties", "anyOf", "oneOf", "allOf") and more is None
    if (more not in (None, False) or node.has("patternProperties") or bare) and not node.has("maxProperties"):
        yield Finding(
            "OV003",
            node.pointer,
            "this object may get keys until max_tokens cuts it",
            "add `maxProperties`, or name the properties and close it with `additionalProperties: false`",
        )


def _object(schema: Schema, node: Node, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    members = properties(node)
    must = required(node)
    for name, member in members.items():
        yield from _value(schema, member, name in must, name, tokenizer)
    for keyword, item in children(node, ("items", "prefixItems")):
        index = int(item.pointer.rsplit("/", 1)[1]) if keyword == "prefixItems" else 0
        least = node.get("minItems", 0)
        yield from _value(schema, item, isinstance(least, int) and least > index, "", tokenizer)
    if not members:
        return
    found = roles(schema, members)
    moves = list(found.mended()) != list(members)
    for name, subject in found.late().items():
        yield Finding(
            "OV004",
            members[subject].pointer,
            f"{subject!r} is written before {name!r}, so it cannot rest on it: properties are written as declared",
            f"declare {name!r} before {subject!r}",
            fixable=moves,
        )
    for name, subject in found.early().items():
        if subject:
            yield Finding(
                "OV005",
                members[name].pointer,
                f"{name!r} is written before {subject!r}, which it is about",
                f"declare it after {subject!r}; better, drop it and read the probability of the answer's first "
                "distinguishing token",
                fixable=moves,
            )
        else:
            yield Finding(
                "OV005",
                members[name].pointer,
                f"{name!r} is a confidence in nothing: this object has no answer",
                "put it beside the answer, after it; better, drop it and read the probability of the answer's token",
            )


def _recursion(schema: Schema) -> Iterator[Finding]:
    """OV009 and OV010, at each schema that a reference leads to and that can contain another of itself."""
    nodes = {node.pointer: node for node in generated(schema)}
    targets = {
        target.pointer: target
        for node in nodes.values()
        if node.has("$ref") and (target := schema.target(node)) is not None
    }
    if not targets:
        return
    import networkx

    graph = networkx.DiGraph()
    for node in nodes.values():
        graph.add_edges_from((node.pointer, child.pointer) for _, child in children(node, GENERATED))
        if node.has("$ref") and (target := schema.target(node)) is not None:
            graph.add_edge(node.pointer, target.pointer)
    circles = [each for each in networkx.strongly_connected_components(graph) if len(each) > 1]
    inside = set().union(*circles)
    ends = _least(schema, nodes)
    for pointer in targets:
        if pointer not in inside:
            continue
        if pointer not in ends:
            yield Finding(
                "OV009",
                pointer,
                "every answer contains another one like it, so none can end",
                "make the recursion optional, nullable, or an array that may be empty",
            )
        else:
            yield Finding(
                "OV010",
                pointer,
                "nests in itself without a deepest level; no grammar counts levels",
                "unroll it to the depth that is needed, or bound max_tokens",
            )


def _least(schema: Schema, nodes: dict[str, Node]) -> set[str]:
    """The pointers from which a finite value can be written: a least fixed point, from the leaves up."""
    ends: set[str] = set()

    def done(node: Node) -> bool:
        if node.schema is False:
            return False
        if constants(node) is not None:
            return True
        if node.has("$ref"):
            target = schema.target(node)
            return target is None or target.pointer in ends
        if node.has("anyOf", "oneOf"):
            return any(child.pointer in ends for _, child in children(node, ("anyOf", "oneOf")))
        if not all(child.pointer in ends for _, child in children(node, ("allOf",))):
            return False
        kinds = types(node)
        if kinds - {"object", "array"}:
            return True
        if "object" in kinds:
            members = properties(node)
            if all(members[name].pointer in ends for name in required(node) if name in members):
                return True
        if "array" in kinds:
            least = node.get("minItems", 0)
            fixed = [child for _, child in children(node, ("prefixItems",))]
            items = [child for keyword, child in children(node, ("items",)) if keyword == "items"]
            needed = fixed[:least] + (items if least > len(fixed) else [])
            return all(child.pointer in ends for child in needed)
        return False

    changed = True
    while changed:
        changed = False
        # From the last to the first: most references lead forward, and children come after their parents.
        for pointer, node in reversed(nodes.items()):
            if pointer not in ends and done(node):
                ends.add(pointer)
                changed = True
    return ends


def _short(each: Any) -> str:
    text = repr(each)
    return text if len(text) <= 40 else text[:37] + "..."
