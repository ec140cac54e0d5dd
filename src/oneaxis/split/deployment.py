"""Two engines with NIXL between them, against one that does both.

First every prompt is answered greedily by one engine. Then two engines are started: the first prefills (one token is
asked of it) and says where the keys and values lie; the second is told so, fetches them (pull) or is given them (push),
and decodes. The same prompts are sent one after the other, so that answers can be compared: what a request computes in
a batch depends on the batch. Then they are sent once more, on a clock of the set rate, for the slots that they hold.
"""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import polars as pl

from oneaxis.config.schema import Serve, SplitNixl
from oneaxis.serve import Engine, EngineSpec, metric_total, realised_config, running_engine, running_engines
from oneaxis.split.accounting import account, gained, read

CONNECTORS = {"pull": "NixlConnector", "push": "NixlPushConnector"}
RUNNING = "vllm:num_requests_running"
SAMPLE_EVERY_S = 0.05
ANSWERS = pl.Schema(
    {
        "request": pl.Int64(),
        "prompt_tokens": pl.Int64(),
        "prefill_s": pl.Float64(),
        "decode_s": pl.Float64(),
        "alone": pl.List(pl.Int64),
        "split": pl.List(pl.Int64),
        "equal": pl.Boolean(),
    }
)


def prompts_of(text: np.ndarray, split: SplitNixl, *, seed: int) -> list[list[int]]:
    """Token ids, `requests` pieces of the text that do not overlap where it is long enough, in a drawn order."""
    places = np.random.default_rng(seed).permutation(max(split.requests, len(text) // split.prompt_tokens))
    starts = [int(place) * split.prompt_tokens % max(1, len(text) - split.prompt_tokens) for place in places]
    return [text[start : start + split.prompt_tokens].tolist() for start in starts[: split.requests]]


def halves(serve: Serve, *, cores: int) -> list[Serve]:
    """What the prefilling and the decoding engine have of the machine: half the cores and a free port each."""
    settings = serve.model_copy(update={"threads": serve.threads or max(1, cores // 2), "port": 0})
    return [settings, settings]


def engine_specs(checkpoint: Path, serve: Serve, split: SplitNixl, logs: Path, *, cores: int) -> list[EngineSpec]:
    """The prefilling and the decoding engine. Each gets half the cores, and a side channel of its own."""
    specs = []
    roles = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    for (name, role), half in zip(roles, halves(serve, cores=cores), strict=True):
        transfer = {"kv_connector": CONNECTORS[split.kind], "kv_role": role, "kv_buffer_device": "cpu"}
        settings = half.model_copy(update={"engine_args": {**serve.engine_args, "kv_transfer_config": transfer}})
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port()),
            "UCX_TLS": "tcp,self,sm",
        }
        specs.append(EngineSpec(checkpoint, settings, logs / f"split-{name}.log", environment=environment))
    return specs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ask(engine: Engine, prompt: Sequence[int], max_tokens: int, **more: Any) -> tuple[dict[str, Any], float]:
    """One greedy completion, and the seconds that it took."""
    body = {"model": engine.model_name, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more}  # fmt: skip
    began = time.perf_counter()
    answer = engine.post("/v1/completions", body)
    return answer, time.perf_counter() - began


def ask_split(
    prefill: Engine, decode: Engine, prompt: Sequence[int], max_tokens: int, *, transfer: bool = True
) -> dict[str, Any]:
    """One request through both engines. `transfer` False forgets to say where the keys and values lie."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
              "remote_block_ids": None, "remote_host": None, "remote_port": None}  # fmt: skip
    # One name at both: by it the prefilling engine finds for whom its blocks are, where it is the one that sends them.
    name = f"split-{uuid4().hex}"
    first, prefill_s = _ask(prefill, prompt, 1, kv_transfer_params=wanted, request_id=name)
    told = {"kv_transfer_params": first["kv_transfer_params"]} if transfer else {}
    second, decode_s = _ask(decode, prompt, max_tokens, **told, request_id=name)
    return {"prompt_tokens": second["usage"]["prompt_tokens"], "prefill_s": prefill_s, "decode_s": decode_s,
            "split": second["choices"][0]["token_ids"]}  # fmt: skip


def run_split(
    checkpoint: Path,
    serve: Serve,
    split: SplitNixl,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    cores: int,
    logs: Path,
    observed: dict[str, Any],
    transfer: bool = True,
) -> tuple[pl.DataFrame, dict[str, Any], dict[str, dict[str, Any]]]:
    """Answers of both deployments (a row per prompt), the account (`accounting.account`), and what each engine runs.

    An engine that runs otherwise than asked makes the account INVALID.

    Raises:
        UserError, RunError: as the engines' starts.
    """
    alone_settings = serve.model_copy(update={"threads": serve.threads or max(1, cores // 2)})
    with running_engine(checkpoint, alone_settings, log_path=logs / "split-alone.log") as engine:
        realised = {"alone": realised_config(engine, checkpoint)}
        alone = [_ask(engine, prompt, split.output_tokens)[0]["choices"][0]["token_ids"] for prompt in prompts]
    specs = engine_specs(checkpoint, serve, split, logs, cores=cores)
    with running_engines(specs, observed=observed) as (prefill, decode):
        realised |= {"prefill": realised_config(prefill, checkpoint), "decode": realised_config(decode, checkpoint)}
        # The first transfer of a pair of engines makes the connection: with another prompt, and not counted.
        ask_split(prefill, decode, list(reversed(prompts[0])), 2, transfer=transfer)
        before = [read(engine.metrics()) for engine in (prefill, decode)]
        rows = [ask_split(prefill, decode, prompt, split.output_tokens, transfer=transfer) for prompt in prompts]
        between = [_settled(engine, before_one, len(prompts)) for engine, before_one in
                   zip((prefill, decode), before, strict=True)]  # fmt: skip
        rate, running = _on_a_clock(prefill, decode, prompts, split, seed=seed, transfer=transfer)
    for number, (row, own) in enumerate(zip(rows, alone, strict=True)):
        row |= {"request": number, "alone": own, "equal": row["split"] == own}
    one, other = (gained(earlier, later) for earlier, later in zip(before, between, strict=True))
    summary = account(
        rows, one, other, transfers=other if split.kind == "pull" else one, rate_rps=rate,
        output_tokens=split.output_tokens, running_mean=running, max_num_seqs=serve.max_num_seqs,
    )  # fmt: skip
    summary["invalid"] += [
        f"the engine `{name}` runs otherwise than asked: {found['key']}: asked {found['asked']}, resolved "
        f"{found['resolved']}"
        for name, document in realised.items()
        for found in document["differences"]
    ]
    return pl.DataFrame(rows, schema=ANSWERS), summary, realised


def _settled(engine: Engine, before: dict[str, float], wanted: int) -> dict[str, float]:
    """The counters once all requests are in them: they lag behind the last answer by a moment."""
    deadline = time.monotonic() + 2.0
    while True:
        values = read(engine.metrics())
        if gained(before, values)["finished"] >= wanted or time.monotonic() > deadline:
            # The connector's own are put out a log interval later.
            time.sleep(0.5)
            return read(engine.metrics())
        time.sleep(0.05)


def _on_a_clock(
    prefill: Engine, decode: Engine, prompts: Sequence[Sequence[int]], split: SplitNixl, *, seed: int, transfer: bool
) -> tuple[float, float | None]:
    """Send all prompts by Poisson arrivals; the rate that was reached, and how many ran on the decoding engine."""
    waits = np.random.default_rng([seed, 1]).exponential(1 / split.rate_rps, len(prompts))
    running: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            running.append(metric_total(decode.metrics(), RUNNING))

    sampler = threading.Thread(target=sample, daemon=True)
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        sampler.start()
        sent = []
        for prompt, at in zip(prompts, np.cumsum(waits), strict=True):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            # Another prompt than before: what the decoding engine still holds must not serve it.
            sent.append(pool.submit(ask_split, prefill, decode, list(reversed(prompt)), split.output_tokens,
                                    transfer=transfer))  # fmt: skip
        for future in sent:
            future.result()
    seconds = time.perf_counter() - began
    done.set()
    sampler.join()
    return len(prompts) / seconds, float(np.mean(running)) if running else None
