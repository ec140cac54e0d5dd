"""What the engine's log says: the phases of its start, why it died, and which kernels it chose.

vLLM has no other account of these three. Lines look like
`(EngineCore pid=31) ERROR 11-29 16:15:43 [core.py:133] ValueError: ...`; uncaught exceptions come without the prefix.
"""

import re
from collections.abc import Sequence

MARKS = (
    ("imports_s", "non-default args:"),
    ("config_s", "Initializing a V1 LLM engine"),
    ("engine_s", "Starting to load model"),
    ("weights_s", "Loading weights took"),
    ("kv_cache_s", "KV cache size:"),
    ("warmup_s", "Supported tasks:"),
)
"""Phases of a start in their order, and the text whose appearance ends each; what follows the last is `server_s`."""

_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+[^)]*\) ?)?(?:(?:ERROR|WARNING|INFO|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Killed))(?:: |$)")
_ARGPARSE = re.compile(r"^\S+: error: (.*)$")
_WRAPPERS = (
    "Engine core initialization failed",
    "EngineDeadError",
    "CancelledError",
    "KeyboardInterrupt",
    "SystemExit",
    "ConnectionResetError",
    "BrokenPipeError",
)
"""Errors that only report another one."""

_CORE_ENDED = ("EngineDeadError", "Engine core initialization failed", "died unexpectedly")
"""What the API server says of an engine core that is gone."""

_NOISE = ("INFO:", "Route:", "Available routes", "nanobind:", "- leaked", "- ... skipped", "See https://nanobind")
"""Access, routes, and what nanobind says whenever the interpreter ends."""


def plain(line: str) -> str:
    """A line without the process, level, time and place that vLLM puts before it."""
    return _PREFIX.sub("", line.rstrip(), count=1)


def refused_arguments(lines: Sequence[str]) -> str:
    """What the engine's argument parser said when it refused the command line, or an empty string."""
    for line in lines:
        if found := _ARGPARSE.match(plain(line)):
            return found.group(1)
    return ""


def root_error(lines: Sequence[str], *, max_chars: int = 400) -> str:
    """The error that ended the engine, in one line; empty when the log shows none.

    That is the last error that does not merely report another one. The engine core's own come before those of the API
    server, which sees the core's death from outside.
    """
    return _last_error(lines)[1][:max_chars]


def refused_configuration(lines: Sequence[str]) -> str:
    """Why the engine refused to run as configured, or an empty string.

    That is a ValueError or pydantic's ValidationError that ends the start, except while the weights are read: those
    are the checkpoint's. (Whether block size and KV cache suit the model is only known after the weights.)
    """
    index, text, kind = _last_error(lines)
    before = "\n".join(lines[:index])
    marks = dict(MARKS)
    reads = marks["engine_s"] in before and marks["weights_s"] not in before
    started = marks["warmup_s"] in before
    return text[:400] if kind in ("ValueError", "ValidationError") and not reads and not started else ""


def core_ended(lines: Sequence[str]) -> bool:
    """Whether the log says that the engine core is gone."""
    return any(text in line for line in lines for text in _CORE_ENDED)


def port_taken(lines: Sequence[str]) -> bool:
    """Whether the engine ended because something listens on its port."""
    return "ddress already in use" in root_error(lines)


def _last_error(lines: Sequence[str]) -> tuple[int, str, str]:
    """Line number, text and class of the error that `root_error` is about; (0, "", "") without one."""
    found: list[tuple[bool, tuple[int, str, str]]] = []
    for index, line in enumerate(lines):
        text = plain(line)
        error = _ERROR.match(text)
        if not error or any(wrapper in text for wrapper in _WRAPPERS):
            continue
        if "validation error" in text:
            # pydantic: the message stands on a line that follows.
            following = (plain(later).strip() for later in lines[index + 1 : index + 6])
            reason = next((later for later in following if "rror, " in later), "")
            text = reason.partition("rror, ")[2].partition(" [type=")[0] or text
        found.append((line.startswith(("(EngineCore", "(Worker")), (index, re.sub(r"\s+", " ", text), error.group(1))))
    in_core = [error for core, error in found if core]
    chosen = in_core or [error for _, error in found]
    return chosen[-1] if chosen else (0, "", "")


def last_lines(lines: Sequence[str], num_lines: int, *, max_chars: int = 160) -> str:
    """The last lines that say something, each cut to `max_chars`, joined by ` | `, without progress bars and noise."""
    said = [text.strip() for line in lines if (text := plain(line)).strip()]
    worth = [text[:max_chars] for text in said if "it/s]" not in text and not text.startswith(_NOISE)]
    return " | ".join(worth[-num_lines:])


def kernels(lines: Sequence[str]) -> list[str]:
    """The kernels and attention backends that the engine says it uses, sorted, each once."""
    pattern = re.compile(r"(?:Using|Selected) (\w+(?= attention backend)|\w*(?:Kernel|_ATTN)\w*(?: for [\w-]+)?)")
    return sorted({found.group(1) for line in lines if (found := pattern.search(plain(line)))})
