"""Where sockets may lie: the system allows their paths 107 bytes, and a temporary folder of a batch job or a test may
take most of them. vLLM would start, read its weights and then fail; so a shorter folder is chosen before."""

import os
import tempfile
from pathlib import Path

from oneaxis.errors import UserError

LONGEST = 107
"""Bytes in a socket's path (Linux, without the closing zero; ZeroMQ's limit too)."""


def socket_parent(below: int) -> Path:
    """The temporary folder, or `/tmp` where a socket in the first would have too long a name.

    Args:
        below: bytes that follow the folder in the longest path, its slash included.

    Raises:
        UserError: when neither will do.
    """
    chosen = Path(tempfile.gettempdir())
    if len(os.fsencode(chosen)) + below <= LONGEST:
        return chosen
    # What is made in it has a name of its own, and nobody else has rights to it.
    short = Path("/tmp")
    if os.access(short, os.W_OK | os.X_OK):
        return short
    raise UserError(f"TMPDIR={chosen}: too long for the sockets of an engine, and /tmp cannot be written; allowed: a "
                    f"path of at most {LONGEST - below} bytes")  # fmt: skip
