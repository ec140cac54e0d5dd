"""Small models compared by quality and by what they need: SHIFT, PIR and WCS from a table of models.

    SHIFT    = 0.4 H + 0.6 I                           quality, 0 to 100
    PIR      = I H F / (S T)                           efficiency
    PIR_norm = 100 log10(PIR) / log10(max PIR)         over the table
    WCS      = sqrt(SHIFT x PIR_norm)

H honesty and I intelligence from 0 to 100, F tokens/s, S billions of parameters (active ones of a mixture of experts),
T memory in GB. A PIR below 1 has no WCS, nor has anything where no PIR exceeds 1: undefined, not NaN. A memory that
does not even hold the weights is none that the model runs in: that row is not ranked, and sets no maximum.
"""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from oneaxis.errors import UserError

Score = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Candidate(BaseModel):
    """A row of the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)]
    H: Score | None = None
    """None: not scored."""
    I: Score | None = None  # noqa: E741
    F: Amount
    S: Amount
    T: Amount
    params_b: Amount | None = None
    """All parameters, billions, where S counts the active ones."""
    bits: Amount = 4.0
    """Of a weight in memory."""


@dataclass(frozen=True)
class Ranked:
    """What follows for one of them."""

    model: str
    shift: float | None
    pir: float | None
    pir_norm: float | None
    wcs: float | None
    why: str
    """Where there is no WCS."""


def shift(honesty: float, intelligence: float) -> float:
    """0.4 H + 0.6 I."""
    return 0.4 * honesty + 0.6 * intelligence


def pir(candidate: Candidate) -> float | None:
    """I H F / (S T); None where H or I is not scored."""
    if candidate.H is None or candidate.I is None:
        return None
    return candidate.I * candidate.H * candidate.F / (candidate.S * candidate.T)


def weights_gb(candidate: Candidate) -> float:
    """Of all weights alone."""
    return (candidate.params_b or candidate.S) * candidate.bits / 8


def rank(candidates: Sequence[Candidate]) -> list[Ranked]:
    """In the order of the table."""
    fits = {one.model: weights_gb(one) <= one.T for one in candidates}
    rates = {one.model: pir(one) for one in candidates}
    most = max((rate for name, rate in rates.items() if rate is not None and fits[name]), default=0.0)
    found = []
    for one in candidates:
        rate = rates[one.model]
        quality = None if one.H is None or one.I is None else shift(one.H, one.I)
        norm, why = None, ""
        if not fits[one.model]:
            why = f"does not fit: its {one.bits:g}-bit weights alone are {weights_gb(one):.3g} GB of {one.T:g}"
        elif rate is None:
            why = f"{'H' if one.H is None else 'I'} is not scored"
        elif rate < 1:
            why = "PIR below 1"
        elif most <= 1:
            why = "no PIR above 1 in the table"
        else:
            norm = 100 * math.log10(rate) / math.log10(most)
        wcs = None if norm is None or quality is None else math.sqrt(quality * norm)
        found.append(Ranked(one.model, quality, rate, norm, wcs, why))
    return found


def read_table(path: Path) -> list[Candidate]:
    """A CSV or JSON table.

    Raises:
        UserError: it is missing, has no rows, names a model twice, or holds what is no candidate.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read; allowed: a CSV or JSON file") from error
    rows: list[Any]
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: not JSON: {error}") from error
    elif path.suffix == ".csv":
        rows = [_given(row) for row in csv.DictReader(text.splitlines())]
    else:
        raise UserError(f"{path}: allowed: a file that ends in .csv or .json")
    try:
        found = TypeAdapter(list[Candidate]).validate_python(rows)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = f"row {int(problem['loc'][0]) + 1}, {'.'.join(map(str, problem['loc'][1:]))}" if problem["loc"] else ""
        given = "" if isinstance(problem["input"], dict | list) else f"={problem['input']!r}"
        raise UserError(f"{path}: {where}{given}: {problem['msg'].lower()}; allowed: model, H and I (0 to 100), F "
                        "(tokens/s), S (billions of parameters), T (GB), params_b, bits") from error  # fmt: skip
    names = [one.model for one in found]
    if not found or len(set(names)) != len(names):
        raise UserError(f"{path}: allowed: at least one row, each model once")
    return found


def _given(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """An empty cell is one that is not there."""
    return {key: value for key, value in row.items() if value != ""}
