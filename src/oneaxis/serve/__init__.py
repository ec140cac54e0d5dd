"""Start, watch and stop vLLM engines, and say what they really run."""

from oneaxis.serve.attach import is_here
from oneaxis.serve.command import num_gpus
from oneaxis.serve.endpoint import Endpoint
from oneaxis.serve.engine import Engine, EngineSpec, running_engine, running_engines, serving
from oneaxis.serve.forked import preloaded_engines
from oneaxis.serve.metrics import metric_total
from oneaxis.serve.realised import realised_config, realised_table
from oneaxis.serve.smoke import smoke_answers

__all__ = [
    "Endpoint",
    "Engine",
    "EngineSpec",
    "is_here",
    "metric_total",
    "num_gpus",
    "preloaded_engines",
    "realised_config",
    "realised_table",
    "running_engine",
    "running_engines",
    "serving",
    "smoke_answers",
]
