"""What passes between the processor inside the engine (`processor`) and whoever asks it: names, and the lines it wrote.

Kept apart from the processor, whose import is vLLM's.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROCESSOR = "oneaxis.structured.processor:KeptMass"
FOLDER = "oneaxis_mass_folder"
"""In the engine's `additional_config`."""
REQUEST, SCHEMA, WHITESPACE, MASK = (f"oneaxis_mass_{name}" for name in ("request", "schema", "whitespace", "mask"))
"""In a request's `vllm_xargs`: its name, the JSON schema as text, `free` or `compact`, and 1 to mask or 0 to watch."""


@dataclass(frozen=True)
class Kept:
    """What the grammar left at one position."""

    kept: float
    """At the temperature of sampling (of a greedy answer at 1)."""
    at_one: float
    """At temperature 1."""
    moved: bool
    """The likeliest token of all was not allowed."""


def read_masses(folder: Path, names: Iterable[str]) -> dict[str, dict[int, Kept]]:
    """Per request its positions, counted from the first generated token.

    A position is written again when a request is prefilled in chunks or was preempted; the last line is the one that
    was sampled from. Each rank of a tensor-parallel engine writes a file of its own, with the same numbers.
    """
    wanted: dict[str, dict[int, Kept]] = {name: {} for name in names}
    for file in sorted(folder.glob("mass-*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                name, position, kept, at_one, moved = json.loads(line)
                if name in wanted:
                    wanted[name][position] = Kept(kept, at_one, bool(moved))
    return wanted
