"""The engine's command line and environment, and what is refused before a start."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from oneaxis.config.schema import Serve
from oneaxis.errors import UserError
from oneaxis.serve.command import (
    check_contradictions,
    check_engine_args,
    engine_command,
    engine_environment,
    flags,
    known_arguments,
    single_process,
)
from tests.serve.tiny import serve


def command(settings: Serve, device: Any = "cpu") -> list[str]:
    return engine_command(Path("/models/x"), settings, served_name="oneaxis", port=1234, device=device)


def test_arguments_become_flags() -> None:
    arguments = {"block_size": 64, "async_scheduling": True, "enable_chunked_prefill": False,
                 "speculative_config": {"method": "ngram", "num": 3}, "compile_sizes": [1, 2]}  # fmt: skip
    assert flags(arguments) == [
        "--async-scheduling",
        "--block-size", "64",
        "--compile-sizes", "1", "2",
        "--no-enable-chunked-prefill",
        "--speculative-config", '{"method": "ngram", "num": 3}',
    ]  # fmt: skip


def test_the_section_decides_every_setting_on_loopback() -> None:
    words = command(serve(engine_args={"block_size": 64}))
    expected = ["--model", "/models/x", "--served-model-name", "oneaxis", "--host", "127.0.0.1", "--port", "1234",
                "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-dtype", "auto",
                "--kv-cache-memory-bytes", str(2**29), "--block-size", "64"]  # fmt: skip
    pairs = list(itertools.pairwise(words))
    assert all(pair in pairs for pair in zip(expected[::2], expected[1::2], strict=True))
    assert "--no-enable-prefix-caching" in words
    assert "--enforce-eager" in words


def test_a_gpu_gets_no_setting_of_a_cpu() -> None:
    words = command(serve(), "gpu")
    assert "--kv-cache-memory-bytes" not in words
    assert "--distributed-executor-backend" not in words
    environment, _ = engine_environment({}, serve(), device="gpu", folder=Path("/tmp/x"))
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"} & set(environment)


def test_only_a_single_cpu_process_is_forked() -> None:
    assert single_process(serve(), "cpu")
    assert not single_process(serve(), "gpu")
    assert not single_process(serve(engine_args={"tensor_parallel_size": 2}), "cpu")
    assert not single_process(serve(engine_args={"distributed_executor_backend": "mp"}), "cpu")
    assert "launch.py" in command(serve())[2]
    assert "launch.py" not in " ".join(command(serve(engine_args={"tensor_parallel_size": 2})))


def test_the_environment_carries_no_setting_past_the_section() -> None:
    inherited = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "VLLM_CPU_KVCACHE_SPACE": "8",
                 "VLLM_API_KEY": "secret", "VLLM_CACHE_ROOT": "/cache",
                 "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "7"}  # fmt: skip
    environment, dropped = engine_environment(inherited, serve(), device="cpu", folder=Path("/tmp/x"))
    assert dropped == ["VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"]
    assert not {"PYTHONDONTWRITEBYTECODE", *dropped} & set(environment)
    assert environment["VLLM_CACHE_ROOT"] == "/cache"
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_zero_threads_are_one_for_each_core() -> None:
    environment, _ = engine_environment({}, serve(threads=0), device="cpu", folder=Path("/tmp/x"))
    assert environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"port": 80}, r"serve\.engine_args\.port=80: allowed: serve\.port"),
        ({"host": "0.0.0.0"}, r"host='0\.0\.0\.0': not allowed: .*127\.0\.0\.1"),  # noqa: S104
        ({"max_num_seqs": 4}, r"allowed: serve\.max_num_seqs"),
        ({"no_enable_prefix_caching": True}, r"allowed: serve\.prefix_caching"),
        ({"model": "gpt2"}, r"model='gpt2': not allowed"),
        ({"block-size": 16}, r"'block-size': allowed: .* name in Python"),
        ({"blok_size": 16}, r"blok_size=16: no such argument.*did you mean block_size"),
        ({"block_size": None}, r"block_size=None: allowed: a value"),
        ({"block_size": ""}, r"block_size='': allowed: a value"),
        ({"block_size": []}, r"block_size=\[\]: allowed: a value"),
        ({"block_size": "abc"}, r"block_size='abc': allowed: a whole number"),
        ({"block_size": True}, r"block_size=True: allowed: a whole number"),
        ({"enable_x": "yes"}, r"enable_x='yes': allowed: true or false"),
        ({"share": "much"}, r"share='much': allowed: a number"),
    ],
)
def test_contradictions_and_unknown_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_engine_args(arguments, {"block_size": "int | None", "port": "int", "enable_x": "bool", "share": "float"})


@pytest.mark.parametrize(
    ("settings", "arguments", "says"),
    [
        ({"max_num_seqs": 8}, {"max_num_batched_tokens": 4}, r"batched_tokens=4: allowed: 8 and up"),
        ({"max_model_len": 512}, {"max_num_batched_tokens": 256, "enable_chunked_prefill": False},
         r"=256 without chunked prefill: allowed: serve\.max_model_len=512 and up"),
        ({"max_model_len": 512}, {"long_prefill_token_threshold": 600}, r"=600: allowed: up to serve"),
        ({"enforce_eager": True}, {"compilation_config": {"mode": 3}}, r"allowed: with serve\.enforce_eager=false"),
        ({}, {"enable_sleep_mode": True}, "a CPU engine reports that it sleeps, and frees nothing"),
        ({}, {"gpu_memory_utilization": 0.5}, r"takes serve\.kv_cache_gib"),
        ({}, {"block_size": 48}, r"block_size=48: allowed on a CPU: multiples of 32"),
        ({}, {"block_size": -32}, r"block_size=-32: allowed: 1 and up"),
        ({}, {"tensor_parallel_size": 0}, r"tensor_parallel_size=0: allowed: 1 and up"),
        ({}, {"speculative_config": "ngram"}, "speculative_config='ngram': allowed: a mapping"),
        ({}, {"speculative_config": {"num_speculative_tokens": 3}}, "neither a method nor a model"),
        ({}, {"speculative_config": {"method": "ngram"}}, "num_speculative_tokens=None: allowed: 1 and up"),
        ({}, {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}, r"\.model: missing"),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5,
                                     "prompt_lookup_max": 4}}, "min=5: allowed: up to prompt_lookup_max=4"),
        ({}, {"kv_transfer_config": {"kv_role": "kv_both"}}, "names no kv_connector"),
        ({}, {"kv_transfer_config": {"kv_connector": "NixlConnector"}}, "kv_role=None: allowed: kv_producer"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        check_contradictions(serve(**settings, engine_args=arguments), "cpu")


def test_what_fits_together_passes() -> None:
    arguments = {
        "max_num_batched_tokens": 512,
        "enable_chunked_prefill": False,
        "block_size": 64,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    }
    check_contradictions(serve(max_model_len=512, engine_args=arguments), "cpu")
    check_contradictions(serve(engine_args={"enable_sleep_mode": True, "block_size": 16}), "gpu")


def test_batch_invariant_kernels_are_for_gpus_and_asked_for_by_the_environment() -> None:
    with pytest.raises(UserError, match=r"serve\.batch_invariant=true: .* for GPUs alone, .*dies of its first request"):
        check_contradictions(serve(batch_invariant=True), "cpu")
    check_contradictions(serve(batch_invariant=True), "gpu")
    inherited = {"VLLM_BATCH_INVARIANT": "1"}
    for asked in (True, False):
        environment, _ = engine_environment(inherited, serve(batch_invariant=asked), device="gpu", folder=Path("/x"))
        assert environment.get("VLLM_BATCH_INVARIANT") == ("1" if asked else None)


def test_a_secret_is_refused_without_being_repeated() -> None:
    with pytest.raises(UserError) as refusal:
        check_engine_args({"api_key": "sk-123"}, {})
    assert "sk-123" not in str(refusal.value)


def test_the_installed_engine_knows_what_it_is_given() -> None:
    """The names are read from vLLM's source without importing it; every flag of ours must be among them."""
    known = known_arguments()
    assert len(known) > 100
    ours = {
        word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in command(serve()) if word[:2] == "--"
    }
    assert ours <= set(known)
    check_engine_args({"block_size": 16, "async_scheduling": True, "tool_call_parser": "hermes"}, known)
