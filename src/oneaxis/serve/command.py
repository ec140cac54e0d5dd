"""From the `serve` section to the engine's command line and environment, and what is refused before a start.

vLLM has many ways to be configured: flags, a YAML file, several dozen environment variables. Here the section is the
only one: what it does not say, the engine does not get, so a run is what its settings say it is.
"""

import ast
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from getpass import getuser
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from oneaxis.config.schema import Serve, ServeAttach, ServeSection
from oneaxis.errors import UserError
from oneaxis.installed import Device, engine_device
from oneaxis.serve import launch
from oneaxis.stage import QUIET

OWN_SETTINGS = {
    "dtype": "serve.dtype",
    "max_model_len": "serve.max_model_len",
    "max_num_seqs": "serve.max_num_seqs",
    "kv_cache_dtype": "serve.kv_cache_dtype",
    "kv_cache_memory_bytes": "serve.kv_cache_gib",
    "enable_prefix_caching": "serve.prefix_caching",
    "enforce_eager": "serve.enforce_eager",
    "port": "serve.port",
}
"""Arguments of `vllm serve` that the section has a key of its own for."""

REFUSED = {
    "model": "the checkpoint of this run is served",
    "model_tag": "the checkpoint of this run is served",
    "model_weights": "the checkpoint of this run is served",
    "tokenizer": "the checkpoint's own tokenizer is used",
    "served_model_name": "requests are sent under a fixed name",
    "config": "conf/ is the only source of settings",
    "log_config_file": "the start is followed in the log",
    "logging_config": "the start is followed in the log",
    "log_level": "the start is followed in the log",
    "host": "the engine listens on 127.0.0.1 only",
    "uds": "the engine listens on 127.0.0.1 only",
    "root_path": "the engine listens on 127.0.0.1 only",
    "ssl_keyfile": "the engine listens on 127.0.0.1 only",
    "ssl_certfile": "the engine listens on 127.0.0.1 only",
    "headless": "requests are sent over HTTP",
    "grpc": "requests are sent over HTTP",
    "tokens_only": "requests are sent over HTTP",
    "api_key": "a secret would be written into params.yaml",
    "hf_token": "a secret would be written into params.yaml",
    "disable_log_stats": "the guards read the server's counters",
}
"""Arguments that would contradict how the engine is run here, and why."""

KEPT_ENVIRONMENT = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_HOST_IP", "VLLM_NCCL_SO_PATH", "VLLM_CUDART_SO_PATH")
"""Inherited VLLM_ variables that say where things are, not how the engine runs."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM has no argument for it."""

NAME = re.compile(r"[a-z][a-z0-9_]*")


@cache
def known_arguments() -> Mapping[str, str]:
    """The arguments of the installed `vllm serve` and their types as written in its source, which is not imported.

    Empty when they cannot be found.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    names: dict[str, str] = {}
    for module in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        try:
            tree = ast.parse(Path(spec.origin).parent.joinpath(module).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            return {}
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef) and statement.name.endswith("Args"):
                names |= {
                    field.target.id: ast.unparse(field.annotation)
                    for field in statement.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
    return {name: written for name, written in names.items() if not name.startswith("_")}


def check_engine_args(arguments: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Refuse what is misspelt, unknown, empty, of the wrong type, or contradicts how the engine is run.

    Raises:
        UserError: naming the key, its value and what is allowed.
    """
    for name, value in arguments.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"serve.engine_args: {name!r}: allowed: an argument of `vllm serve` by its name in Python, "
                            "such as block_size")  # fmt: skip
        positive = name.removeprefix("no_")
        # A secret must not be repeated in an error message either.
        shown = f"serve.engine_args.{name}" if positive in ("api_key", "hf_token") else (
            f"serve.engine_args.{name}={value!r}")  # fmt: skip
        if positive in OWN_SETTINGS:
            raise UserError(f"{shown}: allowed: {OWN_SETTINGS[positive]}, which sets this")
        if positive in REFUSED:
            raise UserError(f"{shown}: not allowed: {REFUSED[positive]}")
        if value is None or value in ("", [], {}):
            raise UserError(f"{shown}: allowed: a value, or leave the key out")
        if known and name not in known:
            raise UserError(f"{shown}: no such argument; allowed: the arguments of `vllm serve`, "
                            f"by their names in Python{_closest(name, known)}")  # fmt: skip
        if wanted := _other_type(value, known.get(name, "")):
            raise UserError(f"{shown}: allowed: {wanted}")


def _other_type(value: Any, written: str) -> str:
    """What an argument of a plain type takes, when `value` is not that; empty: it is, or vLLM itself must say."""
    text = value if isinstance(value, str) else ""
    match "|".join(sorted(part.strip() for part in written.split("|") if part.strip() != "None")):
        case "bool":
            return "" if isinstance(value, bool) else "true or false"
        case "int":
            # vLLM takes 8k for some of them.
            good = type(value) is int or re.fullmatch(r"-?\d+|\d+(\.\d+)?[kKmMgGtT]", text)
            return "" if good else "a whole number"
        case "float":
            good = type(value) in (int, float) or re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text)
            return "" if good else "a number"
    return ""


def check_contradictions(settings: Serve, device: Device) -> None:
    """Refuse settings that contradict each other, or say only half of what they must, before a start that would fail.

    vLLM 0.32 refuses most of these itself, some ten seconds into the start; those on a CPU it takes without a word.
    What the model decides (a draft's vocabulary, a block size that its layers share) is left to it.

    Raises:
        UserError: naming the keys, their values and what is allowed.
    """
    arguments = settings.engine_args
    for name, value in arguments.items():
        if (name == "block_size" or name.endswith("_parallel_size")) and isinstance(value, int) and value < 1:
            raise UserError(f"serve.engine_args.{name}={value}: allowed: 1 and up")
    tokens, chunked = arguments.get("max_num_batched_tokens"), arguments.get("enable_chunked_prefill", True)
    if isinstance(tokens, int) and tokens < settings.max_num_seqs:
        raise UserError(f"serve.engine_args.max_num_batched_tokens={tokens}: allowed: {settings.max_num_seqs} and up, "
                        "a token for each of serve.max_num_seqs")  # fmt: skip
    if isinstance(tokens, int) and chunked is False and tokens < settings.max_model_len:
        raise UserError(f"serve.engine_args.max_num_batched_tokens={tokens} without chunked prefill: allowed: "
                        f"serve.max_model_len={settings.max_model_len} and up")  # fmt: skip
    threshold = arguments.get("long_prefill_token_threshold")
    if isinstance(threshold, int) and threshold > settings.max_model_len:
        raise UserError(f"serve.engine_args.long_prefill_token_threshold={threshold}: allowed: up to "
                        f"serve.max_model_len={settings.max_model_len}")  # fmt: skip
    if settings.enforce_eager and "compilation_config" in arguments:
        raise UserError("serve.engine_args.compilation_config: nothing is compiled with serve.enforce_eager=true; "
                        "allowed: with serve.enforce_eager=false")  # fmt: skip
    if settings.batch_invariant and device == "cpu":
        raise UserError("serve.batch_invariant=true: vLLM has batch-invariant kernels for GPUs alone, and a CPU engine "
                        "with this passes /health and dies of its first request; allowed: false (serve=reproducible "
                        "computes one request at a time instead), or an engine on a GPU")  # fmt: skip
    _check_speculation(arguments.get("speculative_config"))
    _check_transfer(arguments.get("kv_transfer_config"))
    if device == "cpu":
        for name, reason in SILENT_ON_CPU.items():
            if arguments.get(name):
                raise UserError(f"serve.engine_args.{name}={arguments[name]!r}: {reason}; allowed: leave the key out, "
                                "or an engine on a GPU")  # fmt: skip
        block = arguments.get("block_size")
        if isinstance(block, int) and block % 32:
            raise UserError(f"serve.engine_args.block_size={block}: allowed on a CPU: multiples of 32, for which its "
                            "attention is written")  # fmt: skip


SILENT_ON_CPU = {
    "enable_sleep_mode": "a CPU engine reports that it sleeps, and frees nothing",
    "gpu_memory_utilization": "a CPU engine takes serve.kv_cache_gib",
}
"""Arguments that vLLM takes on a CPU without doing what they say, and without showing it in its configuration."""


def _check_speculation(speculation: Any) -> None:
    key = "serve.engine_args.speculative_config"
    if speculation is None:
        return
    if not isinstance(speculation, Mapping):
        raise UserError(f"{key}={speculation!r}: allowed: a mapping, such as {{method: ngram, "
                        "num_speculative_tokens: 4, prompt_lookup_max: 4}")  # fmt: skip
    method, model = speculation.get("method"), speculation.get("model")
    if method == "draft_model" and not model:
        raise UserError(f"{key}.model: missing; allowed: the draft's checkpoint folder")
    if not method and not model:
        raise UserError(f"{key}: names neither a method nor a model; allowed: one of them, such as method: ngram")
    count = speculation.get("num_speculative_tokens")
    if (method in ("ngram", "draft_model") or count is not None) and not (isinstance(count, int) and count > 0):
        raise UserError(f"{key}.num_speculative_tokens={count}: allowed: 1 and up")
    shortest, longest = speculation.get("prompt_lookup_min"), speculation.get("prompt_lookup_max")
    if isinstance(shortest, int) and isinstance(longest, int) and shortest > longest:
        raise UserError(f"{key}.prompt_lookup_min={shortest}: allowed: up to prompt_lookup_max={longest}")


def _check_transfer(transfer: Any) -> None:
    key, roles = "serve.engine_args.kv_transfer_config", ("kv_producer", "kv_consumer", "kv_both")
    if transfer is None:
        return
    if not isinstance(transfer, Mapping) or not transfer.get("kv_connector"):
        raise UserError(f"{key}: names no kv_connector; allowed: one, such as NixlConnector, with its kv_role")
    if transfer.get("kv_role") not in roles:
        raise UserError(f"{key}.kv_role={transfer.get('kv_role')}: allowed: {', '.join(roles)}")


def _closest(name: str, known: Mapping[str, str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by their Python names as command line flags.

    `a_b: 4` -> `--a-b 4`; true -> `--a-b`; false -> `--no-a-b`; a mapping -> JSON; a list -> its values one by one.
    """
    words: list[str] = []
    for name in sorted(arguments):
        value, flag = arguments[name], name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value, sort_keys=True)]
        elif isinstance(value, list):
            plain = [json.dumps(item, sort_keys=True) if isinstance(item, dict | list) else str(item) for item in value]
            words += [f"--{flag}", *plain]
        else:
            words += [f"--{flag}", str(value)]
    return words


def single_process(settings: Serve, device: Device) -> bool:
    """Whether the engine core computes in its own process (one CPU rank), and may be forked."""
    arguments = settings.engine_args
    ranks = (arguments.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    return device == "cpu" and "distributed_executor_backend" not in arguments and all(n == 1 for n in ranks)


def num_gpus(settings: ServeSection) -> int:
    """GPUs that the engine takes: one a rank; 0 where vLLM is built for the CPU, or where the engine is not ours.

    Raises:
        UserError: when vLLM is not installed.
    """
    if isinstance(settings, ServeAttach) or engine_device() == "cpu":
        return 0
    arguments = settings.engine_args
    kinds = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "data_parallel_size")
    return math.prod(int(arguments.get(kind, 1)) for kind in kinds)


def engine_command(checkpoint: Path, settings: Serve, *, served_name: str, port: int, device: Device) -> list[str]:
    """The engine's command: stock vLLM, or `launch.py` (the same with a forked core) for one CPU process."""
    own: dict[str, Any] = {
        "model": str(checkpoint),
        "served_model_name": served_name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.enforce_eager,
    }
    if device == "cpu":
        own["kv_cache_memory_bytes"] = kv_cache_bytes(settings)
    if single_process(settings, device):
        own["distributed_executor_backend"] = "uni"
        entry = [launch.__file__]
    else:
        entry = ["-m", "vllm.entrypoints.launchers.api_server.entry"]
    return [sys.executable, "-P", *entry, *flags(own), *flags(settings.engine_args)]


def kv_cache_bytes(settings: Serve) -> int:
    """Size of the KV cache on a CPU, bytes."""
    return math.floor(settings.kv_cache_gib * 2**30)


def num_threads(settings: Serve) -> int:
    """OpenMP threads of the engine: as set, or one for each core that this process may use."""
    return settings.threads or len(os.sched_getaffinity(0))


def engine_environment(
    inherited: Mapping[str, str], settings: Serve, *, device: Device, folder: Path
) -> tuple[dict[str, str], list[str]]:
    """The engine's environment, and the names of inherited settings of vLLM that it does not get.

    `folder` is private to this engine: its sockets and temporary files.
    """
    dropped = sorted(name for name in inherited if name.startswith("VLLM_") and name not in KEPT_ENVIRONMENT)
    gone = {*dropped, "PYTHONDONTWRITEBYTECODE"}
    environment = {name: value for name, value in inherited.items() if name not in gone}
    environment |= QUIET
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(folder),
        # Where torch would keep it without the line above: compiled kernels outlive the engine.
        "TORCHINDUCTOR_CACHE_DIR": inherited.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{getuser()}"
        ),
        "VLLM_RPC_BASE_PATH": str(folder),
        # /server_info and /reset_prefix_cache; the server is on loopback only.
        "VLLM_SERVER_DEV_MODE": "1",
        # The start is followed in the log.
        "VLLM_LOGGING_LEVEL": "INFO",
        # With it a compiled engine's cache is not found again on a CPU.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
    }
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = str(num_threads(settings))
        # vLLM's own binding leaves a core to the API server, and on two cores computes on one.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # By default a CPU with AMX runs W4A16 in BF16 as W4A8, without a word.
        environment["VLLM_CPU_INT4_W4A8"] = "0"
    if single_process(settings, device):
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.batch_invariant:
        environment[BATCH_INVARIANT] = "1"
    return environment, [name for name in dropped if name not in environment]
