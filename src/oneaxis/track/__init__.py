"""MLflow: one complete run per state of the pipeline; one parent and one child a job per multirun; pages that open
on what matters.

`content` reads what a folder of results says, `write` makes a run hold it, `run` and `multirun` say which run that is,
`pages` gives addresses. What a stage itself calls while it works is `oneaxis.live`.
"""

from oneaxis.live import ensure_store, live_logger
from oneaxis.names import model_name, run_name
from oneaxis.track.multirun import finish_multirun, open_parent, track_job, track_multiruns
from oneaxis.track.pages import multirun_page, runs_page
from oneaxis.track.run import track, track_in_stage

__all__ = [
    "ensure_store",
    "finish_multirun",
    "live_logger",
    "model_name",
    "multirun_page",
    "open_parent",
    "run_name",
    "runs_page",
    "track",
    "track_in_stage",
    "track_job",
    "track_multiruns",
]
