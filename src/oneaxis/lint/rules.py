"""What is wrong with a schema as such (OV001 to OV012), whatever engine enforces it.

A constrained answer always parses; what goes wrong moves into the values. Each rule names a place where the truth is
not among what may be written, where writing need not end, or where the order forbids thinking first."""

import math
import re
import re._parser as regex_parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from oneaxis.lint.finding import Finding
from oneaxis.lint.order import is_answer, is_confidence, roles, words
from oneaxis.lint.tokens import Tokenizer, alike
from oneaxis.lint.tree import (
    GENERATED,
    Node,
    Schema,
    Value,
    children,
    constants,
    distinct,
    escape,
    everywhere,
    generated,
    properties,
    required,
    starts,
    types,
    value,
)

WAYS_OUT = frozenset((
    "unknown", "other", "others", "otherwise", "else", "none", "nothing", "nobody", "unclear", "undetermined",
    "undecided", "undecidable", "unsure", "uncertain", "unspecified", "undefined", "unidentified", "unrecognized",
    "unrecognised", "unreadable", "illegible", "unintelligible", "missing", "absent", "abstain", "unanswerable",
    "unanswered", "inconclusive", "ambiguous", "na", "nan", "nil", "null", "neither", "neutral", "irrelevant",
    "unavailable", "indeterminate", "insufficient", "idk", "dunno", "nei", "tbd", "maybe", "unassigned",
    "unlabeled", "unlabelled", "unclassified", "unclassifiable", "uncategorized", "uncategorised", "untagged",
    "unset", "unstated", "unmentioned", "unreported", "undisclosed", "unverifiable", "unverified", "unresolved",
    "unmatched", "unlisted", "unable", "tie", "misc", "miscellaneous", "oos", "blank",
    "unbekannt", "unklar", "sonstige", "sonstiges", "andere", "anderes", "keine", "inconnu", "inconnue", "autre",
    "autres", "aucun", "aucune", "desconocido", "desconocida", "otro", "otra", "otros", "ninguno", "ninguna",
    "desconhecido", "outro", "outros", "nenhum", "sconosciuto", "altro", "nessuno",
))  # fmt: skip
"""Words of a value by which a model can say that none of the others holds, or that it cannot tell."""
NEGATIONS = frozenset(("not", "no", "cannot", "non", "cant", "dont", "couldnt", "without"))
NEGATED = frozenset((
    "applicable", "available", "given", "stated", "specified", "known", "know", "sure", "certain", "found", "mentioned",
    "tell", "say", "determine", "determined", "decide", "judge", "answer", "answered", "identify", "identified",
    "enough", "sufficient", "info", "information", "data", "evidence", "provided", "reported", "recorded", "listed",
    "disclosed", "documented", "described", "indicated", "included", "assessed", "evaluated", "visible", "legible",
    "readable", "clear", "conclusive", "match", "matches", "matching", "matched", "label", "category", "class",
    "opinion", "preference", "idea", "value", "assigned", "classified", "relevant", "set", "selected", "asked",
))  # fmt: skip
"""With a negation before: `not applicable`, `cannot_tell`, `NOT ENOUGH INFO`, `no_match`, `don't know`."""
DONE = frozenset(("action", "tool", "command", "operation", "function"))
"""Last words of properties in which a model says what it does, which is never unknown."""
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
CONSTRAINING = ASSERTIONS | {"$defs", "definitions"}
KEYWORDS = CONSTRAINING | {
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "title",
    "description", "default", "deprecated", "readOnly", "writeOnly", "examples", "contentEncoding", "contentMediaType",
    "contentSchema", "nullable", "discriminator", "xml", "externalDocs", "example",
}  # fmt: skip
"""Those of JSON Schema from draft 4 on, and of OpenAPI."""
MOST_CHARACTERS, MOST_ITEMS = 1_000_000, 100_000
"""More than is written to any max_tokens of today: 128,000 tokens are half a million characters."""


def rules(schema: Schema, tokenizer: Tokenizer | None = None) -> Iterator[Finding]:
    """All findings of OV001 to OV012, in the order in which the schema is generated.

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
    for node in everywhere(schema):
        yield from _misspelt(node)
        yield from _repeated(node)


def _value(schema: Schema, node: Node, forced: bool, name: str, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """A value that is written: the root, a property, an item. `forced`: it cannot be left out."""
    if not ASSERTIONS.intersection(node.schema if isinstance(node.schema, dict) else ()) and node.schema is not False:
        yield Finding("OV008", node.pointer, "any JSON is allowed here, of any length and depth", "say its type")
        return
    found = value(schema, node)
    if found.choice is not None:
        done = words(name)[-1:]
        yield from _choice(found, found.choice, forced and DONE.isdisjoint(done), tokenizer)
    elif forced and name:
        yield from _must(name, found)


def _choice(found: Value, values: list[Any], forced: bool, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    if forced and not found.null and not any(_way_out(each) for each in values):
        yield Finding(
            "OV001",
            found.place,
            f"one of {_list(values)} must be answered, also where none of them is true or can be told",
            'add a value such as "unknown", allow null, or leave the property out of `required`; and tell the model '
            "when to use it",
        )
    for group, shared in alike(values, tokenizer):
        how = f"begin with the same token {shared!r}" if tokenizer else f"both begin with {shared!r}"
        yield Finding(
            "OV006",
            found.place,
            f"{_list(group)} {how if tokenizer or len(group) == 2 else how.replace('both', 'all')}: "
            "the probability of the first token does not tell them apart",
            "choose values that differ from the first token on" + ("" if tokenizer else "; --tokenizer tells for sure"),
            severity="" if tokenizer else "info",
        )


def _must(name: str, found: Value) -> Iterator[Finding]:
    """A fact that has to be found: not a judgement (a score, a confidence), nor a text or list, which can say so."""
    if found.null or not found.leaves or not found.known or is_confidence(name, found):
        return
    kinds = found.types
    if kinds != {"boolean"} and (is_answer(name, found) or not all(_is_fact(leaf) for leaf in found.leaves)):
        return
    if all(constants(leaf) is not None for leaf in found.leaves) and "boolean" not in kinds:
        return
    yield Finding(
        "OV007",
        found.node.pointer,
        f"{name!r} must be answered with {' or '.join(sorted(_kind(leaf) for leaf in found.leaves))}, also where the "
        "source does not say it",
        "allow null, or leave it out of `required`; if the source always says it, or there is none, ignore this",
    )


def _is_fact(leaf: Node) -> bool:
    if constants(leaf) is not None or types(leaf) <= {"boolean", "integer", "number"}:
        return True
    if types(leaf) != {"string"}:
        return False
    # A pattern in which `unknown` can be written leaves a way out: it is a bound for free text.
    pattern = leaf.get("pattern")
    return leaf.get("format") in FORMATS or (isinstance(pattern, str) and not _matches(pattern, "unknown"))


def _matches(pattern: str, text: str) -> bool:
    """As a whole, as xgrammar takes it; true where Python cannot read the pattern."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return re.fullmatch(pattern, text) is not None
    except (re.error, OverflowError, RecursionError):
        return True


def _kind(leaf: Node) -> str:
    if isinstance(form := leaf.get("format"), str):
        return form
    return "a matching string" if leaf.has("pattern") else " or ".join(sorted(types(leaf)))


def _way_out(each: Any) -> bool:
    if not isinstance(each, str):
        return False
    said = words(each)
    if not said or WAYS_OUT.intersection(said):
        return True
    if said in (["n", "a"], ["n", "k"], ["out", "of", "scope"], ["out", "of", "domain"], ["off", "topic"]):
        return True
    negated = NEGATIONS.intersection(said) or (said[:2] in (["can", "t"], ["don", "t"], ["couldn", "t"]))
    return bool(negated) and bool(NEGATED.intersection(said))


def _string(node: Node) -> Iterator[Finding]:
    said = node.get("type")
    if not ("string" in said if isinstance(said, list) else said == "string"):
        return
    if node.has("enum", "const", "$ref", "anyOf", "oneOf", "allOf") or node.get("format") in FORMATS:
        return
    pattern, most = node.get("pattern"), node.get("maxLength")
    if isinstance(most, int | float):
        if most > MOST_CHARACTERS:
            yield _no_bound("OV002", node, "maxLength", most)
    elif pattern is None:
        fix = "add `maxLength`" + ("" if node.get("format") is None else ", or a pattern that ends")
        yield Finding("OV002", node.pointer, "this string may go on until max_tokens cuts it", fix)
    elif isinstance(pattern, str) and (longest := _longest(pattern)) > MOST_CHARACTERS:
        # vLLM refuses maxLength beside a pattern on xgrammar (OV102): the bound belongs into the pattern.
        yield Finding(
            "OV002",
            node.pointer,
            f"the pattern {_short(pattern)} has "
            + ("no longest match" if math.isinf(longest) else f"a longest match of {longest:.0f} characters: no bound"),
            "bound its repeats, as in {0,200} for *",
        )


def _no_bound(code: str, node: Node, keyword: str, most: float) -> Finding:
    return Finding(
        code,
        f"{node.pointer}/{keyword}",
        f"`{keyword}` {_short(most)} is more than a model writes before max_tokens cuts it: no bound",
        "say how much can be right",
    )


def _longest(pattern: str) -> float:
    """The characters of a pattern's longest match; infinite without one, 0 where Python cannot read it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            longest = int(regex_parser.parse(pattern).getwidth()[1])
    except (re.error, OverflowError, RecursionError):
        return 0
    return longest if longest < int(regex_parser.MAXREPEAT) else math.inf


def _array(node: Node) -> Iterator[Finding]:
    kinds = types(node) if node.has("type") else set()
    if node.has("enum", "const", "$ref"):
        return
    for keyword, kind in (("maxItems", "array"), ("maxProperties", "object")):
        most = node.get(keyword)
        if kind in kinds and isinstance(most, int) and most > MOST_ITEMS:
            yield _no_bound("OV003", node, keyword, most)
    if ("array" in kinds or (not kinds and node.has("items", "prefixItems"))) and not node.has("maxItems"):
        rest = node.get("items", node.get("unevaluatedItems")) if node.has("prefixItems") else node.get("items")
        if rest is not False:
            yield Finding("OV003", node.pointer, "this array may go on until max_tokens cuts it", "add `maxItems`")
    shown = node.has("items", "prefixItems", "contains", "unevaluatedItems") or node.get("maxItems") == 0
    if "array" in kinds and not shown:
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


def _list(values: Sequence[Any]) -> str:
    """Values for a line: the first four, and how many there are."""
    shown = ", ".join(_short(each) for each in values[:4])
    return shown if len(values) <= 4 else f"{shown}, ... ({len(values)} values)"


def _misspelt(node: Node) -> Iterator[Finding]:
    """Keywords that are none, and one or two letters from one that constrains."""
    for name in node.schema if isinstance(node.schema, dict) else ():
        if name in KEYWORDS or name.startswith("x-"):
            continue
        meant = next((each for each in sorted(CONSTRAINING) if _close(name, each) and not node.has(each)), None)
        if meant:
            yield Finding(
                "OV011",
                f"{node.pointer}/{escape(name)}",
                f"`{_short(name)[1:-1]}` is no keyword of JSON Schema: nothing reads it",
                f"write `{meant}` if that is meant",
            )


def _close(name: str, keyword: str) -> bool:
    """Whether a name is a keyword but for case and separators, for one letter, or in a long one for two."""
    said, meant = re.sub(r"[\W_]", "", name).lower(), re.sub(r"\W", "", keyword).lower()
    if said == meant:
        return True
    most = 1 if len(meant) < 8 else 2
    if len(said) < 3 or len(meant) < 4 or abs(len(said) - len(meant)) > most or said[0] not in meant[:2]:
        return False
    # Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours.
    rows = [list(range(len(meant) + 1))]
    for i, letter in enumerate(said, 1):
        row = [i]
        for j, other in enumerate(meant, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == meant[j - 2] and other == said[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1] <= most


def _repeated(node: Node) -> Iterator[Finding]:
    values = node.get("enum")
    if isinstance(values, list) and len(once := distinct(values)) < len(values):
        rest = list(values)
        for each in once:
            del rest[next(index for index, other in enumerate(rest) if other is each)]
        yield Finding("OV012", f"{node.pointer}/enum", f"{_list(distinct(rest))} stands in it more than once",
                      "leave the others out, or write the value that was meant")  # fmt: skip
