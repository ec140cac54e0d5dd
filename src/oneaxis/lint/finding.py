"""What the lint says: a code that never changes its meaning, where, what is wrong in one line, and what to do.

    OV0xx   the schema itself: what a model can answer, and in which order it has to
    OV1xx   what an engine makes of the schema: vLLM 0.32 with its default backend, which is xgrammar 0.2.8, and
            llguidance 1.7 for what vLLM keeps from xgrammar
    OV2xx   requests

A code that is retired is not given again.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oneaxis.errors import UserError


@dataclass(frozen=True)
class Code:
    """What all findings of a code have in common."""

    name: str
    severity: str
    """error: wrong answers that nobody sees, or none at all; warning: worse answers, or a cost; info: worth a look."""
    summary: str


CODES = {
    "OV001": Code("no-way-out", "error", "an enum that must be answered and has no value for `cannot tell`"),
    "OV002": Code("unbounded-string", "warning", "a string without an end"),
    "OV003": Code("unbounded-array", "warning", "an array or a map without an end"),
    "OV004": Code("answer-before-reasoning", "error", "an answer declared before its reasoning or evidence"),
    "OV005": Code("confidence-first", "warning", "a self-reported confidence before, or without, what it is about"),
    "OV006": Code("shared-first-token", "warning", "enum values that begin with the same token"),
    "OV007": Code("required-without-null", "info", "a required fact that must be made up when it is not known"),
    "OV008": Code("any-value", "warning", "a schema that allows any JSON"),
    "OV009": Code("never-ends", "error", "a recursion that no answer can end"),
    "OV010": Code("unbounded-depth", "info", "a recursion without a deepest level"),
    "OV011": Code("misspelt-keyword", "error", "a name that is almost a keyword, and that nothing reads"),
    "OV012": Code("repeated-value", "warning", "an enum in which a value stands twice"),
    "OV101": Code("not-enforced", "error", "a constraint that the engine drops without a word"),
    "OV102": Code("other-backend", "warning", "a constraint for which vLLM changes the backend, or refuses"),
    "OV103": Code("refused", "error", "a constraint with which vLLM refuses the request"),
    "OV104": Code("stricter", "warning", "a constraint that the engine reads more narrowly than the standard"),
    "OV105": Code("open-object", "warning", "an object that one backend closes and the other leaves open"),
    "OV201": Code("frequency-penalty", "error", "frequency_penalty on a structured or code request"),
    "OV202": Code("presence-penalty", "error", "presence_penalty on a structured or code request"),
    "OV203": Code("repetition-penalty", "error", "repetition_penalty on a structured or code request"),
    "OV204": Code("guided-ignored", "error", "a guided_* field, which vLLM no longer reads"),
    "OV205": Code("whitespace-ignored", "warning", "a whitespace setting in the request, which vLLM does not read"),
}
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One thing to change."""

    code: str
    pointer: str
    """JSON pointer of where, in the document or in the schema of a model."""
    message: str
    """One line."""
    fix: str
    """What to do, one line."""
    fixable: bool = False
    """Whether `--fix` does it."""
    severity: str = ""
    """Of the code, unless the finding says another."""
    file: str = ""
    line: int | None = None

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", CODES[self.code].severity)

    @property
    def name(self) -> str:
        """The code in words."""
        return CODES[self.code].name


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def one_line(text: str) -> str:
    """A text as one line of plain characters: a name from a schema or a disk may hold newlines and control codes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class Mistake:
    """What could not be read or written: a line that begins with its file."""

    file: str
    message: str

    @property
    def line(self) -> int | None:
        """The line of the file that the message names."""
        found = re.match(r":(\d+)(?=[: ])", self.message.removeprefix(self.file))
        return int(found[1]) if found and self.message.startswith(self.file) else None


def chosen(findings: Iterable[Finding], select: Sequence[str] = (), ignore: Sequence[str] = ()) -> list[Finding]:
    """The findings whose code begins with one of `select` (none: all) and with none of `ignore`.

    Raises:
        UserError: a prefix that no code begins with.
    """
    for option, prefixes in (("--select", select), ("--ignore", ignore)):
        for prefix in prefixes:
            if not prefix or not any(code.startswith(prefix) for code in CODES):
                raise UserError(
                    f"{option}: {prefix!r} is no code; allowed: OV, or the beginning of one of {', '.join(CODES)}"
                )
    return [
        finding
        for finding in findings
        if finding.code.startswith(tuple(select) or "OV") and not finding.code.startswith(tuple(ignore) or ("-",))
    ]
