"""What is refused before an engine is started, with real files and a real socket."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from oneaxis.config.schema import QuantizeNone
from oneaxis.errors import UserError
from oneaxis.serve.preflight import (
    cautions,
    check_checkpoint,
    check_kv_cache,
    check_length,
    check_memory,
    check_quantization,
    check_threads,
    kv_bytes_per_token,
    reserve_port,
)
from tests.checkpoint.quantised import write_quantised
from tests.quantize.checkpoints import scheme
from tests.quantize.models import tiny
from tests.serve.tiny import byte_tokenizer, random_llama, serve


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
    check_memory([(3 * 2**30, serve(kv_cache_gib=0.5))], available=6 * 2**30)
    with pytest.raises(
        UserError, match=r"kv_cache_gib=0\.5: .*3\.0 weights \+ 0\.5 KV cache \+ 2\.0 runtime = 5\.5 GiB"
    ):
        check_memory([(3 * 2**30, serve(kv_cache_gib=0.5))], available=5 * 2**30)


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
    check_threads([serve(threads=0)], cores=2)
    check_threads([serve(threads=2)], cores=2)
    with pytest.raises(UserError, match=r"serve\.threads=3: allowed: 0 to 2"):
        check_threads([serve(threads=3)], cores=2)


def test_engines_at_once_share_cores_and_memory() -> None:
    two = [serve(threads=1, kv_cache_gib=0.5), serve(threads=2, kv_cache_gib=1.0)]
    check_threads(two, cores=3)
    with pytest.raises(UserError, match=r"serve\.threads=1 \+ 2 .*: allowed: at most 2 together"):
        check_threads(two, cores=2)
    # Each alone would fit: 1 + 0.5 + 2 and 1 + 1 + 2 GiB of 7.
    with pytest.raises(
        UserError, match=r"0\.5 \+ 1\.0: 2 engines need 2\.0 weights \+ 1\.5 KV cache \+ 4\.0 run.* = 7\.5"
    ):
        check_memory([(2**30, settings) for settings in two], available=7 * 2**30)


AVX512, AMX = frozenset({"avx2", "avx512f"}), frozenset({"avx2", "avx512f", "amx_tile"})
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8, FP8 = {**INT4, "num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "type": "float", "strategy": "channel"}
PER_TOKEN, STATIC = {"num_bits": 8, "dynamic": True}, {"num_bits": 8, "dynamic": False, "strategy": "tensor"}


def check(checkpoint: Path, flags: frozenset[str] = AVX512, **settings: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    check_quantization(checkpoint, config, serve(**settings), cpu_flags=flags)


@pytest.mark.parametrize(
    "settings",
    [
        scheme("w8a8_int8_dynamic"),
        scheme("w8a8_int8_static", kv="fp8"),
        scheme("w4a16", symmetric=False),
        scheme("w8a8_fp8"),
        QuantizeNone(kind="none", kv="fp8"),
    ],
    ids=lambda settings: f"{settings.kind}-{settings.kv}",
)
def test_what_we_write_is_run_by_a_cpu(tmp_path: Path, settings: object) -> None:
    check(write_quantised(random_llama(tmp_path / "policy"), tmp_path / "quantised", settings))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"weights": INT4, "input_activations": PER_TOKEN}, r"W4A8 INT4: .*unquantised activations, as W4A16"),
        ({"weights": INT8}, r"W8A16 INT8: it has no kernel for 8-bit weights alone"),
        ({"weights": FP8}, r"W8A16 FP8: it has no kernel for 8-bit weights alone"),
        ({"weights": FP8, "input_activations": STATIC}, r"W8A8 FP8 with static activations: it has no kernel"),
        ({"weights": {**FP8, "num_bits": 4}}, r"W4A16 FP4: it has no kernel"),
    ],
)
def test_a_scheme_that_a_cpu_does_not_compute_is_refused(tmp_path: Path, group: object, said: str) -> None:
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    checkpoint = random_llama(tmp_path / "checkpoint", quantization_config=quantization)
    with pytest.raises(
        UserError, match=rf"config\.json: quantization_config asks for {said}.*; allowed on a CPU: W8A8"
    ):
        check(checkpoint)


def test_an_fp8_cache_that_a_cpu_cannot_run_is_refused(tmp_path: Path) -> None:
    plain = random_llama(tmp_path / "plain")
    cached = write_quantised(plain, tmp_path / "cached", QuantizeNone(kind="none", kv="fp8"))
    narrow = random_llama(tmp_path / "narrow", head_dim=80)
    unknown = random_llama(tmp_path / "int8", quantization_config={"kv_cache_scheme": {"num_bits": 8, "type": "int"}})
    check(plain, frozenset({"avx2"}))
    check(cached, frozenset())  # A machine that does not tell what its CPU can do.
    with pytest.raises(UserError, match=r"config\.json: kv_cache_scheme: .*AVX-512 or AMX, and this one has neither"):
        check(cached, frozenset({"avx2"}))
    with pytest.raises(UserError, match=r"^serve\.kv_cache_dtype=fp8: an FP8 cache is only run by CPUs with AVX-512"):
        check(plain, frozenset({"avx2"}), kv_cache_dtype="fp8")
    with pytest.raises(UserError, match=r"kv_cache_dtype=fp8_e5m2: .*heads of 80 .*a multiple of 32"):
        check(narrow, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(UserError, match=r"kv_cache_scheme is int8: vLLM runs no such cache; allowed: float8"):
        check(unknown)


def test_int4_without_avx512_is_refused(tmp_path: Path) -> None:
    """Seen: the engine starts, answers /health, and has no `cpu_gemm_wna16` when the first request comes."""
    checkpoint = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "quantised", scheme("w4a16"))
    with pytest.raises(
        UserError, match=r"asks for W4A16 INT4: only CPUs with AVX-512 or AMX run it.*allowed here: W8A8"
    ):
        check(checkpoint, frozenset({"avx2"}))


def test_int4_widths_that_the_kernel_does_not_take_are_refused(tmp_path: Path) -> None:
    """What counts is the layer that the engine fuses: 32 + 16 + 16 rows of q, k and v are 64."""
    model = tiny("llama")
    assert model.config.hidden_size == 32
    model.save_pretrained(tmp_path / "policy")
    byte_tokenizer(tmp_path / "policy")
    odd = scheme("w4a16", ignore=("re:.*down_proj",))
    fits = write_quantised(tmp_path / "policy", tmp_path / "fits", odd)
    check(fits)
    from safetensors.torch import load_file, save_file

    tensors = load_file(fits / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    for part in ("weight_packed", "weight_scale"):
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:8].clone()
    save_file(tensors, fits / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.\w_proj .* is 56 x 32: .*multiples of 32 only"):
        check(fits)


def test_quantised_experts_want_amx(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "policy")
    byte_tokenizer(tmp_path / "policy")
    quantised = write_quantised(tmp_path / "policy", tmp_path / "quantised", scheme("w8a8_int8_dynamic"))
    check(quantised, AMX)
    with pytest.raises(
        UserError, match=r"experts\.0\.w1 is quantised: vLLM runs quantised experts only on CPUs with AMX"
    ):
        check(quantised)
    high = scheme("w8a8_int8_dynamic", ignore=("re:.*experts",))
    check(write_quantised(tmp_path / "policy", tmp_path / "high", high))


def test_int8_without_vnni_is_a_caution(tmp_path: Path) -> None:
    static = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "int8", scheme("w8a8_int8_static"))
    fp8 = write_quantised(tmp_path / "policy", tmp_path / "fp8", scheme("w8a8_fp8"))
    int8_config, fp8_config = (json.loads((folder / "config.json").read_text()) for folder in (static, fp8))
    [said] = cautions(int8_config, cpu_flags=frozenset({"avx2"}))
    assert "no VNNI" in said
    for flags in ({"avx2", "avx_vnni"}, {"avx512_vnni"}, set()):
        assert cautions(int8_config, cpu_flags=frozenset(flags)) == []
    assert cautions(fp8_config, cpu_flags=frozenset({"avx2"})) == []
    assert cautions({}, cpu_flags=frozenset({"avx2"})) == []
