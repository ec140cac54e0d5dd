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
    found: list[tuple[bool, str]] = []
    for index, line in enumerate(lines):
        text = plain(line)
        if not _ERROR.match(text) or any(wrapper in text for wrapper in _WRAPPERS):
            continue
        if "validation error" in text:
            # pydantic: the message stands on a line that follows.
            following = (plain(later).strip() for later in lines[index + 1 : index + 6])
            reason = next((later for later in following if "rror, " in later), "")
            text = reason.partition("rror, ")[2].partition(" [type=")[0] or text
        found.append((line.startswith(("(EngineCore", "(Worker")), text))
    in_core = [text for core, text in found if core]
    chosen = (in_core or [text for _, text in found])[-1:]
    return re.sub(r"\s+", " ", chosen[0])[:max_chars] if chosen else ""


def last_lines(lines: Sequence[str], num_lines: int, *, max_chars: int = 160) -> str:
    """The last lines that say something, each cut to `max_chars`, joined by ` | `: no progress bars, routes, access."""
    said = [text.strip() for line in lines if (text := plain(line)).strip()]
    noise = ("INFO:", "Route:", "Available routes")
    worth = [text[:max_chars] for text in said if "it/s]" not in text and not text.startswith(noise)]
    return " | ".join(worth[-num_lines:])


def kernels(lines: Sequence[str]) -> list[str]:
    """The kernels and attention backends that the engine says it uses, sorted, each once."""
    pattern = re.compile(r"(?:Using|Selected) (\w+(?= attention backend)|\w*(?:Kernel|_ATTN)\w*(?: for [\w-]+)?)")
    return sorted({found.group(1) for line in lines if (found := pattern.search(plain(line)))})
