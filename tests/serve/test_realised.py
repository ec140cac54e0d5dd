"""Asked against resolved, on documents laid out by hand after those of vLLM 0.32."""

import copy
import json
from typing import Any

import pytest

from oneaxis.serve.realised import compare, realised_table
from tests.serve.tiny import serve

CONFIG: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_size": 128,
}
# 2 * 2 layers * 1 KV head * 64 * 2 bytes = 512 bytes a token: 0.5 GiB hold 2^29 / 512 = 1,048,576 tokens.
TOKENS = 1_048_576
INFO: dict[str, Any] = {
    "vllm_config": {
        "model_config": {"dtype": "torch.bfloat16", "max_model_len": 512, "enforce_eager": True, "quantization": None,
                         "seed": 0},
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**29,
                         "kv_cache_size_tokens": TOKENS, "block_size": 128},
        "scheduler_config": {"max_num_seqs": 8, "async_scheduling": False, "max_num_batched_tokens": 2048,
                             "enable_chunked_prefill": True, "policy": "fcfs"},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "speculative_config": None,
    },
    "system_env": {"env_vars": "VLLM_X=1\nOMP_NUM_THREADS=3\n", "vllm_version": "0.32.0"},
}  # fmt: skip
LABELS = {"cache_dtype": "auto", "enable_prefix_caching": "False", "kv_cache_size_tokens": str(TOKENS)}
FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def found(
    *,
    settings: dict[str, Any] | None = None,
    info: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The comparison, with changes to documents that agree; `info` maps `section.key` to another value."""
    server_info = copy.deepcopy(INFO)
    for path, value in (info or {}).items():
        section, _, key = path.partition(".")
        server_info["vllm_config"][section][key] = value
    return compare(
        serve(**(settings or {})),
        server_info=server_info,
        cache_labels=LABELS | (labels or {}),
        config=CONFIG | (config or {}),
        generation={"temperature": 0.6, "eos_token_id": 2},
        kernels=[],
        device="cpu",
        recipe=recipe,
    )


def keys(result: dict[str, Any]) -> list[str]:
    return [difference["key"] for difference in result["differences"]]


def test_what_agrees_has_no_difference() -> None:
    result = found()
    assert result["differences"] == []
    assert result["unverified"] == []
    assert result["checkpoint"]["sampling_defaults"] == {"temperature": 0.6}
    assert result["resolved"]["kv_cache_tokens"] == TOKENS


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        ("model_config.dtype", "torch.float32", "serve.dtype"),
        ("model_config.max_model_len", 256, "serve.max_model_len"),
        ("scheduler_config.max_num_seqs", 128, "serve.max_num_seqs"),
        ("model_config.enforce_eager", False, "serve.enforce_eager"),
    ],
)
def test_each_setting_is_compared(path: str, value: Any, key: str) -> None:
    result = found(info={path: value})
    assert key in keys(result)


def test_the_engine_cores_own_word_counts() -> None:
    """The labels come from the core; the API server's configuration may be an older copy."""
    assert keys(found(labels={"enable_prefix_caching": "True"})) == ["serve.prefix_caching"]
    assert keys(found(labels={"cache_dtype": "fp8"})) == []  # auto was asked; the capacity tells
    result = found(settings={"kv_cache_dtype": "fp8"}, labels={"kv_cache_size_tokens": str(2 * TOKENS)})
    assert keys(result) == ["serve.kv_cache_dtype"]


def test_threads_that_the_engine_did_not_get() -> None:
    assert keys(found(settings={"threads": 4})) == ["serve.threads"]


def test_batch_invariance_is_what_the_engines_environment_says() -> None:
    assert found()["resolved"]["batch_invariant"] is False
    assert keys(found(settings={"batch_invariant": True})) == ["serve.batch_invariant"]


def test_async_scheduling_that_resolves_to_false() -> None:
    result = found(settings={"engine_args": {"async_scheduling": True}})
    assert result["differences"] == [
        {"key": "serve.engine_args.async_scheduling", "asked": True, "resolved": False,
         "reason": "the engine resolved it otherwise"}
    ]  # fmt: skip


def test_engine_args_are_found_under_the_engines_own_names() -> None:
    assert keys(found(settings={"engine_args": {"scheduling_policy": "fcfs", "block_size": 128}})) == []
    assert keys(found(settings={"engine_args": {"block_size": 64}})) == ["serve.engine_args.block_size"]


def test_of_a_speculation_what_was_asked_is_kept_and_compared() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 4}
    info = copy.deepcopy(INFO)
    # The engine's own also holds whole model configurations, with the paths of this machine.
    info["vllm_config"]["speculative_config"] = asked | {"target_model_config": {"model": "/tmp/x"}}

    def told() -> dict[str, Any]:
        return compare(serve(engine_args={"speculative_config": asked}), server_info=info, cache_labels=LABELS,
                       config=CONFIG, generation={}, kernels=[], device="cpu")  # fmt: skip

    assert told()["resolved"]["engine_args.speculative_config"] == asked
    assert told()["differences"] == []
    info["vllm_config"]["speculative_config"]["num_speculative_tokens"] = 3
    assert keys(told()) == ["serve.engine_args.speculative_config"]


def test_what_the_engine_does_not_tell_is_unverified() -> None:
    result = found(settings={"engine_args": {"chat_template_content_format": "string"}})
    assert result["unverified"] == ["serve.engine_args.chat_template_content_format"]
    assert result["differences"] == []


def test_a_kv_cache_scheme_and_the_doubled_capacity_are_both_seen() -> None:
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}
    result = found(
        config={"quantization_config": quantization},
        info={"model_config.quantization": "compressed-tensors"},
        labels={"kv_cache_size_tokens": str(2 * TOKENS)},
    )
    assert keys(result) == ["serve.kv_cache_dtype", "kv_cache_tokens"]
    assert result["differences"][0]["resolved"] == "kv_cache_scheme float8"
    assert result["differences"][1]["asked"] == TOKENS


@pytest.mark.parametrize("kv", ["fp8", "none"])
def test_a_kv_cache_scheme_of_quantize_kv_was_asked_for(kv: str) -> None:
    """Only a recipe that says so; then a cache that is not FP8 after all is the difference."""
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}
    documents = {
        "config": {"quantization_config": quantization},
        "info": {"model_config.quantization": "compressed-tensors"},
        "recipe": {"kind": "w4a16", "kv": kv},
    }
    doubled = keys(found(**documents, labels={"kv_cache_size_tokens": str(2 * TOKENS)}))
    assert doubled == ([] if kv == "fp8" else ["serve.kv_cache_dtype", "kv_cache_tokens"])
    assert keys(found(**documents)) == (["kv_cache_tokens"] if kv == "fp8" else ["serve.kv_cache_dtype"])


def test_an_fp8_cache_that_was_asked_for_is_no_difference() -> None:
    result = found(
        settings={"kv_cache_dtype": "fp8_e4m3"}, labels={"cache_dtype": "fp8", "kv_cache_size_tokens": str(2 * TOKENS)}
    )
    assert result["differences"] == []


def test_quantisation_that_is_not_the_checkpoints() -> None:
    quantization = {"quantization_config": {"quant_method": "compressed-tensors"}}
    assert keys(found(config=quantization)) == ["checkpoint.quantization_config"]
    assert keys(found(info={"model_config.quantization": "fp8"})) == ["checkpoint.quantization_config"]
    asked = {"engine_args": {"quantization": "fp8"}}
    assert keys(found(settings=asked, info={"model_config.quantization": "fp8"})) == []


def test_w4a8_runs_as_w4a16() -> None:
    group = {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    result = found(
        config={"quantization_config": quantization}, info={"model_config.quantization": "compressed-tensors"}
    )
    assert [(item["asked"], item["resolved"]) for item in result["differences"]] == [("W4A8", "W4A16")]


def test_auto_dtype_that_is_not_the_checkpoints() -> None:
    result = found(settings={"dtype": "auto"}, config={"dtype": "float32"})
    assert keys(result) == ["serve.dtype"]


def test_every_setting_stands_in_one_table() -> None:
    """Asked, runs, wished and what that means, of each; what differs comes first."""
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME}
    document = found(
        settings={"engine_args": {"async_scheduling": True, "chat_template_content_format": "string"}},
        config={"quantization_config": quantization},
        info={"model_config.quantization": "compressed-tensors"},
    )
    rows = {row["setting"]: row for row in realised_table(document).iter_rows(named=True)}
    assert set(document["asked"]) | set(document["resolved"]) <= set(rows)
    assert [name for name, row in rows.items() if row["verdict"].startswith("differs: ")] == list(rows)[:2]
    assert rows["engine_args.async_scheduling"] == {
        "setting": "engine_args.async_scheduling", "asked": "true", "resolved": "false", "checkpoint": None,
        "verdict": "differs: the engine resolved it otherwise",
    }  # fmt: skip
    cache = rows["kv_cache_dtype"]
    assert (cache["asked"], cache["resolved"], json.loads(cache["checkpoint"])) == ('"auto"', '"auto"', FP8_SCHEME)
    assert cache["verdict"] == "differs: the checkpoint's config.json sets the KV cache"
    assert rows["dtype"]["checkpoint"] == '"bfloat16"'
    assert (rows["dtype"]["verdict"], rows["block_size"]["verdict"]) == ("as asked", "not asked")
    assert rows["engine_args.chat_template_content_format"]["verdict"] == "unverified"
    assert rows["sampling.temperature"]["checkpoint"] == "0.6"


def test_a_cache_of_garbage_is_a_difference_on_a_cpu() -> None:
    assert keys(found(labels={"cache_dtype": "int8_per_token_head"})) == ["serve.kv_cache_dtype"]
