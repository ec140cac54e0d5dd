"""What `oneaxis lint` prints: text for a person, JSON for a program, annotations for GitHub.

Names come from files and schemas, so they may hold newlines, control codes or half a character: all are escaped, in
each format, and so is what the output's encoding lacks. A file that could not be read is in every format, too.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field

from oneaxis.lint.finding import SEVERITIES, Finding, Mistake, one_line


@dataclass
class Report:
    """What a lint has found, and what it has not been able to do."""

    found: list[Finding] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What `--fix` has left alone, or changed beside its file."""
    num_read: int = 0
    num_unread: int = 0
    """Files of which something could not be read."""
    num_passed_over: int = 0
    """Files of folders that hold no schema."""
    num_fixed: int = 0
    """Objects that `--fix` has put into another order."""


def show(report: Report, form: str) -> None:
    """Print a report to standard output, and what went wrong to standard error.

    Raises:
        OSError: the output cannot be written.
    """
    try:
        {"json": _json, "github": _github, "text": _text}[form](report)
        sys.stdout.flush()
    finally:
        for line in (*report.notes, *(mistake.message for mistake in report.mistakes)):
            print(f"oneaxis: {one_line(line)}", file=sys.stderr)


def _json(report: Report) -> None:
    keys = ("code", "name", "severity", "file", "line", "pointer", "message", "fix", "fixable")
    found = [{key: getattr(finding, key) for key in keys} for finding in report.found]
    found += [
        {
            "code": None, "name": "not-read", "severity": "error", "file": mistake.file, "line": mistake.line,
            "pointer": "", "message": mistake.message, "fix": "", "fixable": False,
        }
        for mistake in report.mistakes
    ]  # fmt: skip
    print(json.dumps(found, indent=2))


def _github(report: Report) -> None:
    levels = {"error": "error", "warning": "warning", "info": "notice"}
    for finding in report.found:
        said = f"{finding.pointer or '/'}: {finding.message}; {finding.fix}"
        _annotate(levels[finding.severity], finding.file, finding.line, f"{finding.code} {finding.name}", said)
    for mistake in report.mistakes:
        _annotate("error", mistake.file, mistake.line, "not read", mistake.message)


def _annotate(level: str, file: str, line: int | None, title: str, said: str) -> None:
    """A workflow command of GitHub Actions."""

    def text(value: str) -> str:
        return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(value: str) -> str:
        return text(value).replace(":", "%3A").replace(",", "%2C")

    at = "" if line is None else f",line={line}"
    _print(f"::{level} file={value(file)}{at},title={value(title)}::{text(one_line(said))}")


def _text(report: Report) -> None:
    for finding in report.found:
        line = "" if finding.line is None else f":{finding.line}"
        star = " [*]" if finding.fixable else ""
        _print(f"{finding.file}{line}: {finding.code}{star} {finding.message}")
        _print(f"    at {finding.pointer or '/'}: {finding.fix}")
    if report.num_fixed:
        _print(f"fixed {_counted(report.num_fixed, 'object')}")
    said = []
    if report.found:
        kinds = Counter(finding.severity for finding in report.found)
        said.append(
            "found "
            + ", ".join(
                f"{kinds[kind]} {kind}{'s' * (kinds[kind] > 1 and kind != 'info')}"
                for kind in SEVERITIES
                if kinds[kind]
            )
        )
        if fixable := sum(finding.fixable for finding in report.found):
            said.append(f"{fixable} [*] fixable by --fix")
    elif report.num_read:
        said.append(f"nothing found in {_counted(report.num_read, 'file')}")
    if report.num_unread:
        said.append(f"{_counted(report.num_unread, 'file')} not read in full")
    if report.num_passed_over:
        said.append(f"{_counted(report.num_passed_over, 'file')} passed over, no schema")
    if said:
        _print("; ".join(said))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _print(line: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(one_line(line).encode(encoding, "backslashreplace").decode(encoding))
