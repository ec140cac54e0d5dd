"""What xgrammar 0.2.8 does not compile: patterns that are no regular expression, and bounds that it cannot hold.

vLLM hands such a schema to llguidance (OV102), or refuses it where that cannot either (OV103). Nothing is asked of an
engine here: xgrammar brings torch with it, and llguidance ends its process on `maxItems: 100000000`. A test asks both,
of schemas and patterns made at random, in a process of its own.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from oneaxis.lint.finding import Finding
from oneaxis.lint.tree import SHAPES, Node, Schema, children, generated, properties, required, types

COUNTS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
INT64 = 2**63
INT32 = 2**31
REPEAT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
GROUP = re.compile(r"\?(?::|=|!|<=|<!|P?<\w*>|[a-zA-Z-]+[):])")
CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})")


def false_schemas(schema: Schema) -> Iterator[Finding]:
    """Places at which the schema is `false`, so that nothing can be written there.

    Raises:
        UserError: a reference that leads nowhere or in a circle; more subschemas than are looked at.
    """

    def nothing(node: Node) -> bool:
        target = schema.target(node) if node.has("$ref") else node
        return target is not None and target.schema is False

    for node in generated(schema):
        if node.pointer == "" and nothing(node):
            yield _nothing(node, forced=True)
        for keyword in ("properties", "patternProperties", "prefixItems", "anyOf", "oneOf", "allOf"):
            below = [child for _, child in children(node, (keyword,))]
            none = [nothing(child) for child in below]
            for index, child in enumerate(below):
                if not none[index]:
                    continue
                if keyword == "properties":
                    forced = list(properties(node))[index] in required(node)
                elif keyword == "prefixItems":
                    least = node.get("minItems", 0)
                    forced = isinstance(least, int) and least > index
                else:
                    forced = keyword == "allOf" or (keyword in ("anyOf", "oneOf") and all(none))
                yield _nothing(child, forced)


def _nothing(node: Node, forced: bool) -> Finding:
    if forced:
        return Finding("OV103", node.pointer, "`false` has to be answered here, and allows no value", "say its type")
    return Finding(
        "OV102",
        node.pointer,
        "xgrammar compiles no `false` (Schema 'false' cannot accept any value): vLLM hands the schema to llguidance",
        "leave it out, and close the object with `additionalProperties: false`",
    )


def bounds(node: Node) -> Iterator[Finding]:
    """Bounds that cannot be held, or that exclude each other.

    Beside constants xgrammar looks at none of them, and without a type only where the keywords show one.
    """
    if node.get("enum") == [] and not node.has("const"):
        yield Finding("OV103", f"{node.pointer}/enum", "an empty enum allows nothing", "give it values")
    if node.has("enum", "const", "$ref", "anyOf", "oneOf", "allOf"):
        return
    kinds = types(node) if node.has("type", *(keyword for each in SHAPES.values() for keyword in each)) else set()
    for kind, keywords in COUNTS.items():
        if kind in kinds:
            yield from _counts(node, *keywords)
    if "array" in kinds:
        yield from _items(node)
    if "object" in kinds:
        yield from _members(node)
    if kinds & {"integer", "number"}:
        yield from _numbers(node, whole="integer" in kinds)


def _counts(node: Node, low: str, high: str) -> Iterator[Finding]:
    least, most = node.get(low), node.get(high)
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield Finding("OV103", f"{node.pointer}/{low}", f"`{low}` {least} is above `{high}` {most}", "mend one")
    for keyword, value in ((low, least), (high, most)):
        if isinstance(value, float):
            yield Finding(
                "OV103",
                f"{node.pointer}/{keyword}",
                f"`{keyword}` {value!r} is written as a fraction: neither xgrammar nor llguidance takes it",
                "write a whole number, without a point or an exponent",
            )
        elif keyword == "minLength" and isinstance(value, int) and value >= INT32:
            yield Finding(
                "OV102",
                f"{node.pointer}/{keyword}",
                f"xgrammar takes no `minLength` above {INT32 - 1}",
                "give one that can be written",
            )


def _items(node: Node) -> Iterator[Finding]:
    fixed = node.get("prefixItems")
    first = len(fixed) if isinstance(fixed, list) else 0
    closed = node.get("items") is False or node.get("unevaluatedItems") is False
    least, most = node.get("minItems", 0), node.get("maxItems", first)
    if isinstance(least, int) and least > first and (closed or not node.has("items", "unevaluatedItems")):
        yield Finding(
            "OV103" if closed else "OV102",
            f"{node.pointer}/minItems",
            f"`minItems` {least}, and only {first} items are allowed"
            if closed
            else f"xgrammar takes no `minItems` {least} where no `items` are declared, and vLLM hands the schema on",
            "mend one" if closed else "say what `items` are",
        )
    elif isinstance(most, int) and most < first:
        yield Finding(
            "OV102",
            f"{node.pointer}/maxItems",
            f"xgrammar takes no `maxItems` {most} below the {first} of `prefixItems`",
            "leave out the items that cannot be written",
        )
    elif most and node.has("maxItems") and not node.has("items", "unevaluatedItems", "prefixItems"):
        yield Finding(
            "OV104",
            f"{node.pointer}/maxItems",
            "beside `maxItems` xgrammar lets only [] be written where no `items` are declared",
            "say what `items` are",
        )


def _members(node: Node) -> Iterator[Finding]:
    names = node.get("propertyNames")
    if isinstance(names, bool):
        yield Finding(
            "OV103",
            f"{node.pointer}/propertyNames",
            "neither xgrammar nor llguidance takes a boolean for `propertyNames`",
            "leave it out, or close the object with `additionalProperties: false`",
        )
    must, members = len(required(node)), len(properties(node))
    least, most = node.get("minProperties", 0), node.get("maxProperties", must)
    more = node.get("additionalProperties", node.get("unevaluatedProperties"))
    keyed = node.has("patternProperties", "propertyNames")
    if isinstance(least, int) and least > members and more in (None, False) and not keyed:
        # llguidance counts the keys of an open object only if it asks for each of those that it names.
        taken = more is None and all(name in required(node) for name in properties(node))
        yield Finding(
            "OV102" if taken else "OV103",
            f"{node.pointer}/minProperties",
            f"`minProperties` {least}, and only {members} properties can be written"
            + (" with xgrammar: vLLM hands the schema on" if taken else ""),
            "name the properties" if taken else "mend one",
        )
    if isinstance(most, int) and most < must:
        yield Finding(
            "OV103", f"{node.pointer}/maxProperties", f"`maxProperties` {most}, and {must} are required", "mend one"
        )
    elif most and node.has("maxProperties") and more is None and not keyed and not node.has("properties"):
        yield Finding(
            "OV104",
            f"{node.pointer}/maxProperties",
            "beside `maxProperties` xgrammar lets only {} be written where no `additionalProperties` are declared",
            "say what `additionalProperties` are",
        )


def _numbers(node: Node, whole: bool) -> Iterator[Finding]:
    found = []
    for keyword in (*LOW, *HIGH):
        value = node.get(keyword)
        at = f"{node.pointer}/{keyword}"
        if isinstance(value, bool):
            found.append(Finding(
                "OV102",
                at,
                f"xgrammar takes a number for `{keyword}`, not {str(value).lower()} as in draft 4",
                "write the bound itself, as JSON Schema has it since draft 6" if value else "leave it out",
            ))  # fmt: skip
        elif not isinstance(value, int | float):
            continue
        elif not math.isfinite(value):
            found.append(Finding(
                "OV103", at, f"`{keyword}` is beyond what a float holds, and is read as infinity", "leave it out"
            ))  # fmt: skip
        elif whole and value != int(value):
            found.append(Finding(
                "OV102",
                at,
                f"xgrammar takes no `{keyword}` {value!r} for an integer: it must be a whole number",
                f"write {math.ceil(value) if keyword in LOW else math.floor(value)}"
                if keyword in ("minimum", "maximum")
                else f"write it as `{'minimum' if keyword in LOW else 'maximum'}`, in whole numbers",
            ))  # fmt: skip
        elif whole and not -INT64 <= value < INT64:
            # What bounds nothing that llguidance counts is let through: a largest value beyond its largest.
            passes = keyword in HIGH and value > 0
            found.append(Finding(
                "OV102" if passes else "OV103",
                at,
                f"xgrammar takes no `{keyword}` of more than 64 bits ({value!r}) for an integer"
                + ("" if passes else "; neither does llguidance"),
                "leave it out, or give one that can occur",
            ))  # fmt: skip
    yield from found
    if reason := _empty(node, whole):
        yield Finding("OV103", f"{node.pointer}/{reason[0]}", reason[1], "mend one")


def _empty(node: Node, whole: bool) -> tuple[str, str] | None:
    """The lower bound that leaves no number, and how to say so."""

    def limit(keywords: tuple[str, str], sign: int) -> tuple[Any, str] | None:
        """The tightest of two bounds; upper ones are negated, so that the larger is the tighter."""
        held = []
        for strict, keyword in enumerate(keywords):
            value = node.get(keyword)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                least = (math.floor(sign * value) + 1 if strict else math.ceil(sign * value)) if whole else sign * value
                held.append(((least, strict and not whole), keyword))
        return max(held) if held else None

    low, high = limit(LOW, 1), limit(HIGH, -1)
    if low is None or high is None:
        return None
    (least, over), (most, under) = low[0], high[0]
    if least < -most or (least == -most and not over and not under):
        return None
    return low[1], f"`{low[1]}` {node.get(low[1])} and `{high[1]}` {node.get(high[1])} leave no number between them"


def regex_fault(pattern: str) -> tuple[str, bool] | None:
    """Why a pattern is no regular expression to xgrammar, and whether llguidance refuses it too; None if it is one."""
    depth, index = 0, 0
    # Whether something stands before that can be repeated: not at the beginning, nor behind ( and |.
    element = anchor = False
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            if fault := _escape_fault(pattern, index):
                return fault, index + 1 < len(pattern)
            index += _escape_length(pattern, index)
        elif character == "[":
            fault, index = _class_fault(pattern, index)
            if fault:
                return fault, True
        elif character == "(":
            depth += 1
            index += 1
            if pattern.startswith("?", index):
                group = GROUP.match(pattern, index)
                if group is None:
                    return f"an unknown group at character {index}", True
                index = group.end()
                depth -= group.group().endswith(")")
            element = anchor = False
            continue
        elif character == ")":
            depth -= 1
            if depth < 0:
                return f"nothing is open for the ) at character {index + 1}", True
            index += 1
        elif character == "|":
            index += 1
            element = anchor = False
            continue
        elif character in "*+?{":
            repeat = REPEAT.match(pattern, index)
            if character == "{" and repeat is None:
                return f"no repeat count behind the {{ at character {index + 1}", True
            if repeat is not None and repeat[3] and int(repeat[3]) < int(repeat[1]):
                return f"a repeat of at least {repeat[1]} and at most {repeat[3]} at character {index + 1}", True
            if not element:
                return f"nothing to repeat before the {character} at character {index + 1}", not (
                    anchor and character in "+{"
                )
            index += 1 if repeat is None else len(repeat.group())
        elif character in "^$":
            # No element: what can be repeated before it still can, and what is not there is still missing.
            index += 1
            anchor = not element
            continue
        else:
            index += 1
        element = True
    return ("a ( is not closed", True) if depth else None


def _escape_fault(pattern: str, index: int) -> str:
    if index + 1 == len(pattern):
        return "an escape without a character at its end"
    if pattern[index + 1] == "c" and not re.match(r"[A-Za-z]", pattern[index + 2 : index + 3]):
        return f"\\c without a letter at character {index + 1}"
    return ""


def _escape_length(pattern: str, index: int) -> int:
    """Characters of an escape; \\p{...}, \\k<...> and code points have more than two."""
    found = re.compile(r"\\(?:[pPu]\{[^}]*\}|k<[^>]*>|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|c[A-Za-z]|.)", re.DOTALL).match(
        pattern, index
    )
    return len(found.group()) if found else 2


def _class_fault(pattern: str, start: int) -> tuple[str, int]:
    """Why the class that begins here is none, and the place behind it."""
    index = start + 1 + pattern.startswith("^", start + 1)
    if pattern.startswith("]", index):
        return ("an empty class", index) if index == start + 1 else ("", index + 1)
    before: int | None = None
    while index < len(pattern) and pattern[index] != "]":
        if pattern[index] == "-" and before is not None and pattern[index + 1 : index + 2] not in ("", "]"):
            fault, last, index = _member(pattern, index + 1)
            if fault:
                return fault, index
            # xgrammar writes \\d and its like as a class of their own: the range ends at its bracket.
            if before > (ord("[") if last is None else last):
                return f"a range that runs backwards before character {index + 1}", index
            before = None
        else:
            fault, before, index = _member(pattern, index)
            if fault:
                return fault, index
    return ("", index + 1) if index < len(pattern) else (f"the [ at character {start + 1} is not closed", index)


def _member(pattern: str, index: int) -> tuple[str, int | None, int]:
    """Of a class: what is wrong with a member, its code point (None of a class in it), and the place behind it."""
    if pattern[index] != "\\":
        return "", ord(pattern[index]), index + 1
    if fault := _escape_fault(pattern, index):
        return fault, None, index
    behind = index + _escape_length(pattern, index)
    if code := CODE.match(pattern, index):
        return "", int(next(filter(None, code.groups())), 16), behind
    name = pattern[index + 1]
    if name in "dDwWsSpP":
        return "", None, behind
    return "", {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "b": 8, "0": 0}.get(name, ord(name)), behind
