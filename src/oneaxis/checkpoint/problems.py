"""What is wrong with a checkpoint, in words: apart from the loaders, whose code not every stage depends on."""

from collections.abc import Sequence
from typing import Any

from oneaxis.errors import UserError


def misfits(report: dict[str, Any]) -> list[str]:
    """The tensors that `from_pretrained` did not find or could not use, from its `output_loading_info`.

    For those transformers draws random weights, and only says so in a log.
    """
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    return wrong + [other_shape(*mismatch) for mismatch in sorted(report["mismatched_keys"])]


def other_shape(name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    """A tensor that is not of the shape that its model has."""
    return f"{name} has shape {list(stored)}, not {list(expected)}"


def require_whole(where: str, wrong: list[str]) -> None:
    """Refuse, with a UserError, a model of which `wrong` names a tensor."""
    if wrong:
        others = f" ({len(wrong) - 1} more do not fit)" if len(wrong) > 1 else ""
        raise UserError(f"{where}: {wrong[0]}{others}; allowed: the tensors of the model that config.json describes")


def first_line(error: Exception) -> str:
    """The line of an error of transformers that tells the reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A first line that ends in a colon only announces the reason.
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])[:200]
