"""What is read from the engine's log. The texts are shortened from logs of vLLM 0.32."""

import pytest

from oneaxis.serve.engine import how_it_ended
from oneaxis.serve.log import kernels, last_lines, refused_arguments, refused_configuration, root_error

CORE_DIED = """\
(EngineCore pid=31) ERROR 11-29 16:15:43 [core.py:1133] EngineCore failed to start.
(EngineCore pid=31) ERROR 11-29 16:15:43 [core.py:1133] Traceback (most recent call last):
(EngineCore pid=31) ERROR 11-29 16:15:43 [core.py:1133]   File "core.py", line 1, in run
(EngineCore pid=31) ERROR 11-29 16:15:43 [core.py:1133] safetensors_rust.SafetensorError: incomplete metadata
(APIServer pid=30) Traceback (most recent call last):
(APIServer pid=30)     raise RuntimeError(
(APIServer pid=30) RuntimeError: Engine core initialization failed. See root cause above.
""".splitlines()

BAD_CONFIG = """\
Traceback (most recent call last):
  File "arg_utils.py", line 9, in create_model_config
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['Nope'] are not supported for now. [type=value_error, input_value=x]
    For further information visit the documentation
""".splitlines()


def test_the_core_error_is_found_behind_the_error_that_reports_it() -> None:
    assert root_error(CORE_DIED) == "safetensors_rust.SafetensorError: incomplete metadata"


def test_a_validation_error_gives_its_reason() -> None:
    assert root_error(BAD_CONFIG) == "Model architectures ['Nope'] are not supported for now."


def test_an_engine_that_says_nothing_has_no_root_error() -> None:
    assert root_error(["(APIServer pid=30) INFO 11-29 16:15:43 [entry.py:1] Starting vLLM server", ""]) == ""


def test_the_argument_parser_is_quoted() -> None:
    lines = ["usage: launch.py [-h]", "launch.py: error: argument --block-size: invalid int value: 'many'"]
    assert refused_arguments(lines) == "argument --block-size: invalid int value: 'many'"
    assert refused_arguments(CORE_DIED) == ""


def test_a_refused_configuration_is_told_from_broken_weights() -> None:
    core = "(EngineCore pid=31) INFO 11-29 18:19:09 [x.py:68] "
    block = "(EngineCore pid=31) ERROR 11-29 18:19:10 [core.py:1510] ValueError: No common block size for 7"
    reads, read = f"{core}Starting to load model /x...", f"{core}Loading weights took 0.00 seconds"
    assert refused_configuration(BAD_CONFIG) == "Model architectures ['Nope'] are not supported for now."
    assert refused_configuration([reads, read, block]) == "ValueError: No common block size for 7"
    assert refused_configuration([reads, block]) == ""
    assert refused_configuration([reads, read, f"{core}Supported tasks: ['generate']", block]) == ""
    assert refused_configuration(CORE_DIED) == ""
    assert refused_configuration([]) == ""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "(exit code 0 of its server): the process of its core ended, killed perhaps; there is no error in its log"),
        (1, "(exit code 1): Loading"),
        (-9, "(its guard was killed by signal 9): killed from outside, there is no error in its log"),
        (137, "(killed by signal 9): killed from outside, there is no error in its log"),
        (139, "(killed by signal 11): Loading"),
    ],
)
def test_an_engine_that_was_killed_is_not_quoted(code: int, says: str) -> None:
    lines = ["(EngineCore pid=31) INFO 11-29 16:15:43 [x.py:1] Loading",
             "nanobind: leaked 4 instances!", ' - leaked instance 0x7f of type "triton"', " - ... skipped remainder",
             "nanobind: this is likely caused by a reference counting issue in the binding code.",
             "See https://nanobind.readthedocs.io/en/latest/refleaks.html"]  # fmt: skip
    assert how_it_ended(code, lines) == says
    assert how_it_ended(code, CORE_DIED).endswith("): safetensors_rust.SafetensorError: incomplete metadata")
    died = "(APIServer pid=1) RuntimeError: Engine core initialization failed. Failed core proc(s): {}"
    assert how_it_ended(1, [*lines, died]).startswith("(exit code 1 of its server): the process of its core ended")


def test_last_lines_leave_out_noise() -> None:
    lines = ["(EngineCore pid=31) INFO 11-29 16:15:43 [x.py:1] Loading",
             "Loading shards: 100% | 1/1 [00:00<00:00,  1.9it/s]",
             'INFO:     127.0.0.1:4 - "GET /health HTTP/1.1" 200 OK', "", "killed"]  # fmt: skip
    assert last_lines(lines, 2) == "Loading | killed"
    assert last_lines(["x" * 200], 1) == "x" * 160


def test_kernels_are_what_the_engine_says_it_uses() -> None:
    lines = ["(EngineCore pid=1) INFO 11-29 16:15:43 [x.py:1] Selected CPUInt8ScaledMMLinearKernel for W8A8Int8",
             "(EngineCore pid=1) INFO 11-29 16:15:43 [x.py:1] Selected CPUInt8ScaledMMLinearKernel for W8A8Int8",
             "(EngineCore pid=1) INFO 11-29 16:15:43 [x.py:1] Using FLASHINFER attention backend.",
             "(EngineCore pid=1) INFO 11-29 16:15:43 [x.py:1] Using LBHNC KV cache layout."]  # fmt: skip
    assert kernels(lines) == ["CPUInt8ScaledMMLinearKernel for W8A8Int8", "FLASHINFER"]
