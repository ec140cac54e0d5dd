"""Outputs made up here, laid out for the tests of what reads them."""

import random
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.diverge.measure import LEVELS, OUTPUTS
from oneaxis.diverge.run import write_record
from tests.serve.tiny import serve

REALISED: dict[str, Any] = {"asked": {}, "resolved": {"dtype": "bfloat16"}, "checkpoint": {}, "differences": []}
LENGTH, PART = 20, 6


def write_outputs(
    folder: Path, *, prompts: int = 12, several: int = 0, repeats: int = 3, realised: dict[str, Any] = REALISED
) -> dict[str, Any]:
    """Write the record of the stage to `folder`: alone all outputs are equal, under load the last one of each of the
    first `several` prompts leaves the others at token 6, an exact tie, for the second choice."""
    draw = random.Random(0)
    rows = []
    for level, together, steps in zip(LEVELS, (1, 4), (1.0, 3.5), strict=True):
        for prompt in range(prompts):
            ids = [100 + prompt] * LENGTH
            gaps = [0.0 if place == PART else 0.5 + draw.random() for place in range(LENGTH)]
            for repeat in range(repeats):
                parts = level == "loaded" and prompt < several and repeat == repeats - 1
                own = ids[:PART] + [7] * (LENGTH - PART) if parts else ids
                rows.append((prompt, level, together, repeat, own, False, gaps, [7] * LENGTH, steps, 0.0))
    table = pl.DataFrame(rows, schema=OUTPUTS, orient="row")
    asked = {prompt: [prompt, 1, 2] for prompt in range(prompts)}
    folder.mkdir(parents=True, exist_ok=True)
    return write_record(folder, table, asked, realised, serve(), emptied=True)
