"""Where values stand in a JSON text. Oracle: `json`, by the values that it reads from the same text."""

import json
import random
from typing import Any

import pytest

from oneaxis.structured.spans import Span, value_spans


def drawn(depth: int) -> Any:
    kind = random.choice(["word", "number", "literal"] + ["object", "array"] * (depth > 0))
    match kind:
        case "object":
            return {f"k{number} {random.choice('ab:,{')}": drawn(depth - 1) for number in range(random.randint(0, 3))}
        case "array":
            return [drawn(depth - 1) for _ in range(random.randint(0, 3))]
        case "word":
            return "".join(random.choice('ab "\\{}[]:,é\n') for _ in range(random.randint(0, 6)))
        case "number":
            return random.choice([0, -3, 12.5, 1e20, 704])
        case _:
            return random.choice([True, False, None])


def scalars(value: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    if isinstance(value, dict):
        return {key: found for name, part in value.items() for key, found in scalars(part, (*path, name)).items()}
    if isinstance(value, list):
        return {key: found for name, part in enumerate(value) for key, found in scalars(part, (*path, name)).items()}
    return {path: value}


def test_every_scalar_is_found_where_it_stands() -> None:
    for _ in range(300):
        value = {"a": drawn(3), "b": drawn(2)}
        text = json.dumps(value, ensure_ascii=random.random() < 0.5, indent=random.choice([None, 2]))
        spans = {span.path: span for span in value_spans(f"{text}\nand more: 3")}
        known = scalars(value)
        assert spans.keys() == known.keys(), text
        for path, span in spans.items():
            shown = text[span.start : span.end]
            assert span.closed
            assert json.loads(f'"{shown}"' if isinstance(known[path], str) else shown) == known[path]


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ('{"a": "bc', [Span(("a",), 7, 9, False)]),
        ('{"a": 12', [Span(("a",), 6, 8, False)]),
        ('{"a": 12,', [Span(("a",), 6, 8, True)]),
        ('{"a": [1, {"b": "', [Span(("a", 0), 7, 8, True), Span(("a", 1, "b"), 17, 17, False)]),
        ('{"a', []),
        ("", []),
        ("Sure: {", []),
        ("}", []),
        ("{'a': 1}", []),
    ],
)
def test_a_text_that_was_cut_off_or_is_no_json_gives_what_it_has(text: str, spans: list[Span]) -> None:
    assert value_spans(text) == spans
