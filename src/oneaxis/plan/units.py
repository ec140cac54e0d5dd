"""Quantities as a user writes them (`3.35TB/s`, `80GiB`, `10.4ms`, `60%`) to SI numbers, and back for the reader.

A unit is asked for wherever one could be mistaken: bytes are not bits (`400Gb/s` is 50 GB/s), GB are not GiB.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oneaxis.errors import UserError


@dataclass(frozen=True)
class Dimension:
    """What a setting is measured in."""

    units: Mapping[str, float]
    """Unit -> its size in SI."""
    example: str


_BYTES = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_BITS = {"kb": 1e3, "Mb": 1e6, "Gb": 1e9, "Tb": 1e12}
BYTES = Dimension(_BYTES, "8.2GB, 80GiB")
BYTES_PER_S = Dimension(
    {f"{unit}/s": size for unit, size in _BYTES.items()} | {f"{unit}/s": size / 8 for unit, size in _BITS.items()},
    "3.35TB/s, 400Gb/s",
)
FLOPS_PER_S = Dimension({"FLOP/s": 1.0, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}, "990TFLOP/s")
SECONDS = Dimension({"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}, "10.4ms")
PER_S = Dimension({"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600}, "8/s")
TOKENS_PER_S = Dimension({"tok/s": 1.0}, "650tok/s")
PARAMETERS = Dimension({"M": 1e6, "B": 1e9, "T": 1e12}, "70B, 135M")
USD_PER_HOUR = Dimension({"USD/h": 1.0}, "2.5USD/h")

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def quantity(name: str, text: str, dimension: Dimension, *, zero: bool = False) -> float:
    """A number with a unit, in SI units.

    Args:
        name: of the setting, for the message. zero: whether 0 is allowed.

    Raises:
        UserError: no unit, another unit, not a number, not finite, negative, or 0.
    """
    found = re.fullmatch(rf"\s*({NUMBER})\s*(\S*)\s*", text)
    if not found:
        raise UserError(f"{name}={text}: not a number with a unit; allowed: such as {dimension.example}")
    if found[2] not in dimension.units:
        raise UserError(f"{name}={text}: {'no such unit here' if found[2] else 'no unit'}; allowed: a number with "
                        f"{', '.join(dimension.units)}, such as {dimension.example}")  # fmt: skip
    value = float(found[1])
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise UserError(f"{name}={text}: allowed: {'0 or more' if zero else 'more than 0'}, such as "
                        f"{dimension.example}")  # fmt: skip
    return value * dimension.units[found[2]]


def share(name: str, text: str, *, zero: bool = True, one: bool = True) -> float:
    """`0.6` or `60%`.

    Raises:
        UserError: not a number, or outside 0 to 1 (an end is excluded where `zero` or `one` is False).
    """
    low, high = "0" if zero else "above 0", "1" if one else "below 1"
    message = f"{name}={text}: allowed: a share from {low} to {high}, as 0.6 or 60%"
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UserError(message) from None
    if not 0 <= value <= 1 or (value == 0 and not zero) or (value == 1 and not one):
        raise UserError(message)
    return value


def count(name: str, text: str, *, least: int = 1) -> int:
    """A whole number.

    Raises:
        UserError: not one, or less than `least`.
    """
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = least - 1
    if value < least:
        raise UserError(f"{name}={text}: allowed: a whole number, {least} or more")
    return value


def counts(name: str, text: str, *, least: int = 1) -> list[int]:
    """`1,8,64`."""
    return [count(name, part, least=least) for part in text.split(",")]


def number(name: str, text: str, *, least: float = 0.0, above: bool = False) -> float:
    """A bare number.

    Raises:
        UserError: not finite, or less than `least` (or equal, where it must be `above`).
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least or (above and value == least):
        raise UserError(f"{name}={text}: allowed: a number, {f'above {least:g}' if above else f'{least:g} or more'}")
    return value


def positive(**values: float) -> None:
    """Refuse what a formula divides by or has no meaning for.

    Raises:
        UserError: a value is not finite and above 0, by its name.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name}={value:g}: allowed: more than 0")


def shares(**values: float) -> None:
    """Refuse what is no share.

    Raises:
        UserError: a value is not from 0 to 1, by its name.
    """
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name}={value:g}: allowed: 0 to 1")


def show(value: float | None, unit: str) -> str:
    """For the reader: four digits, with the prefix that fits (`iB`: bytes in powers of 1024)."""
    if value is None:
        return "-"
    if unit == "iB":
        return _scaled(value, (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)))
    if unit in ("B", "B/s", "FLOP/s"):
        prefixes: Sequence[tuple[str, float]] = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
        return _scaled(value, [(f"{prefix}{unit}", size) for prefix, size in prefixes])
    if unit == "s":
        return _scaled(value, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))
    if unit == "%":
        return f"{100 * value:.1f}%"
    if unit == "n":
        return f"{value:,.0f}"
    return f"{digits(value)} {unit}".rstrip()


def digits(value: float) -> str:
    """Four significant digits, and all of those before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    places = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: float, sizes: Sequence[tuple[str, float]]) -> str:
    unit, size = next(((unit, size) for unit, size in sizes if abs(value) >= size), sizes[-1])
    return f"{digits(value / size)} {unit}"
