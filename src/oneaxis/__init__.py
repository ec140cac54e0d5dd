"""oneaxis: change one thing, and learn whether it helped and whether the number can be trusted."""

from oneaxis.errors import RunError, UserError

__version__ = "0.1.0"
__all__ = ["RunError", "UserError", "__version__"]
