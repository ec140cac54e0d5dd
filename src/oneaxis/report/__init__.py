"""The report of one run: every stage's artifacts in, one self-contained page and one short card out."""

from oneaxis.report.write import write_report

__all__ = ["write_report"]
