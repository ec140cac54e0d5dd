"""Start, watch and stop a vLLM engine, and say what it really runs."""

from oneaxis.serve.command import num_gpus
from oneaxis.serve.engine import Engine, running_engine
from oneaxis.serve.metrics import metric_total
from oneaxis.serve.realised import realised_config
from oneaxis.serve.smoke import smoke_answers

__all__ = ["Engine", "metric_total", "num_gpus", "realised_config", "running_engine", "smoke_answers"]
