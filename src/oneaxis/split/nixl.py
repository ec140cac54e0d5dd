"""Whether keys and values can be moved at all: NIXL is an optional package, asked for before anything runs."""

from importlib.util import find_spec

from oneaxis.errors import UserError


def check_nixl(kind: str) -> None:
    """Refuse a split deployment where NIXL is not installed.

    Raises:
        UserError: saying what to install.
    """
    if find_spec("nixl") is None:
        raise UserError(f"split={kind}: the package nixl is not installed, so keys and values cannot be moved; "
                        "allowed: split=none, or after `uv pip install --no-deps nixl nixl-cu12`")  # fmt: skip
