"""What is refused before an engine is started, with real files and a real socket."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from oneaxis.errors import UserError
from oneaxis.serve.preflight import (
    check_checkpoint,
    check_kv_cache,
    check_length,
    check_memory,
    check_threads,
    kv_bytes_per_token,
    reserve_port,
)
from tests.serve.tiny import serve


def test_a_port_in_use_is_refused_by_number_and_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"serve\.port={port}: in use by .*\(pid {os.getpid()}\)"):
            reserve_port(port)


def test_free_ports_are_not_given_twice_and_the_engine_can_listen_on_them() -> None:
    reserved = [reserve_port(0) for _ in range(20)]
    assert len({port for port, _ in reserved}) == 20
    for port, holder in reserved:
        # vLLM binds with SO_REUSEADDR while the reservation is still held.
        with socket.socket() as engine:
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            engine.bind(("127.0.0.1", port))
            engine.listen()
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        holder.close()


@pytest.mark.parametrize(
    ("missing", "says"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_an_incomplete_checkpoint_is_refused(tiny_checkpoint: Path, tmp_path: Path, missing: str, says: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    assert check_checkpoint(checkpoint)["num_hidden_layers"] == 2
    (checkpoint / missing).unlink()
    with pytest.raises(UserError, match=says):
        check_checkpoint(checkpoint)


def test_a_missing_folder_and_a_broken_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint"):
        check_checkpoint(tmp_path / "none")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        check_checkpoint(tmp_path)


def test_memory_is_weights_and_cache_and_runtime() -> None:
    """3 + 0.5 + 2 = 5.5 GiB."""
    check_memory(3 * 2**30, serve(kv_cache_gib=0.5), available=6 * 2**30)
    with pytest.raises(
        UserError, match=r"kv_cache_gib=0\.5: .*3\.0 weights \+ 0\.5 KV cache \+ 2\.0 runtime = 5\.5 GiB"
    ):
        check_memory(3 * 2**30, serve(kv_cache_gib=0.5), available=5 * 2**30)


def test_a_context_longer_than_the_model_is_refused_unless_its_rope_is_scaled() -> None:
    check_length({"max_position_embeddings": 512}, serve(max_model_len=512))
    check_length({"max_position_embeddings": 512, "rope_scaling": {"factor": 4}}, serve(max_model_len=2048))
    check_length({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn"}}, serve(max_model_len=2048))
    with pytest.raises(UserError, match=r"max_model_len=513: allowed: up to 512"):
        check_length(
            {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, serve(max_model_len=513)
        )


def test_kv_bytes_per_token_of_published_models() -> None:
    """Llama-3.1-8B 128 KiB and 70B 320 KiB, Qwen3-8B 144 KiB and Qwen3-32B 256 KiB in BF16."""
    llama_8b = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    llama_70b = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
    qwen_8b = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    qwen_32b = {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    sizes = [kv_bytes_per_token(config, 2) for config in (llama_8b, llama_70b, qwen_8b, qwen_32b)]
    assert sizes == [128 * 1024, 320 * 1024, 144 * 1024, 256 * 1024]
    assert kv_bytes_per_token({**llama_8b, "kv_lora_rank": 512}, 2) is None
    assert kv_bytes_per_token(json.loads("{}"), 2) is None


def test_a_kv_cache_holds_at_least_one_sequence() -> None:
    """2 x 2 layers x 1 head x 64 x 2 bytes = 512 bytes a token; 512 tokens are 256 KiB = 2^-12 GiB, half in FP8."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    check_kv_cache(config, serve(kv_cache_gib=2**-12))
    check_kv_cache(config, serve(kv_cache_gib=2**-13, kv_cache_dtype="fp8"))
    check_kv_cache({**config, "kv_lora_rank": 512}, serve(kv_cache_gib=1e-7))
    with pytest.raises(UserError, match=r"serve\.kv_cache_gib=1e-07: allowed: 0\.000245 and up"):
        check_kv_cache(config, serve(kv_cache_gib=1e-7))
    with pytest.raises(UserError, match=r"allowed: 0\.000489 and up"):
        check_kv_cache(config, serve(kv_cache_gib=2**-12, dtype="float32"))


def test_more_threads_than_cores_are_refused() -> None:
    check_threads(serve(threads=0), cores=2)
    check_threads(serve(threads=2), cores=2)
    with pytest.raises(UserError, match=r"serve\.threads=3: allowed: 0 to 2"):
        check_threads(serve(threads=3), cores=2)
