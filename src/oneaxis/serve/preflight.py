"""What can be known to fail before an engine is started: its checkpoint, its memory, its port.

The stages call this with the checkpoint before them, and `oneaxis run` with what is known before the first stage.
"""

import errno
import json
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from oneaxis.config.schema import Serve, ServeAttach
from oneaxis.errors import UserError
from oneaxis.installed import engine_device
from oneaxis.serve.command import kv_cache_bytes, num_threads, single_process

OVERHEAD_GIB = 2.0
"""Two processes with torch and vLLM, and the activations of a small model."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


def check_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's config.json, after a look at what must lie beside it.

    Raises:
        UserError: when the folder lacks its configuration, its tokenizer or its weights.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint}: no such checkpoint folder; `dvc repro` makes it")
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{checkpoint}: holds no config.json; allowed: a Hugging Face checkpoint folder") from error
    except ValueError as error:
        raise UserError(f"{checkpoint / 'config.json'}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{checkpoint / 'config.json'}: holds {type(config).__name__}; allowed: a mapping")
    if not any((checkpoint / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{checkpoint}: holds no tokenizer; allowed: one of {', '.join(TOKENIZER_FILES)} in the folder")
    if weights_bytes(checkpoint) == 0:
        raise UserError(f"{checkpoint}: holds no weights; allowed: *.safetensors in the folder")
    return config


def check_model(config: dict[str, Any], settings: Serve) -> None:
    """What a model's config.json says against the engine's settings; what is not in it is not checked.

    Raises:
        UserError: the model has fewer positions, or the KV cache holds no sequence of full length.
    """
    check_length(config, settings)
    device = engine_device()
    if device == "cpu" and single_process(settings, device):
        check_kv_cache(config, settings)


def check_room(engines: Sequence[Serve]) -> None:
    """Whether this machine can ever run these engines at once: ports, and on a CPU cores and memory.

    What is free at this moment says little of when an engine starts, after other stages and others' runs: all memory
    counts, and weights are left out.

    Raises:
        UserError: naming the key, its value and what is allowed.
    """
    if engine_device() == "cpu":
        check_threads(engines, cores=len(os.sched_getaffinity(0)))
        check_memory([(0, settings) for settings in engines], available=all_bytes(), free=False)
    for port in {settings.port for settings in engines}:
        reserve_port(port)[1].close()


def check_key(settings: ServeAttach) -> str | None:
    """The key that an attached endpoint wants, from the environment; None where it wants none.

    Raises:
        UserError: there is none in the named variable.
    """
    if settings.api_key_env is None:
        return None
    key = os.environ.get(settings.api_key_env, "")
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(f"serve.api_key_env={settings.api_key_env}: {'holds more than a key' if key else 'not set'}; "
                        "allowed: the name of an environment variable that holds the key")  # fmt: skip
    return key


def check_length(config: dict[str, Any], settings: Serve) -> None:
    """Whether the model has as many positions as are asked for (one whose RoPE is scaled is vLLM's to judge).

    Raises:
        UserError: when it has fewer.
    """
    positions = config.get("max_position_embeddings")
    scaled = (
        config.get("rope_scaling") or (config.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    )
    if isinstance(positions, int) and not scaled and settings.max_model_len > positions:
        raise UserError(f"serve.max_model_len={settings.max_model_len}: allowed: up to {positions}, "
                        "the checkpoint's max_position_embeddings")  # fmt: skip


def weights_bytes(checkpoint: Path) -> int:
    """Size of the weights, bytes."""
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def available_bytes() -> int:
    """Memory that a new process may take: the machine's, or less where a control group says less."""
    available = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        return available if limit == "max" else min(available, max(int(limit) - used, 0))
    except (OSError, ValueError):
        return available


def all_bytes() -> int:
    """Memory that processes here may ever have: the machine's, or less where a control group says less."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return total


def check_memory(needs: Sequence[tuple[int, Serve]], *, available: int, free: bool = True) -> None:
    """Whether weights, KV cache and runtime of every engine fit into `available` bytes (a GPU's is vLLM's to judge).

    Args:
        needs: for each engine the size of its weights, bytes (0: not known yet), and its settings.
        free: whether `available` is what is free now, or all that there is.

    Raises:
        UserError: with each of the numbers, GiB.
    """
    parts = {
        "weights": sum(weights for weights, _ in needs) / 2**30,
        "KV cache": sum(kv_cache_bytes(settings) for _, settings in needs) / 2**30,
        "runtime": OVERHEAD_GIB * len(needs),
    }
    if sum(parts.values()) > available / 2**30:
        who = "the engine needs" if len(needs) == 1 else f"{len(needs)} engines need"
        asked = " + ".join(f"{settings.kv_cache_gib}" for _, settings in needs)
        needed = " + ".join(f"{gib:.1f} {name}" for name, gib in parts.items() if gib)
        there = "are free; allowed: less, or end what holds the memory" if free else "are all there is; allowed: less"
        raise UserError(
            f"serve.kv_cache_gib={asked}: {who} {needed} = {sum(parts.values()):.1f} GiB, "
            f"and {available / 2**30:.1f} GiB {there}"
        )


def check_threads(engines: Sequence[Serve], *, cores: int) -> None:
    """Whether each thread of each engine has a core of its own: with far more of them a start does not end.

    Raises:
        UserError: when there are fewer cores.
    """
    if len(engines) == 1 and engines[0].threads > cores:
        raise UserError(
            f"serve.threads={engines[0].threads}: allowed: 0 to {cores}, the cores that this process may use"
        )
    if len(engines) > 1 and sum(num_threads(settings) for settings in engines) > cores:
        asked = " + ".join(str(settings.threads) for settings in engines)
        raise UserError(f"serve.threads={asked} (0: all cores) for {len(engines)} engines at once: allowed: at most "
                        f"{cores} together, the cores that this process may use")  # fmt: skip


def check_kv_cache(config: dict[str, Any], settings: Serve) -> None:
    """Whether the KV cache holds one sequence of full length (of a model whose layers differ, vLLM judges that).

    Raises:
        UserError: with the least size that does.
    """
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    fp8 = settings.kv_cache_dtype != "auto" or scheme
    # dtype=auto runs FP32 checkpoints in 16 bits.
    least = (kv_bytes_per_token(config, 1 if fp8 else 4 if settings.dtype == "float32" else 2) or 0) * (
        settings.max_model_len
    )
    if kv_cache_bytes(settings) < least:
        gib = math.ceil(least / 2**30 * 1e6) / 1e6
        raise UserError(f"serve.kv_cache_gib={settings.kv_cache_gib:g}: allowed: {gib:g} and up, "
                        f"to hold one sequence of serve.max_model_len={settings.max_model_len}")  # fmt: skip


def check_quantization(
    checkpoint: Path, config: Mapping[str, Any], settings: Serve, *, cpu_flags: frozenset[str]
) -> None:
    """Whether vLLM's CPU engine computes what the checkpoint's quantisation and the KV cache's dtype say.

    Read in vLLM 0.32 and seen on a CPU without AMX: packed INT4 weights run with unquantised activations whatever is
    asked of those; static FP8, and weight-only INT8 or FP8, have no kernel; INT4 wants AVX-512 (without it the engine
    starts, and dies at the first request) and widths that are multiples of 32; quantised experts want AMX; an FP8 cache
    wants AVX-512 and heads that are multiples of 32.

    Args:
        config: the checkpoint's config.json. cpu_flags: what the CPU can do, as Linux names it.

    Raises:
        UserError: naming the file, what it asks for, what the engine would make of it, and what it can run.
    """
    where = checkpoint / "config.json"
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == "compressed-tensors":
        for group in (quantization.get("config_groups") or {}).values():
            if not isinstance(group, Mapping):
                continue
            kind, reason = _not_run(group)
            if reason:
                raise UserError(f"{where}: quantization_config asks for {kind}: {reason}; allowed on a CPU: W8A8 INT8 "
                                "dynamic or static, W4A16, W8A8 FP8 dynamic")  # fmt: skip
            packed = (group.get("weights") or {}).get("num_bits") == 4
            if packed and cpu_flags and not cpu_flags & WIDE:
                raise UserError(f"{where}: quantization_config asks for {kind}: only CPUs with AVX-512 or AMX run it, "
                                "and this one has neither; allowed here: W8A8 INT8, W8A8 FP8 dynamic")  # fmt: skip
            _check_linears(checkpoint, packed=packed, cpu_flags=cpu_flags)
    scheme = quantization.get("kv_cache_scheme")
    if scheme and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        bits = f"{scheme.get('type')}{scheme.get('num_bits')}"
        raise UserError(f"{where}: quantization_config.kv_cache_scheme is {bits}: vLLM runs no such cache; "
                        "allowed: float8, or no kv_cache_scheme")  # fmt: skip
    if scheme or settings.kv_cache_dtype != "auto":
        asks = f"{where}: kv_cache_scheme" if scheme else f"serve.kv_cache_dtype={settings.kv_cache_dtype}"
        head_dim = _head_dim(config)
        if head_dim and head_dim % 32:
            raise UserError(f"{asks}: FP8 keys and values of heads of {head_dim} are not run on a CPU; allowed: a head "
                            "size that is a multiple of 32, or a cache that is not FP8")  # fmt: skip
        if cpu_flags and not cpu_flags & WIDE:
            raise UserError(f"{asks}: an FP8 cache is only run by CPUs with AVX-512 or AMX, and this one has neither; "
                            "allowed: a cache that is not FP8")  # fmt: skip


def _not_run(group: Mapping[str, Any]) -> tuple[str, str]:
    """What a config group asks for (W4A8 INT), and why a CPU engine does not compute it (empty: it does)."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    bits, floating = weights.get("num_bits"), weights.get("type") == "float"
    kind = f"W{bits}A{inputs.get('num_bits') if inputs else 16} {'FP' if floating else 'INT'}{bits}"
    if bits == 4 and inputs:
        return kind, "vLLM runs packed 4-bit weights with unquantised activations, as W4A16, without a word"
    if bits == 8 and not inputs:
        return kind, "it has no kernel for 8-bit weights alone"
    if floating and inputs and not inputs.get("dynamic"):
        return f"{kind} with static activations", "it has no kernel for them"
    if floating and bits != 8:
        return kind, "it has no kernel for them"
    return kind, ""


WIDE = frozenset({"avx512f", "amx_tile"})
VNNI = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def cautions(config: Mapping[str, Any], *, cpu_flags: frozenset[str]) -> list[str]:
    """What this CPU computes otherwise than the checkpoint says, though the engine runs it: for the reader to know.

    x86 without VNNI adds pairs of INT8 products in 16 bits, which saturate once a weight's level is beyond 64 (oneDNN,
    "Nuances of int8 computations"). Seen on such a CPU: sums off by a fifth of the largest, and log-probabilities by
    0.9 nats where quantising itself moves them by 0.25. Timings are not touched.
    """
    groups = ((config.get("quantization_config") or {}).get("config_groups") or {}).values()
    int8 = any((group.get("input_activations") or {}).get("type") == "int" for group in groups)
    if not int8 or not cpu_flags or cpu_flags & VNNI:
        return []
    return ["this CPU has no VNNI, so vLLM's INT8 products saturate: the engine's answers and scores are wrong, its "
            "timings are right; quality that oneaxis measures itself is right"]  # fmt: skip


_FUSED_PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EXPERT = re.compile(r"\.experts\.\d+\.")


def _check_linears(checkpoint: Path, *, packed: bool, cpu_flags: frozenset[str]) -> None:
    """Whether the CPU's kernels take the quantised linears, by the shapes in the files' headers."""
    from oneaxis.checkpoint.tensors import find_tensors

    shapes = {name: place.shape for name, place in find_tensors(checkpoint).items()}
    linears = [name.removesuffix(".weight_scale") for name in shapes if name.endswith(".weight_scale")]
    experts = next((name for name in linears if _EXPERT.search(name)), None)
    if experts and cpu_flags and "amx_tile" not in cpu_flags:
        raise UserError(f"{checkpoint}: {experts} is quantised: vLLM runs quantised experts only on CPUs with AMX, and "
                        "this one has none; allowed: experts in quantize.ignore, or an engine on a GPU")  # fmt: skip
    for name in linears if packed else ():
        if _EXPERT.search(name) or f"{name}.weight_packed" not in shapes:
            continue
        parent, _, leaf = name.rpartition(".")
        parts = next((group for group in _FUSED_PARTS if leaf in group), (leaf,))
        rows = sum(shapes[part][0] for other in parts if (part := f"{parent}.{other}.weight_packed") in shapes)
        columns = shapes[f"{name}.weight_packed"][1] * 8
        if rows % 32 or columns % 32:
            raise UserError(f"{checkpoint}: {name} (with what runs as one layer with it) is {rows} x {columns}: the "
                            "CPU kernel of W4A16 takes multiples of 32 only; allowed: such widths, or the linear in "
                            "quantize.ignore")  # fmt: skip


def cpu_flags() -> frozenset[str]:
    """What this machine's CPU can do, as Linux names it; empty where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def reserve_port(port: int) -> tuple[int, socket.socket]:
    """A port on 127.0.0.1 (0: a free one), and the socket that reserves it.

    The socket is bound but never listens. With SO_REUSEADDR on both sides the engine can bind the port all the same,
    while no other search for a free port is given it. Close it once the engine listens.

    Raises:
        UserError: when something listens there already.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("127.0.0.1", port))
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"serve.port={port}: in use{_listener(port)}; allowed: 0 (a free port), or one that "
                            "nothing listens on") from error  # fmt: skip
        if error.errno == errno.EACCES:
            raise UserError(f"serve.port={port}: not permitted to this user; allowed: 0, or 1024 and up") from error
        raise
    return int(holder.getsockname()[1]), holder


def _listener(port: int) -> str:
    """` by python (pid 12)`, as far as this user may see it."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and getattr(connection.laddr, "port", None) == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""


def kv_bytes_per_token(config: dict[str, Any], dtype_bytes: float) -> float | None:
    """2 * layers * kv_heads * head_dim * dtype_bytes, or None for a model whose layers differ (hybrid, MLA, sliding).

    `config` is the checkpoint's config.json.
    """
    special = ("layer_types", "kv_lora_rank", "layers_block_type", "sliding_window", "num_local_experts", "text_config")
    if any(config.get(key) for key in special):
        return None
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        size = 2 * config["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes
    except (KeyError, TypeError):
        return None
    return size if math.isfinite(size) else None


def _head_dim(config: Mapping[str, Any]) -> int | None:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    given = config.get("head_dim")
    if isinstance(given, int):
        return given
    return width // heads if isinstance(heads, int) and isinstance(width, int) and heads else None
