"""What an engine makes of a schema (OV101 to OV105): dropped, handed on, refused, or read more narrowly.

For vLLM 0.32 with its default backend (`auto`): xgrammar 0.2.8 takes a schema unless vLLM's own check keeps it from it,
or it does not compile; then llguidance 1.7 gets it, and what that does not know is refused (HTTP 400). Each statement
below was tried on these three, and the tests try it again on those that are installed.

    OV101   xgrammar compiles the schema, vLLM lets it pass, and answers that break the constraint are accepted
    OV102   vLLM hands the schema to llguidance, which enforces it; with `--structured-outputs-config.backend xgrammar`
            the request is refused, and xgrammar outside of vLLM drops the constraint
    OV103   neither takes it: HTTP 400
    OV104   answers that the standard allows cannot be written
    OV105   with OV102: an object that does not say `additionalProperties` is closed by xgrammar, open in llguidance

A statement is about one constraint alone. A schema that one constraint sends to llguidance is refused there for others
that it does not know (`not`, `if`, `dependentRequired`, `propertyNames`, ...).
"""

import re
import warnings
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import UnknownType

from oneaxis.lint.compiled import bounds, false_schemas, regex_fault
from oneaxis.lint.finding import Finding
from oneaxis.lint.rules import ASSERTIONS, FORMATS
from oneaxis.lint.tree import (
    LISTS,
    MAPS,
    SHAPES,
    SINGLES,
    Node,
    Schema,
    Value,
    children,
    constants,
    escape,
    everywhere,
    properties,
    required,
    types,
    value,
)

DROPPED = ("dependentRequired", "dependentSchemas", "dependencies", "if", "not")
REFUSED_IN_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains")
MAX_NESTING = 64
"""Objects and arrays that vLLM lets a schema nest (`MAX_STRUCTURED_OUTPUT_JSON_NESTING`)."""
COMBINED = ("$ref", "anyOf", "oneOf", "allOf")


def engine_rules(schema: Schema) -> Iterator[Finding]:
    """All findings of OV101 to OV105, in the document's order.

    Raises:
        UserError: a reference that leads nowhere or in a circle; more subschemas than are looked at.
    """
    found: list[Finding] = []
    open_objects: list[Node] = []
    conjoined: set[str] = set()
    patterned = False
    for node in everywhere(schema):
        if not isinstance(node.schema, dict):
            continue
        for rule in (_dropped, _combined, _fixed, _patterns, _lengths, _arrays, _objects, _numbers):
            found += rule(node)
        found += [] if _tested(node.pointer) else bounds(node)
        together = [child.pointer for _, child in children(node, ("allOf",))]
        conjoined.update(together if len(together) > 1 else [])
        if node.pointer not in conjoined:
            found += _untyped(node)
        found += _references(schema, node)
        found += _one_of(schema, node)
        patterned = patterned or node.has("patternProperties")
        if node.has("properties") and not node.has("additionalProperties", "unevaluatedProperties"):
            open_objects.append(node)
    found += false_schemas(schema)
    yield from found
    # With patternProperties anywhere vLLM passes llguidance over, for outlines, which closes objects.
    if any(finding.code == "OV102" for finding in found) and not patterned:
        for node in open_objects:
            yield Finding(
                "OV105",
                node.pointer,
                "another constraint sends this schema to llguidance, which lets any further key "
                "into this object; xgrammar would close it",
                "say `additionalProperties: false`",
            )
    if _depth(schema.root) > MAX_NESTING:
        yield Finding("OV103", "", f"nested deeper than the {MAX_NESTING} levels that vLLM takes", "flatten it")


def _dropped(node: Node) -> Iterator[Finding]:
    for keyword in DROPPED:
        if node.has(keyword):
            yield Finding(
                "OV101",
                f"{node.pointer}/{keyword}",
                f"xgrammar drops `{keyword}`, so answers may break it; llguidance refuses it",
                "check the answer against the schema yourself, or say it by anyOf of closed objects",
            )


def _combined(node: Node) -> Iterator[Finding]:
    """Constraints beside anyOf, oneOf, a reference or a single allOf: xgrammar takes the combination alone."""
    for keyword in COMBINED:
        if not node.has(keyword):
            continue
        beside = [name for name in node.schema if name in ASSERTIONS - set(COMBINED)]
        if beside == ["type"] and keyword in ("anyOf", "oneOf") and _all_of_type(node, keyword):
            beside = []
        if beside == ["type"] and keyword in ("$ref", "allOf"):
            beside = []
        if keyword == "allOf" and isinstance(node.get("allOf"), list) and len(node.get("allOf")) > 1:
            yield Finding(
                "OV102",
                f"{node.pointer}/allOf",
                "vLLM keeps an allOf of several schemas from xgrammar, which would "
                "accept any JSON, and hands it to llguidance",
                "write the schemas out as one",
            )
        elif beside:
            yield Finding(
                "OV101",
                f"{node.pointer}/{escape(beside[0])}",
                f"xgrammar drops {_names(beside)} beside `{keyword}`",
                f"move it into the schema that `{keyword}` names"
                if keyword == "$ref"
                else f"move it into each schema of `{keyword}`",
            )
        return


def _all_of_type(node: Node, keyword: str) -> bool:
    """Whether `type` beside a combination says nothing that each branch does not say itself."""
    allowed = types(node)
    return all(
        child.has("$ref") or (child.has("type", "enum", "const", "properties", "items") and types(child) <= allowed)
        for _, child in children(node, (keyword,))
    )


def _untyped(node: Node) -> Iterator[Finding]:
    """Constraints of a schema that says no type, and from whose keywords xgrammar takes none."""
    shaping = [keyword for keywords in SHAPES.values() for keyword in keywords]
    if node.has("type", "enum", "const", *COMBINED, *shaping) or _tested(node.pointer):
        return
    beside = [name for name in node.schema if name in ASSERTIONS - set(DROPPED) - {"then", "else", "$dynamicRef"}]
    if beside:
        yield Finding(
            "OV101",
            f"{node.pointer}/{beside[0]}",
            f"without `type` xgrammar drops {_names(beside)} and accepts any JSON",
            "say `type`",
        )


def _tested(pointer: str) -> bool:
    """Whether a subschema stands inside one that is dropped, refused or read otherwise as a whole."""
    return bool(set(pointer.split("/")) & {*DROPPED, "then", "else", "contains", "propertyNames"})


def _fixed(node: Node) -> Iterator[Finding]:
    """Values of an enum that the keywords beside it exclude: xgrammar offers them all the same."""
    values = constants(node)
    if values is None or node.has(*COMBINED):
        return
    apart = {"enum", "const", *MAPS, *LISTS, *SINGLES, *DROPPED, "$dynamicRef", "$recursiveRef"}
    rest = {name: node.schema[name] for name in node.schema if name in ASSERTIONS - apart}
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(rest.get(name), bool):
            del rest[name]
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(str(rest.get("pattern", "")))
    except (re.error, OverflowError, RecursionError):
        # ECMA's syntax, which Python cannot judge.
        del rest["pattern"]
    if not rest:
        return
    validator = Draft202012Validator(rest)
    try:
        with warnings.catch_warnings(action="ignore"):
            wrong = [each for each in values if not validator.is_valid(each)]
    except (TypeError, UnknownType):
        # An older dialect lets a keyword that it does not know hold anything.
        return
    if wrong:
        keyword = "enum" if node.has("enum") else "const"
        yield Finding(
            "OV101",
            f"{node.pointer}/{keyword}",
            f"xgrammar offers {_shown(wrong[0])}, which {_names(list(rest))} beside the `{keyword}` "
            f"exclude{'s' if len(rest) == 1 else ''}",
            "take the value out, or the keyword that excludes it",
        )


def _patterns(node: Node) -> Iterator[Finding]:
    pattern = node.get("pattern")
    # Nothing compiles a pattern beside a format (dropped, or refused for that), nor one without a type.
    unread = node.has("format") or not ("string" in _said(node) or node.pointer.endswith("/propertyNames"))
    if isinstance(pattern, str) and not node.has("enum", "const", *COMBINED) and not (unread and regex_fault(pattern)):
        yield from _pattern(f"{node.pointer}/pattern", pattern)
    keys = node.get("patternProperties")
    for key in keys if isinstance(keys, dict) else ():
        yield from _pattern(f"{node.pointer}/patternProperties/{escape(key)}", key)


def _pattern(pointer: str, pattern: str) -> Iterator[Finding]:
    plain = re.sub(r"\\\\", "", pattern)
    if (fault := regex_fault(pattern)) and not pointer.endswith("/pattern"):
        yield Finding(
            "OV101",
            pointer,
            f"{_shown(pattern)} is no regular expression: {fault[0]}; outlines, which gets the schema, drops it",
            "mend it",
        )
    elif fault:
        yield Finding(
            "OV103" if fault[1] else "OV102",
            pointer,
            f"{_shown(pattern)} is no regular expression for {'any backend' if fault[1] else 'xgrammar'}: {fault[0]}",
            "mend it",
        )
    elif re.search(r"\(\?<[=!]|\\[bB]|\\[1-9]|\\k<", plain):
        yield Finding(
            "OV103",
            pointer,
            f"no backend takes look-behind, word boundaries or back references: {_shown(pattern)}",
            "write the pattern without them",
        )
    elif re.search(r"\(\?[=!]", plain):
        yield Finding(
            "OV101",
            pointer,
            f"xgrammar drops look-ahead: {_shown(pattern)}; llguidance refuses it",
            "write out what is allowed",
        )
    elif re.search(r"\\[pP]\{|\(\?[a-zA-Z-]+[):]", plain):
        yield Finding(
            "OV102",
            pointer,
            f"xgrammar knows neither \\p{{...}} nor flags in a pattern: {_shown(pattern)}",
            "use character ranges",
        )
    elif not _anchored(pattern):
        yield Finding(
            "OV104",
            pointer,
            f"xgrammar takes {_shown(pattern)} for the whole text; by the standard it may match anywhere",
            "anchor it: ^ and $ around each alternative, with .{0,N} where other text may stand",
        )


def _anchored(pattern: str) -> bool:
    """Whether each alternative of a pattern begins with ^ and ends with $."""
    depth, cut, parts, index = 0, 0, [], 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif character == "[":
            # A class ends at the first ] that is not its first character, nor escaped.
            index += 1 + pattern[index + 1 : index + 2].count("^")
            while index + 1 < len(pattern) and pattern[index + 1] != "]":
                index += 1 + (pattern[index + 1] == "\\")
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            parts.append(pattern[cut:index])
            cut = index + 1
        index += 1
    parts.append(pattern[cut:])
    return all(re.search(r"^\^.*(?<!\\)(\\\\)*\$$", part, re.DOTALL) for part in parts)


def _lengths(node: Node) -> Iterator[Finding]:
    if "string" not in _said(node) or node.has("enum", "const", *COMBINED):
        return
    form = node.get("format")
    if isinstance(form, str) and form not in FORMATS:
        if form == "unknown":
            return
        yield Finding(
            "OV103",
            f"{node.pointer}/format",
            f"no backend knows the format {form!r}",
            f"allowed: {', '.join(sorted(FORMATS))}; or say it by a pattern",
        )
        return
    kind = "pattern" if node.has("pattern") else "format"
    if node.has("pattern", "format") and node.has("minLength", "maxLength"):
        yield Finding(
            "OV102",
            f"{node.pointer}/{kind}",
            f"xgrammar cannot hold a length beside a {kind}: vLLM hands the schema to llguidance",
            "put the length into the pattern, as in ^[a-z]{1,20}$",
        )
    elif node.has("pattern") and node.has("format"):
        yield Finding(
            "OV101", f"{node.pointer}/pattern", "xgrammar drops `pattern` beside `format`", "keep one of the two"
        )


def _arrays(node: Node) -> Iterator[Finding]:
    for keyword in REFUSED_IN_ARRAYS:
        if node.has(keyword) and "array" in _said(node):
            more = " (false says nothing, and is refused as well)" if node.get(keyword) is False else ""
            yield Finding(
                "OV103",
                f"{node.pointer}/{keyword}",
                f"vLLM keeps `{keyword}` from xgrammar, which drops it, and llguidance refuses it{more}",
                "leave it out, and check the answer yourself" if not more else "leave it out",
            )
        elif node.has(keyword) and node.has(*SHAPES["array"]):
            yield Finding(
                "OV101",
                f"{node.pointer}/{keyword}",
                f"without `type` vLLM overlooks `{keyword}`, and xgrammar drops it",
                "leave it out, and check the answer yourself",
            )
    if isinstance(node.get("items"), list):
        yield Finding(
            "OV102",
            f"{node.pointer}/items",
            "xgrammar takes no list of `items`",
            "use `prefixItems`, and `items: false`",
        )


def _objects(node: Node) -> Iterator[Finding]:
    if node.get("nullable") is True:
        yield Finding(
            "OV104",
            f"{node.pointer}/nullable",
            "`nullable` is of OpenAPI 3.0, not of JSON Schema: null cannot be written",
            'write "null" into `type`, or anyOf with it',
        )
    if node.has(*COMBINED):
        return
    undeclared = [name for name in required(node) if name not in properties(node)]
    if undeclared and node.has("properties"):
        yield Finding(
            "OV101",
            f"{node.pointer}/required",
            f"{undeclared[0]!r} is required but not declared: xgrammar does not ask for it",
            "declare it in `properties`",
        )
    if "object" not in _said(node):
        return
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > 1:
        closed = node.get("additionalProperties") is False
        yield Finding(
            "OV103" if closed else "OV101",
            f"{node.pointer}/patternProperties",
            "vLLM keeps several `patternProperties` "
            "from xgrammar; outlines, which gets them, " + ("refuses them" if closed else "drops them"),
            "use one pattern, or name the properties",
        )
    elif patterns and node.has("properties"):
        yield Finding(
            "OV102",
            f"{node.pointer}/patternProperties",
            "vLLM keeps `patternProperties` beside `properties` from xgrammar; outlines, which gets them, lets only "
            "the named properties be written",
            "name the properties, or put the others into an object of their own",
        )
    names = node.get("propertyNames")
    if names is not None and (
        node.has("properties", "patternProperties")
        or node.get("unevaluatedProperties", True) is not True
        or (isinstance(names, dict) and {"pattern", "format"} & set(names) and {"minLength", "maxLength"} & set(names))
    ):
        yield Finding(
            "OV103",
            f"{node.pointer}/propertyNames",
            "vLLM keeps this combination with `propertyNames` from xgrammar, and llguidance refuses it",
            "name the properties, and close the object with `additionalProperties: false`",
        )


def _numbers(node: Node) -> Iterator[Finding]:
    if {"integer", "number"} & _said(node) and node.has("multipleOf"):
        yield Finding(
            "OV102",
            f"{node.pointer}/multipleOf",
            "vLLM keeps `multipleOf` from xgrammar, which drops it for numbers, and hands the schema to llguidance",
            "use an enum, or a smaller unit and an integer",
        )


def _references(schema: Schema, node: Node) -> Iterator[Finding]:
    if node.has("$dynamicRef"):
        yield Finding(
            "OV101",
            f"{node.pointer}/$dynamicRef",
            "xgrammar drops `$dynamicRef` and accepts any JSON; llguidance refuses it",
            "use `$ref`",
        )
    reference = node.get("$ref")
    if not isinstance(reference, str):
        return
    target = schema.target(node)
    if not re.match(r"#(/|$)", reference):
        known = "; llguidance follows it" if target else "; llguidance refuses it"
        yield Finding(
            "OV101",
            f"{node.pointer}/$ref",
            f"xgrammar follows no {reference!r} and accepts any JSON here{known}",
            "bring the schema into `$defs` and write #/$defs/NAME",
        )
    elif re.search(r"[~%]", reference) or re.search(r"/(allOf|anyOf|oneOf|prefixItems)/\d+(/|$)", reference):
        yield Finding(
            "OV102",
            f"{node.pointer}/$ref",
            f"xgrammar cannot follow {reference!r}: neither escapes nor places in a list",
            "give the schema a plain name in `$defs`",
        )


def _one_of(schema: Schema, node: Node) -> Iterator[Finding]:
    if not node.has("oneOf"):
        return
    branches = [child for _, child in children(node, ("oneOf",))]
    for (i, first), (j, second) in combinations(enumerate(branches), 2):
        if not _apart(value(schema, first), value(schema, second)):
            yield Finding(
                "OV101",
                f"{node.pointer}/oneOf",
                f"schemas {i} and {j} of oneOf are not told apart by type or constant: "
                "xgrammar accepts answers that fit both; llguidance refuses it",
                "write anyOf if both may hold, or give each a constant of its own",
            )
            return


def _apart(first: Value, second: Value) -> bool:
    """Whether no JSON fits both, as far as types, constants and required constants of objects say."""
    if not first.known or not second.known:
        return False
    return all(_leaves_apart(one, other) for one in first.leaves for other in second.leaves)


def _leaves_apart(first: Node, second: Node) -> bool:
    fixed = [constants(first), constants(second)]
    if fixed[0] is not None and fixed[1] is not None:
        return not any(each == other and type(each) is type(other) for each in fixed[0] for other in fixed[1])
    kinds = [types(first), types(second)]
    both = kinds[0] & kinds[1]
    if (
        {"integer", "number"} <= kinds[0] | kinds[1]
        and kinds[0] & {"integer", "number"}
        and kinds[1]
        & {
            "integer",
            "number",
        }
    ):
        both = both | {"number"}
    if not both:
        return True
    if both != {"object"}:
        return False
    members = [properties(first), properties(second)]
    for name in {*required(first)} & {*required(second)} & members[0].keys() & members[1].keys():
        one, other = constants(members[0][name]), constants(members[1][name])
        if one is not None and other is not None and not any(each in other for each in one):
            return True
    for node, other_members in ((first, members[1]), (second, members[0])):
        others = second if node is first else first
        closed = others.get("additionalProperties") is False
        if closed and any(name not in other_members for name in required(node)):
            return True
    return False


def _said(node: Node) -> set[str]:
    said = node.get("type")
    names = said if isinstance(said, list) else [said]
    return {name for name in names if isinstance(name, str)}


def _shown(each: Any) -> str:
    text = repr(each)
    return text if len(text) <= 80 else text[:77] + "..."


def _names(names: list[str]) -> str:
    shown = [f"`{name}`" for name in names]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def _depth(document: Any) -> int:
    """Levels of objects and arrays."""
    level, depth = [document], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [
            child for each in level for child in (each.values() if isinstance(each, dict) else each)
        ]  # fmt: skip
    return depth
