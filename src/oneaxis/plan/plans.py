"""Each plan, from the words of its command line to its answer. What the options are is in `command.py`."""

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oneaxis.config import read_params
from oneaxis.errors import UserError
from oneaxis.names import model_name
from oneaxis.plan import cost, serving, speculation
from oneaxis.plan.answer import Answer, Column, Curve, Fact
from oneaxis.plan.compare import ARITHMETIC, DTYPE_ARITHMETIC, compare, read_run, require_same, require_same_kind
from oneaxis.plan.hardware import HERE, Device, read_ceilings, read_device
from oneaxis.plan.memory import fit
from oneaxis.plan.model import Model, read_model
from oneaxis.plan.scored import candidate_of_run
from oneaxis.plan.shift import rank, read_table
from oneaxis.plan.units import (
    BYTES,
    BYTES_PER_S,
    FLOPS_PER_S,
    PARAMETERS,
    PER_S,
    SECONDS,
    TOKENS_PER_S,
    USD_PER_HOUR,
    count,
    counts,
    number,
    quantity,
    share,
)
from oneaxis.stage import hardware

# --- where things are ----------------------------------------------------------------------------------------


def project() -> Path:
    """The project's."""
    root = Path.cwd()
    if not (root / "conf").is_dir():
        raise UserError(f"{root}: holds no conf; run oneaxis from the root of an oneaxis project")
    return root


def threads_of(root: Path, given: str | None) -> int:
    """As asked, or as `serve.threads` of params.yaml says (0: one a core)."""
    if given is not None:
        return count("--threads", given)
    threads = 0
    if (root / "params.yaml").is_file():
        threads = int(read_params(root).get("serve", {}).get("threads", 0))
    return threads or len(os.sched_getaffinity(0))


def _device(options: argparse.Namespace, threads: int | None = None) -> Device:
    """That `--hardware` names; without it, this machine as measured."""
    root = project()
    if options.hardware not in (None, HERE):
        if options.threads is not None:
            raise UserError(f"--threads={options.threads}: belongs to --hardware {HERE}; allowed: without it")
        return read_device(root, options.hardware)
    threads = threads if threads and options.threads is None else threads_of(root, options.threads)
    return read_ceilings(root, threads, hardware()).device


def _model(options: argparse.Namespace) -> Model:
    """Of `--model`, or the served checkpoint of this project."""
    if options.model is not None:
        return read_model(options.model)

    root = project()
    served = root / str(read_params(root).get("paths", {}).get("served", ""))
    if not (served / "config.json").is_file():
        raise UserError(f"{served}: holds no config.json yet; allowed: --model PATH, or a run that has made it")
    return read_model(served)


def _compared(options: argparse.Namespace, path: Path, only: str | None = None) -> Answer:
    """A run beside the plans, or one of them."""
    run = read_run(path)
    timed = only in (None, "decode", "prefill")
    device, notes = None, []
    try:
        if timed:
            device = _device(options, run.threads)
            if options.hardware in (None, HERE):
                require_same(run, hardware())
            else:
                require_same_kind(run, device)
            notes.append(f"ceilings: {device.name}")
    except UserError as error:
        # What needs no ceilings is said all the same, unless they were asked for or nothing is left.
        if options.hardware is not None or only is not None:
            raise
        device = None
        notes.append(f"without decode and prefill: {error}")
    found = [one for one in compare(run, device) if only in (None, one.plan)]
    if not found:
        raise UserError(f"{path}: has measured nothing that `plan {only}` predicts; allowed: a run that has")
    columns = [
        Column("plan", "plan", "text"), Column("what", "what", "text"), Column("predicted", "predicted", ""),
        Column("measured", "measured", ""), Column("unit", "unit", "text"), Column("ratio", "ratio", ""),
        Column("note", "of", "text"),
    ]  # fmt: skip
    return Answer("compare" if only is None else only, "measured / predicted", {"run": str(run.results.folder)},
                  columns=columns, rows=[one.as_row() for one in found], notes=notes)  # fmt: skip


# --- the plans -----------------------------------------------------------------------------------------------


def plan_roofline(options: argparse.Namespace) -> Answer:
    """Tokens in flight from which a scheme is bound by compute."""
    device = _device(options)
    names = options.scheme.split(",") if options.scheme else [
        name for name, (_, arithmetic) in serving.SCHEMES.items() if arithmetic in device.peak_flops_s]  # fmt: skip
    rows, lines = [], {}
    tokens = [2**power for power in range(11)]
    for name in names:
        if name not in serving.SCHEMES:
            raise UserError(f"--scheme={name}: allowed: {', '.join(serving.SCHEMES)}")
        size, arithmetic = serving.SCHEMES[name]
        peak = device.peak(arithmetic)
        rows.append({"scheme": name, "bytes_per_weight": size, "peak_flops_s": peak,
                     "ridge_flop_byte": serving.ridge(peak, device.bandwidth_bytes_s),
                     "crossover_tokens": serving.crossover_tokens(peak, device.bandwidth_bytes_s, size)})  # fmt: skip
        rates = [serving.attainable_flops(each, peak, device.bandwidth_bytes_s, size) for each in tokens]
        lines[name] = (tokens, rates)
    columns = [
        Column("scheme", "scheme", "text"), Column("bytes_per_weight", "bytes/weight", ""),
        Column("peak_flops_s", "peak", "FLOP/s"), Column("ridge_flop_byte", "ridge, FLOP/byte", ""),
        Column("crossover_tokens", "compute-bound from", "tokens"),
    ]  # fmt: skip
    return Answer(
        "roofline", "B* = (peak / bandwidth) x bytes_per_weight / 2",
        {"hardware": device.name, "bandwidth_bytes_s": device.bandwidth_bytes_s}, columns=columns, rows=rows,
        curve=Curve("tokens in flight", "FLOP/s that the roofline allows", lines, log_y=True),
        notes=["prefill, and a step with a chunk of prefill in it, has at least the chunk's tokens in flight"],
    )  # fmt: skip


def plan_decode(options: argparse.Namespace) -> Answer:
    """Bandwidth ceiling of one stream, and what a batch gives."""
    if options.run is not None:
        return _compared(options, options.run, "decode")
    batches = counts("--batch", options.batch)
    overhead = quantity("--overhead", options.overhead, SECONDS, zero=True)
    context = count("--context", options.context)
    if options.bandwidth is not None and options.hardware is not None:
        raise UserError("--bandwidth and --hardware: both say how fast memory is; allowed: one of them")
    bandwidth = quantity("--bandwidth", options.bandwidth, BYTES_PER_S) if options.bandwidth else (
        _device(options).bandwidth_bytes_s)  # fmt: skip
    inputs: dict[str, Any] = {"bandwidth_bytes_s": bandwidth, "overhead_s": overhead}
    if options.weights is not None:
        if options.model is not None:
            raise UserError("--weights and --model: both say what a step reads; allowed: one of them")
        weights = quantity("--weights", options.weights, BYTES)
        kv = quantity("--kv", options.kv, BYTES, zero=True) if options.kv else 0.0
        reads = dict.fromkeys([1, *batches], weights)
    else:
        if options.kv is not None:
            raise UserError(f"--kv={options.kv}: belongs to --weights; allowed: --context, with a model")
        model = _model(options)
        reads = {batch: model.read_bytes(batch) for batch in [1, *batches]}
        kv = model.kv_bytes(context)
        inputs |= {"model": model.where, "context_tokens": context}
    rows = []
    for batch in batches:
        took = serving.step_s(reads[batch], kv, batch, bandwidth, overhead)
        rows.append({"batch": batch, "step_s": took, "user_tok_s": 1 / took, "fleet_tok_s": batch / took})
    ceiling = serving.step_s(reads[1], 0.0, 1, bandwidth)
    facts = [
        Fact("weights_bytes", reads[1], "B", "of weights read by a step of one stream"),
        Fact("read_s", ceiling, "s", "one read of the weights"),
        Fact("ceiling_tok_s", 1 / ceiling, "tok/s", "at most, one stream, with no cache to read"),
        Fact("kv_bytes", kv, "B", "of cache read for each sequence"),
        Fact("fleet_limit_tok_s", bandwidth / kv if kv else None, "tok/s", "the fleet's limit, B/K"),
    ]
    columns = [Column("batch", "batch", "n"), Column("step_s", "step", "s"),
               Column("user_tok_s", "each user, tok/s", ""), Column("fleet_tok_s", "fleet, tok/s", "")]  # fmt: skip
    lines = {"each user": (batches, [row["user_tok_s"] for row in rows]),
             "fleet": (batches, [row["fleet_tok_s"] for row in rows])}  # fmt: skip
    return Answer("decode", "T = t0 + (W + b K) / B", inputs, facts, columns, rows,
                  Curve("batch", "tokens/s", lines, log_y=True),
                  notes=["bound by bandwidth: past the roofline's crossover a step takes longer"])  # fmt: skip


def plan_kv(options: argparse.Namespace) -> Answer:
    """KV bytes a token, longest context, most sequences."""
    if options.run is not None:
        return _compared(options, options.run, "kv")
    model = _model(options)
    sizes: dict[str, float] = {"bf16": 2, "f16": 2, "fp8": 1, "int8": 1, "f32": 4}
    if options.kv_dtype is not None and options.kv_dtype not in sizes:
        raise UserError(f"--kv-dtype={options.kv_dtype}: allowed: {', '.join(sizes)}")
    size = sizes[options.kv_dtype] if options.kv_dtype else float(model.kv_dtype_bytes)
    context, block = count("--context", options.context), count("--block", options.block)
    runtime = quantity("--runtime", options.runtime, BYTES, zero=True)
    if options.memory is not None and options.hardware is not None:
        raise UserError("--memory and --hardware: both say how much there is; allowed: one of them")
    memory = quantity("--memory", options.memory, BYTES) if options.memory else _device(options).memory_bytes
    room = fit(model, memory, runtime, context, block, size)
    notes = [] if model.uniform else ["some layers attend to a window: a sequence past it grows in the others only"]
    if room.free_bytes <= 0:
        notes.append("does not fit: weights and runtime alone take more than there is")
    if context > model.max_positions:
        notes.append(f"the model has {model.max_positions:,} positions: a context of {context:,} is beyond them")
    lengths = [length for power in range(8, 18) if (length := 2**power) <= model.max_positions] or [model.max_positions]
    many = [fit(model, memory, runtime, length, block, size).most_sequences for length in lengths]
    rows = [{"context": length, "sequences": number, "bytes": model.kv_bytes(length, size)}
            for length, number in zip(lengths, many, strict=True)]  # fmt: skip
    return Answer(
        "kv", "2 x layers x kv_heads x head_dim x dtype_bytes",
        {"model": model.where, "memory_bytes": memory, "runtime_bytes": runtime, "kv_dtype_bytes": size,
         "context_tokens": context, "block_tokens": block},
        [
            Fact("kv_bytes_per_token", model.kv_bytes_per_token(size), "iB", "a token of context"),
            Fact("parameters", float(model.num_parameters), "n", "parameters"),
            Fact("weights_bytes", float(model.weight_bytes()), "B", "of weights"),
            Fact("free_bytes", room.free_bytes, "B", "left for keys and values"),
            Fact("longest_context", float(room.longest_context), "n", "tokens: the longest context of one sequence"),
            Fact("most_sequences", float(room.most_sequences), "n", f"sequences of {context:,} tokens at once"),
        ],
        [Column("context", "context", "n"), Column("bytes", "a sequence", "iB"),
         Column("sequences", "sequences that fit", "n")], rows,
        Curve("context, tokens", "sequences that fit", {"sequences": (lengths, many)}), notes,
    )  # fmt: skip


def plan_prefill(options: argparse.Namespace) -> Answer:
    """Seconds to compute a prompt."""
    if options.run is not None:
        return _compared(options, options.run, "prefill")
    model, gpus = _model(options), count("--gpus", options.gpus)
    dtype = DTYPE_ARITHMETIC[model.dtype]
    linears = ARITHMETIC[model.storage.kind] or dtype
    if options.flops is not None and options.hardware is not None:
        raise UserError("--flops and --hardware: both say how fast products are; allowed: one of them")
    if options.flops is not None:
        rates = dict.fromkeys((linears, dtype), quantity("--flops", options.flops, FLOPS_PER_S))
    else:
        device = _device(options)
        rates = {name: device.peak(name) for name in (linears, dtype)}
    rows = []
    for tokens in counts("--tokens", options.tokens):
        flops = model.prefill(tokens)
        took = (flops.linears / rates[linears] + (flops.head + flops.attention) / rates[dtype]) / gpus
        rows.append({"tokens": tokens, "gflop": flops.total / 1e9, "attention": flops.attention / flops.total,
                     "s": took, "tok_s": tokens / took})  # fmt: skip
    columns = [Column("tokens", "prompt", "n"), Column("gflop", "GFLOP", ""), Column("attention", "attention", "%"),
               Column("s", "at least", "s"), Column("tok_s", "at most, tok/s", "")]  # fmt: skip
    return Answer(
        "prefill", "2 x weights x tokens + attention, by peak FLOP/s",
        {"model": model.where, "gpus": gpus, f"{linears}_flops_s": rates[linears], f"{dtype}_flops_s": rates[dtype]},
        columns=columns, rows=rows,
        curve=Curve("prompt, tokens", "seconds", {"prefill": ([r["tokens"] for r in rows], [r["s"] for r in rows])},
                    log_y=True),
    )  # fmt: skip


def plan_routing(options: argparse.Namespace) -> Answer:
    """Hit rate behind a round-robin router."""
    shared, workers = share("--shared", options.shared), counts("--workers", options.workers)
    rates = [serving.round_robin_hit_rate(shared, n) for n in workers]
    rows = [{"workers": n, "hit_rate": rate, "gain": 1 - rate} for n, rate in zip(workers, rates, strict=True)]
    return Answer(
        "routing", "h = s + (1 - s) / n", {"shared": shared},
        columns=[Column("workers", "workers", "n"), Column("hit_rate", "round-robin", "%"),
                 Column("gain", "a cache-aware router adds, at most", "%")],
        rows=rows, curve=Curve("workers", "hit rate", {"round-robin": (workers, rates)}),
        notes=["to first order: nothing is evicted, and a conversation has one owner"],
    )  # fmt: skip


def plan_speculation(options: argparse.Namespace) -> Answer:
    """Tokens a verification, speed-up, tokens in flight."""
    if options.run is not None:
        return _compared(options, options.run, "speculation")
    if options.accept is None:
        raise UserError("plan speculation: no acceptance; allowed: --accept 0.8, --accept 0.8,0.72,0.66, or --run")
    given = [share("--accept", part) for part in options.accept.split(",")]
    accept = given if len(given) > 1 else given * count("--drafts", options.drafts)
    cost, batches = number("--draft-cost", options.draft_cost), counts("--batch", options.batch)
    crossover = None
    if options.hardware is not None:
        if options.scheme not in serving.SCHEMES:
            raise UserError(f"--scheme={options.scheme}: allowed: {', '.join(serving.SCHEMES)}")
        device, (size, arithmetic) = _device(options), serving.SCHEMES[options.scheme]
        crossover = serving.crossover_tokens(device.peak(arithmetic), device.bandwidth_bytes_s, size)
    rows: list[dict[str, Any]] = []
    for k in range(1, len(accept) + 1):
        tokens = speculation.tokens_per_verification(accept[:k])
        row: dict[str, Any] = {"drafts": k, "tokens": tokens, "speed_up": speculation.speed_up(tokens, k, cost)}
        for batch in batches:
            flight = speculation.tokens_in_flight(batch, k)
            past = " past" if crossover is not None and flight > crossover else ""
            row |= {f"in_flight_{batch}": flight, f"shown_{batch}": f"{flight:,}{past}"}
        rows.append(row)
    best = max(rows, key=lambda row: row["speed_up"])
    facts = [Fact("best_drafts", float(best["drafts"]), "n", f"drafts are best: {best['speed_up']:.2f}x"),
             Fact("best_speed_up", best["speed_up"], "x", "while a verification costs one step")]  # fmt: skip
    if crossover is not None:
        facts.append(Fact("crossover_tokens", crossover, "tokens", "in flight: past them it costs more than one"))
    columns = [Column("drafts", "drafts", "n"), Column("tokens", "tokens a verification", ""),
               Column("speed_up", "speed-up", "x")]  # fmt: skip
    columns += [Column(f"shown_{batch}", f"in flight, batch {batch}", "text") for batch in batches]
    ks = [row["drafts"] for row in rows]
    lines = {"tokens a verification": (ks, [row["tokens"] for row in rows]),
             "speed-up": (ks, [row["speed_up"] for row in rows])}  # fmt: skip
    return Answer("speculation", "1 + sum_i prod_{j<=i} a_j, by 1 + c k",
                  {"accept": ", ".join(f"{value:g}" for value in given), "draft_cost": cost}, facts, columns, rows,
                  Curve("drafts", "tokens, times", lines, log_x=False))  # fmt: skip


def plan_hybrid(options: argparse.Namespace) -> Answer:
    """Speculation on recurrent state."""
    accept, drafts = share("--accept", options.accept), count("--drafts", options.drafts)
    shape = {key: count(f"--{key.replace('_', '-')}", getattr(options, key))
             for key in ("layers", "heads", "head_size", "state_size")}  # fmt: skip
    size = count("--state-bytes", options.state_bytes)
    weights, window = quantity("--weights", options.weights, BYTES), count("--window", options.window)
    state = speculation.state_bytes(**shape, dtype_bytes=size)
    # A token's inputs: a value and a decay a head, a key and a query shared by all heads of a layer.
    log = shape["layers"] * size * (shape["heads"] * (shape["head_size"] + 1) + 2 * shape["state_size"])
    kept, rule = speculation.uniform_tokens(accept, drafts), speculation.copy_rule(accept, drafts)
    batches = counts("--batch", options.batch)
    rows: list[dict[str, Any]] = [{"batch": batch} for batch in batches]
    lines = {}
    for setup in speculation.SETUPS:
        for row in rows:
            row[setup] = speculation.hybrid_bytes_per_token(
                setup, weights=weights, state=state, log=log, batch=row["batch"], tokens_kept=kept, drafts=drafts,
                window=window,
            )  # fmt: skip
        lines[setup] = (batches, [row[setup] / 1e6 for row in rows])
    return Answer(
        "hybrid", "copies pay only if sum_{i=0..T} p^i > (1 + T) / 2",
        {"accept": accept, "drafts": drafts, **shape, "element_bytes": size, "weights_bytes": weights,
         "window": window},
        [
            Fact("tokens_kept", kept, "tokens", "kept a step"),
            Fact("copy_rule", rule, "x",
                 "of what copies need: they " + ("can win" if rule > 1 else "lose") + " at a large batch"),
            Fact("layer_state_bytes", state / shape["layers"], "iB", "of state a layer and request"),
            Fact("state_bytes", float(state), "iB", "of state a request"),
            Fact("log_bytes", float(log), "iB", "of inputs a token, that replay logs"),
        ],
        [Column("batch", "batch", "n"),
         *(Column(setup, f"{setup}, bytes a token", "B") for setup in speculation.SETUPS)],
        rows, Curve("batch", "MB moved a token", lines, log_y=True),
        notes=["keys, values and, past the crossover, the arithmetic are left out: the columns' order is meant"],
    )  # fmt: skip


def plan_transfer(options: argparse.Namespace) -> Answer:
    """Prefill/decode split."""
    facts: list[Fact] = []
    rows: list[dict[str, Any]] = []
    inputs: dict[str, Any] = {}
    if options.link is not None:
        if options.flops is None:
            raise UserError("--link: needs --flops, what one GPU reaches in prefill; allowed: --flops 400TFLOP/s")
        if options.params is None or options.kv_per_token is None:
            model = _model(options)
            params, kv = float(model.num_parameters), model.kv_bytes_per_token()
            inputs["model"] = model.where
        if options.params is not None:
            params = quantity("--params", options.params, PARAMETERS)
        if options.kv_per_token is not None:
            kv = quantity("--kv-per-token", options.kv_per_token, BYTES)
        links = count("--links", options.links)
        link = quantity("--link", options.link, BYTES_PER_S) * links
        gpus, flops = count("--gpus", options.gpus), quantity("--flops", options.flops, FLOPS_PER_S)
        inputs |= {"parameters": params, "kv_bytes_per_token": kv, "link_bytes_s": link, "gpus": gpus, "flops_s": flops}
        ratio = serving.transfer_ratio(kv, link, params, gpus, flops)
        facts.append(Fact("ratio", ratio, "%", "of the prefill's time goes into the transfer, whatever the length"))
        rows = [{"tokens": tokens, "bytes": kv * tokens, "transfer_s": serving.transfer_s(kv, tokens, link),
                 "prefill_s": serving.dense_prefill_s(params, tokens, gpus, flops)}
                for tokens in counts("--tokens", options.tokens)]  # fmt: skip
    if options.rate is not None:
        rate = quantity("--rate", options.rate, PER_S)
        inputs["rate_rps"] = rate
        if (options.output is None) != (options.tpot is None):
            raise UserError("--output and --tpot: together they give decode slots; allowed: both, or neither")
        if options.output is not None:
            tokens, tpot = number("--output", options.output, above=True), quantity("--tpot", options.tpot, SECONDS)
            held = serving.decode_slots(rate, tokens, tpot)
            inputs |= {"output_tokens": tokens, "tpot_s": tpot}
            facts.append(Fact("decode_slots", held, "", "decode slots held (Little)"))
            if options.max_num_seqs is not None:
                used = held / count("--max-num-seqs", options.max_num_seqs)
                side = "above" if used > serving.SLOTS_USED else "within"
                words = f"of max_num_seqs: {side} the {serving.SLOTS_USED:.0%} to keep under"
                facts.append(Fact("slots_share", used, "%", words))
        if options.setup is not None:
            lost = serving.loop_share(rate, quantity("--setup", options.setup, SECONDS))
            facts.append(Fact("loop_share", lost, "%", "of the engine loop's time goes into setting requests up"))
    elif any(getattr(options, name) is not None for name in ("output", "tpot", "setup", "max_num_seqs")):
        raise UserError("--output, --tpot, --max-num-seqs and --setup belong to a rate; allowed: with --rate 8/s")
    if not facts:
        raise UserError("plan transfer: nothing to compute; allowed: --link with --flops, or --rate with --output and "
                        "--tpot, or with --setup")  # fmt: skip
    columns = [Column("tokens", "prompt", "n"), Column("bytes", "cache", "B"), Column("transfer_s", "transfer", "s"),
               Column("prefill_s", "prefill", "s")]  # fmt: skip
    return Answer("transfer", "(kv_bytes_per_token / link) / (2 params / (gpus x flops))", inputs, facts, columns, rows,
                  notes=["at line rate, without overlap and without attention's own FLOPs: the worst case",
                         "a split gives no throughput: judge it by the p99 ITL of short requests"])  # fmt: skip


def plan_experts(options: argparse.Namespace) -> Answer:
    """Distinct experts that a step reads."""
    inputs: dict[str, Any] = {}
    if options.experts is not None and options.per_token is not None:
        experts, each = count("--experts", options.experts), count("--per-token", options.per_token)
    elif options.experts is not None or options.per_token is not None:
        raise UserError("--experts and --per-token: allowed: both, or --model")
    else:
        model = _model(options)
        sparse = [layer for layer in model.layers if layer.experts]
        if not sparse:
            raise UserError(f"{model.where}: model_type={model.family!r} has no experts; allowed: --experts and "
                            "--per-token, or --model of a mixture of experts")  # fmt: skip
        experts, each = len(sparse[0].experts), sparse[0].per_token
        inputs["model"] = model.where
    batches = counts("--batch", options.batch)
    reached = [serving.distinct_experts(experts, each, batch) for batch in batches]
    rows = [{"batch": batch, "distinct": number, "share": number / experts}
            for batch, number in zip(batches, reached, strict=True)]  # fmt: skip
    return Answer(
        "experts", "E (1 - (1 - k/E)^b)", inputs | {"experts": experts, "per_token": each},
        columns=[Column("batch", "batch", "n"), Column("distinct", "distinct experts", ""),
                 Column("share", "of all", "%")],
        rows=rows, curve=Curve("batch", "distinct experts of a layer",
                               {"uniform": (batches, reached)}),
        notes=["uniform and independent routing: real tokens agree, and reach fewer"],
    )  # fmt: skip


def plan_cost(options: argparse.Namespace) -> Answer:
    """Cost of a million tokens."""
    hourly = quantity("--hourly", options.hourly, USD_PER_HOUR)
    used, overhead = (
        share("--utilisation", options.utilisation, zero=False),
        number("--overhead", options.overhead, above=True),
    )
    inputs: dict[str, Any] = {"hourly_usd": hourly, "utilisation": used, "overhead": overhead}
    if (options.throughput is None) == (options.run is None):
        raise UserError("plan cost: allowed: one of --throughput 650tok/s and --run, whose best cell gives it")
    if options.throughput is not None:
        rate = quantity("--throughput", options.throughput, TOKENS_PER_S)
    else:
        cells = read_run(options.run).results.table("sweep", "cells.parquet")
        if cells is None or not float(cells["output_tok_s"].max()) > 0:  # type: ignore[arg-type]
            raise UserError(f"{options.run}: its sweep gave no tokens; allowed: a run whose sweep did")
        best = cells.sort("output_tok_s", descending=True).row(0, named=True)
        rate = float(best["output_tok_s"])
        inputs["cell"] = f"{best['shape']} {best['level']}"
    usd = cost.cost_per_million(hourly, rate, used, overhead)
    shares = [value / 100 for value in (5, 10, 20, 40, 60, 80, 100)]
    usds = [cost.cost_per_million(hourly, rate, value, overhead) for value in shares]
    curve = Curve("utilisation, %", "USD a million tokens",
                  {"cost": ([100 * value for value in shares], usds)}, log_x=False)  # fmt: skip
    return Answer("cost", "hourly / (tok/s x 3600 x utilisation) x 1e6 x overhead", inputs | {"tok_s": rate},
                  [Fact("usd_per_million_tokens", usd, "USD", "a million output tokens")], curve=curve)  # fmt: skip


def plan_meter(options: argparse.Namespace) -> Answer:
    """What events or a run come to."""
    if (options.events is None) == (options.run is None):
        raise UserError("plan meter: allowed: one of --events FILE and --run")
    prices = cost.read_prices(options.prices)
    if options.events is not None:
        if options.name is not None:
            raise UserError(f"--as={options.name}: events name their own models; allowed: with --run")
        events = [event for path in options.events for event in cost.read_events(path)]
        inputs: dict[str, Any] = {"events": ", ".join(map(str, options.events))}
    else:
        results = read_run(options.run).results
        events = cost.events_of_run(results, options.name or model_name(results.section("model")))
        inputs = {"run": str(results.folder)}
    found = cost.bills(events, prices)
    priced = [bill.usd for bill in found if bill.usd is not None]
    unpriced = [bill.model for bill in found if bill.usd is None]
    columns = [
        Column("model", "model", "text"), Column("events", "events", "n"), Column("repeats", "sent again", "n"),
        Column("conflicts", "otherwise", "n"), Column("input_tokens", "input", "n"),
        Column("cached_tokens", "cached", "n"), Column("output_tokens", "output", "n"), Column("usd", "USD", ""),
    ]  # fmt: skip
    notes = (
        [f"unpriced, and not in the sum: {', '.join(unpriced)}; {options.prices} has no price for them"]
        if unpriced
        else []
    )
    return Answer("meter", "each event once; cached input at its own price", inputs | {"prices": str(options.prices)},
                  [Fact("usd", sum(priced) if priced else None, "USD", "for what is priced")], columns,
                  cost.as_rows(found), notes=notes)  # fmt: skip


def plan_shift(options: argparse.Namespace) -> Answer:
    """SHIFT, PIR and WCS of a table."""
    candidates, notes = read_table(options.table), []
    if options.run is not None:
        honesty = None if options.honesty is None else number("--honesty", options.honesty)
        if honesty is not None and honesty > 100:
            raise UserError(f"--honesty={options.honesty}: allowed: 0 to 100")
        candidates.append(candidate_of_run(read_run(options.run), honesty))
        notes.append("of the run: I is 100 x the mean of its acc_bytes, F its fastest stream, S its parameters, T the "
                     "engine's memory; no stage scores honesty")  # fmt: skip
    elif options.honesty is not None:
        raise UserError(f"--honesty={options.honesty}: belongs to --run; allowed: with it, or H in the table")
    ranked = sorted(rank(candidates), key=lambda one: -1.0 if one.wcs is None else one.wcs, reverse=True)
    return Answer(
        "shift", "WCS = sqrt((0.4 H + 0.6 I) x 100 log10(I H F / (S T)) / log10(max))", {"table": str(options.table)},
        columns=[Column("model", "model", "text"), Column("shift", "SHIFT", ""), Column("pir", "PIR", ""),
                 Column("pir_norm", "PIR_norm", ""), Column("wcs", "WCS", ""),
                 Column("why", "undefined because", "text")],
        rows=[asdict(one) for one in ranked], notes=notes,
    )  # fmt: skip


def plan_state(options: argparse.Namespace) -> Answer:
    """Rounding of recurrent state, and replay, in numbers."""
    decay, accept = share("--decay", options.decay, zero=False), share("--accept", options.accept)
    sizes = {name: count(f"--{name}", getattr(options, name)) for name in ("tokens", "width", "drafts")}
    windows, seed = counts("--windows", options.windows), count("--seed", options.seed, least=0)
    from oneaxis.plan.recurrence import replay_against_copies, rounding_errors

    found = rounding_errors(decay, sizes["tokens"], sizes["width"], options.dtype, windows, seed)
    replayed = replay_against_copies(decay, 200, sizes["width"], sizes["drafts"], accept, 16, seed)
    rows = [asdict(one) for one in found]
    by_root = [found[0].error * found[0].expected / one.expected for one in found]
    return Answer(
        "state", "S_t = a S_{t-1} + k_t v_t^T, rounded at the end of every window",
        {"decay": decay, **sizes, "accept": accept, "dtype": options.dtype, "seed": seed},
        [
            Fact("replay_difference", replayed.difference, "",
                 f"replay against copies over {replayed.kept} tokens, float64"),
            Fact("replay_against_plain", replayed.against_plain, "", "replay against the recurrence without drafts"),
            Fact("copies_written", replayed.copies_written / replayed.kept, "", "states written a token, with copies"),
            Fact("replay_written", replayed.replay_written / replayed.kept, "", "states written a token, with replay"),
        ],
        [Column("window", "fold every", "n"), Column("error", "error of outputs", ""), Column("gain", "less by", "x"),
         Column("expected", "sqrt(window)", "x")],
        rows, Curve("fold every, tokens", "RMS error by RMS output",
                    {"measured": (windows, [one.error for one in found]),
                     "by sqrt(window)": (windows, by_root)}, log_y=True),
    )  # fmt: skip


def plan_compare(options: argparse.Namespace) -> Answer:
    """A finished run beside all plans."""
    return _compared(options, options.run)


PLANS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "roofline": plan_roofline,
    "decode": plan_decode,
    "kv": plan_kv,
    "prefill": plan_prefill,
    "routing": plan_routing,
    "speculation": plan_speculation,
    "hybrid": plan_hybrid,
    "transfer": plan_transfer,
    "experts": plan_experts,
    "cost": plan_cost,
    "meter": plan_meter,
    "shift": plan_shift,
    "state": plan_state,
    "compare": plan_compare,
}
