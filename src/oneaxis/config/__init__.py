"""Settings: composed by Hydra from `conf/`, typed by pydantic, handed to the stages through `params.yaml`."""

from oneaxis.config.compose import compose, load_stage_config, read_params, render_params, write_params
from oneaxis.config.schema import STAGE_SECTIONS, Config, derived_paths

__all__ = [
    "STAGE_SECTIONS",
    "Config",
    "compose",
    "derived_paths",
    "load_stage_config",
    "read_params",
    "render_params",
    "write_params",
]
