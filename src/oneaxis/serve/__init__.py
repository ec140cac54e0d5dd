"""Start, watch and stop vLLM engines, and say what they really run."""

from oneaxis.serve.command import num_gpus
from oneaxis.serve.endpoint import Endpoint
from oneaxis.serve.engine import Engine, EngineSpec, running_engine, running_engines
from oneaxis.serve.forked import preloaded_engines
from oneaxis.serve.metrics import metric_total
from oneaxis.serve.realised import realised_config
from oneaxis.serve.smoke import smoke_answers

__all__ = [
    "Endpoint",
    "Engine",
    "EngineSpec",
    "metric_total",
    "num_gpus",
    "preloaded_engines",
    "realised_config",
    "running_engine",
    "running_engines",
    "smoke_answers",
]
