"""The reports: of one run, every stage's artifacts in; of a multirun, its records and verdicts in. Out comes one
self-contained page, and result cards of at most 60 words."""

from oneaxis.report.multirun import write_multirun_report
from oneaxis.report.write import write_report

__all__ = ["write_multirun_report", "write_report"]
