"""Faults of a load: a sweep that is clean but for one thing, and the guard that has to name it.

Oracle: the fault that is injected. Most are committed by the golden server (`fake_server.py`), some by the client, some
to the record afterwards, as a faulty tool would leave it. Everything between is the product's own: the plan, the
client, the sweep, its summary and its guards. `python -m tests.load.faults` writes the table in docs/guards.md.
"""

import asyncio
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import uvloop

from oneaxis.config.schema import Guards, Load, SharedPrefix
from oneaxis.judge.guards import Guard
from oneaxis.load.draws import draw_answers
from oneaxis.load.plan import Plan, draw_plan
from oneaxis.load.summary import judge, summarise
from oneaxis.load.sweep import Sweep, run_cells
from oneaxis.serve.metrics import info_labels
from oneaxis.serve.realised import compare
from tests.judge.faults import FAULTS as ARM_FAULTS
from tests.load.fake_server import Answer, FakeServer, fake_server
from tests.load.test_sweep import ALONE, HELD, LOAD
from tests.serve.tiny import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, serve

BOUNDS = Guards(max_send_lag_p99_ms=500.0, max_prefix_hit_rate=0.01, max_token_disagreement=0.01, max_stall_shift=0.7,
                max_stray_cpu_share=0.25, max_server_disagreement=0.05, max_server_disagreement_ms=500.0)  # fmt: skip
"""For a machine that does much else: a client that gets no core for a third of a second is no fault of the sweep's. The
faults are larger."""
SMALL = LOAD.model_copy(
    update={
        "shapes": [
            LOAD.shapes[0].model_copy(update={"name": "long", "prompt_tokens": 24, "output_tokens": 3}),
            LOAD.shapes[1].model_copy(update={"name": "short", "prompt_tokens": 8, "output_tokens": 4}),
        ],
        "duration_s": 0.4,
        "warmup_requests": 1,
        "request_timeout_s": 4.0,
    }
)
"""Two cells of four requests, a tenth of a second apart."""
LONGER = SMALL.model_copy(update={"duration_s": 2.0, "request_timeout_s": 10.0})
"""Twenty requests a cell: what touches half a second of them touches a minority."""
PREFIXED = LONGER.model_copy(
    update={
        "shapes": [
            SMALL.shapes[0].model_copy(update={"shared_prefix": SharedPrefix(tokens=20, groups=2, share=1.0)}),
            SMALL.shapes[1],
        ],
        "rates_rps": [2.0],
        "duration_s": 5.0,
    }
)
"""Ten requests a cell. Those of one shape begin in one of two declared ways, and only the first of each is new."""
CACHES = {"block_tokens": 4, "prefill_s": 0.012}
"""A prompt of 24 tokens takes 0.29 s, and 0.05 s where 20 of them are cached."""
GAP = Answer(gap_s=0.15)
"""Answers of half a second: what a busy machine may hold up is small against it."""
CONFIG = {"model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
          "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
          "head_dim": HEAD_DIM}  # fmt: skip
"""Of the checkpoint that the server says it serves: 512 bytes of keys and values a token in BF16."""
SETTINGS = serve(threads=1)


@dataclass(frozen=True)
class Run:
    """A sweep with all that its guards look at."""

    plan: Plan
    """As it was meant: the guards judge by it."""
    sweep: Sweep
    cells: pl.DataFrame
    differences: Sequence[Any]
    draws: pl.DataFrame
    lease: Mapping[str, Any] | None = field(default_factory=lambda: HELD)
    tenants: Mapping[str, Any] = field(default_factory=lambda: ALONE)
    load: Load = SMALL
    cache_block_tokens: int | None = None

    def judged(self) -> list[Guard]:
        """The verdicts of the guards."""
        return judge(self.plan, self.sweep, self.cells, self.differences, BOUNDS, load=self.load, lease=self.lease,
                     tenants=self.tenants, draws=self.draws, cache_block_tokens=self.cache_block_tokens)  # fmt: skip

    def with_requests(self, requests: pl.DataFrame) -> "Run":
        """With another request table, summed up as the product does."""
        sweep = replace(self.sweep, requests=requests)
        return replace(self, sweep=sweep, cells=summarise(sweep, self.load))


def unchanged(plan: Plan) -> Plan:
    """The plan itself."""
    return plan


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a sweep."""

    guard: int
    what: str
    """As docs/guards.md says it."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the golden server."""
    answer: Answer | None = None
    """How it answers the second request of each cell."""
    answers: Callable[[Plan], dict[str, Answer]] | None = None
    """How it answers requests by their names, otherwise."""
    sent: Callable[[Plan], Plan] = unchanged
    """What the client sends in place of the plan."""
    meant: Callable[[Plan], Plan] = lambda plan: plan
    """The plan that the guards see."""
    record: Callable[[Run], Run] = lambda run: run
    """What becomes of the record."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint's config.json has beside `CONFIG`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What was asked of the engine otherwise."""
    load: Load = SMALL
    also: tuple[int, ...] = ()
    """Guards that see it too."""
    alone: bool = False
    """It holds up its own client, and must not hold up others."""

    @property
    def felt(self) -> bool:
        """Whether the load itself goes otherwise for it."""
        told = {"config", "cache_labels", "seeds"}
        return bool(self.answer or self.answers or self.sent is not unchanged or self.server.keys() - told)


def draw(seed: int = 0, load: Load = SMALL) -> Plan:
    """A plan over random text."""
    text = np.random.default_rng(seed).integers(3, 90, size=500).astype(np.int32)
    return draw_plan(load, text, seed=seed, session="faults", repetition=0)


def realised(server: FakeServer, config: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Any]:
    """What the server runs otherwise than asked, from its pages over HTTP."""
    info = json.loads(server.get("/server_info"))
    labels = info_labels(server.get("/metrics"), "vllm:cache_config_info")
    asked = SETTINGS.model_copy(update=dict(settings))
    return compare(asked, server_info=info, cache_labels=labels, config=CONFIG | dict(config), generation={},
                   kernels=[], device="cpu")["differences"]  # fmt: skip


def measured(cases: Sequence[tuple[FakeServer, Fault, Plan]], at_once: int) -> list[Run]:
    """A sweep of each plan, so many side by side, and what is recorded of it.

    Faults that the load does not feel (what the engine says it runs, what is done to the record) share one sweep of
    their plan. Everything but the sweeps themselves is done before and after: it would hold up their client.
    """
    probed = [
        (draw_answers(server, [5, 6, 7], seed=11), realised(server, fault.config, fault.settings))
        for server, fault, _ in cases
    ]
    keys = [id(fault) if fault.felt else id(plan) for _, fault, plan in cases]
    room = asyncio.Semaphore(at_once)

    async def one(place: int, server: FakeServer, fault: Fault, plan: Plan) -> Sweep:
        async with room:
            # Not all in one instant: a hundred connections at a time are no load of ours.
            await asyncio.sleep(0.3 * (place % at_once) / at_once)
            return await run_cells(server, plan, fault.load.duration_s, fault.load.request_timeout_s)

    async def go() -> list[Sweep]:
        sent = {key: (server, fault, fault.sent(plan))
                for key, (server, fault, plan) in zip(keys, cases, strict=True)}  # fmt: skip
        sweeps = await asyncio.gather(*(one(place, *case) for place, case in enumerate(sent.values())))
        by_key = dict(zip(sent, sweeps, strict=True))
        return [by_key[key] for key in keys]

    # As the product does around a sweep: a full garbage collection takes longer than a request may be late.
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sweeps = runner.run(go())
    finally:
        gc.unfreeze()
    return [
        fault.record(
            Run(
                fault.meant(plan),
                sweep,
                summarise(sweep, fault.load),
                differences,
                draws,
                load=fault.load,
                cache_block_tokens=fault.server.get("block_tokens"),
            )
        )
        for (_, fault, plan), sweep, (draws, differences) in zip(cases, sweeps, probed, strict=True)
    ]


def sweep_all(faults: Mapping[str, Fault]) -> dict[str, list[Guard]]:
    """The guards of a sweep with each of the faults: those that hold up nobody side by side, the others after."""
    plans = {id(fault.load): draw(load=fault.load) for fault in faults.values()}
    together = {name: fault for name, fault in faults.items() if not fault.alone}
    parts = [together, *({name: fault} for name, fault in faults.items() if fault.alone)]
    found: dict[str, list[Guard]] = {}
    for part in parts:
        with ExitStack() as servers:
            cases = [
                (servers.enter_context(served(fault, plan)), fault, plan)
                for fault in part.values()
                for plan in [plans[id(fault.load)]]
            ]
            runs = measured(cases, at_once=30)
        found |= {name: run.judged() for name, run in zip(part, runs, strict=True)}
    return found


def served(fault: Fault, plan: Plan) -> Any:
    """The golden server with the fault."""
    # A warm-up is not measured, and need not take its time.
    answers = dict.fromkeys(plan.warmups["request_id"], Answer(gap_s=0.01))
    answers |= fault.answers(plan) if fault.answers else {}
    if fault.answer:
        answers |= dict.fromkeys(some(plan, 1), fault.answer)
    return fake_server(GAP, answers=answers, **fault.server)


def some(plan: Plan, first: int, last: int | None = None) -> list[str]:
    """Names of the requests at these places of each cell."""
    last = first + 1 if last is None else last
    return plan.arrivals.group_by("shape", "level", maintain_order=True).agg(
        pl.col("request_id").slice(first, last - first)
    )["request_id"].explode().to_list()  # fmt: skip


def quick(plan: Plan, stalling: Sequence[str] = ()) -> dict[str, Answer]:
    """Every answer takes little beside its prompt; some wait before their last token."""
    answers = dict.fromkeys(plan.arrivals["request_id"], Answer(gap_s=0.02))
    return answers | dict.fromkeys(stalling, Answer(gap_s=0.02, stall_s=6.0))


def firsts(plan: Plan) -> list[str]:
    """Names of the first request of each declared start."""
    started = plan.arrivals.filter(pl.col("prefix_group").is_not_null())
    return started.unique(("shape", "level", "prefix_group"), keep="first", maintain_order=True)["request_id"].to_list()


CLEAN = {
    "short cells": Fault(0, "nothing is wrong"),
    "longer cells": Fault(0, "nothing is wrong", load=LONGER),
    "declared starts": Fault(0, "nothing is wrong", server=CACHES, answers=quick, load=PREFIXED),
}


# --- what faulty tools do -------------------------------------------------------------------------------------------


def one_prompt(plan: Plan) -> Plan:
    """The client sends one prompt for all."""
    first = plan.arrivals["prompt_token_ids"].to_list()[-1]
    copies = pl.Series("prompt_token_ids", [first] * plan.arrivals.height, dtype=pl.List(pl.Int32))
    return replace(plan, arrivals=plan.arrivals.with_columns(copies))


def one_start(plan: Plan) -> Plan:
    """All prompts begin with one system prompt of 6 tokens."""
    prompts = [[9, 8, 7, 6, 5, 4, *ids[6:]] for ids in plan.arrivals["prompt_token_ids"].to_list()]
    column = pl.Series("prompt_token_ids", prompts, dtype=pl.List(pl.Int32))
    return replace(plan, arrivals=plan.arrivals.with_columns(column))


def without(run: Run, rows: pl.Expr) -> Run:
    """The rows are dropped from the request table."""
    return run.with_requests(run.sweep.requests.filter(~rows))


def slowest(run: Run) -> pl.Expr:
    """The request that ended last."""
    ended = run.sweep.requests["ended_s"].max()
    return pl.col("ended_s") == ended


def of_survivors(run: Run) -> Run:
    """Tails and attainment over answered requests alone, written beside the whole table."""
    survivors = run.sweep.requests.filter(pl.col("status") == "ok")
    cells = summarise(replace(run.sweep, requests=survivors), run.load)
    ours = run.cells.select("n", "ok")
    return replace(run, cells=cells.with_columns(n=ours["n"], ok=ours["ok"]))


def twice(run: Run) -> Run:
    """One row is there twice, another is not."""
    names = run.sweep.requests["request_id"].to_list()
    column = pl.Series("request_id", [names[1], *names[1:]])
    return run.with_requests(run.sweep.requests.with_columns(column))


def moved(run: Run, seconds: float) -> Run:
    """Every request was sent this much later than it was."""
    return run.with_requests(run.sweep.requests.with_columns(sent_s=pl.col("sent_s") + seconds))


def one_at_a_time(run: Run) -> Run:
    """A client that waits for each answer before it sends the next."""
    took = (pl.col("ended_s") - pl.col("sent_s")).over("shape", "level")
    before = took.cum_sum().over("shape", "level") - took
    return run.with_requests(run.sweep.requests.with_columns(sent_s=pl.max_horizontal("sent_s", before)))


def never_sent(run: Run) -> Run:
    """One request was given up before it was sent."""
    row = pl.int_range(pl.len()) == 2
    lost = pl.when(row).then(None)
    return run.with_requests(
        run.sweep.requests.with_columns(
            sent_s=lost.otherwise("sent_s"),
            status=pl.when(row).then(pl.lit("refused")).otherwise("status"),
            output_tokens=lost.otherwise("output_tokens"),
            prompt_tokens=lost.otherwise("prompt_tokens"),
        )
    )


def warmed_up_by_measured(run: Run) -> Run:
    """The warm-up consists of the first measured requests."""
    names = run.plan.arrivals["request_id"].head(run.plan.warmups.height)
    return replace(run, plan=replace(run.plan, warmups=run.plan.warmups.with_columns(request_id=names)))


def nothing_warmed_up(run: Run) -> Run:
    """No warm-up was sent."""
    cells = [{**cell, "warmup_requests": 0, "warmup_ok": 0} for cell in run.sweep.conditions]
    return replace(run, sweep=replace(run.sweep, conditions=cells))


CUT = Answer(chunks=((0.15, 1), (0.15, 1)), ending="cut")
STALL = replace(GAP, stall_s=6.0)
FP8_SCHEME = {"quantization_config": {"quant_method": None, "kv_cache_scheme": {"type": "float", "num_bits": 8}}}
W4A8 = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
    "g": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}}}  # fmt: skip

FAULTS: dict[str, Fault] = {
    "cached repeats": Fault(
        1, "the client sends one prompt for all, and the server answers from its cache",
        server={"reuse": True}, sent=one_prompt),
    "repeated prompts": Fault(1, "the plan holds one prompt for all", sent=one_prompt, meant=one_prompt),
    "a shared start": Fault(1, "all prompts begin with the same six tokens", sent=one_start, meant=one_start),
    "a cache that matches too much": Fault(
        1, "the server takes every prompt from its cache, though none repeats", server={"reuse_all": True}),
    "no cache counters": Fault(
        1, "the server does not count its cache's hits", server={"without": ("prefix_cache_hits_total",)}),
    "wrong usage": Fault(2, "a usage record says two tokens too many", answer=replace(GAP, usage_offset=2), also=(7,)),
    "chunks counted as tokens": Fault(
        2, "usage counts chunks of two tokens as one", answers=lambda plan: dict.fromkeys(
            plan.arrivals["request_id"], replace(GAP, per_chunk=2, gap_s=0.2, usage_offset=-1)), also=(7,)),
    "prompts cut": Fault(
        2, "the server reads one token less of a prompt", answer=replace(GAP, prompt_offset=-1)),
    "a counter that lies": Fault(
        2, "the server's counter of generated tokens grows by a tenth too much",
        server={"lies": {"generation_tokens_total": 1.1}}, also=(15,)),
    "a missing counter": Fault(
        2, "the server has no counter of generated tokens", server={"without": ("generation_tokens_total",)},
        also=(15,)),
    "another client": Fault(2, "somebody else uses the engine meanwhile", server={"other_tokens": 2}, also=(15,)),
    "a silent KV change": Fault(
        3, "the checkpoint's kv_cache_scheme turns the cache to FP8; the engine says `auto`",
        server={"cache_labels": {"kv_cache_size_tokens": "2097152"}}, config=FP8_SCHEME),
    "another KV dtype": Fault(
        3, "the engine runs an FP8 cache where BF16 was asked", settings={"kv_cache_dtype": "bfloat16"},
        server={"cache_labels": {"cache_dtype": "fp8_e4m3", "kv_cache_size_tokens": "2097152"}}),
    "less KV memory": Fault(
        3, "the cache has half the tokens that its memory gives",
        server={"cache_labels": {"kv_cache_size_tokens": "524288"}}),
    "another dtype": Fault(
        3, "the engine computes in float32", server={"config": {"model_config": {"dtype": "torch.float32"}}}),
    "prefix caching on": Fault(
        3, "the prefix cache is on where off was asked", server={"cache_labels": {"enable_prefix_caching": "True"}}),
    "fewer sequences": Fault(
        3, "the engine takes 4 sequences at once where 8 were asked",
        server={"config": {"scheduler_config": {"max_num_seqs": 4}}}),
    "a setting that is not kept": Fault(
        3, "async_scheduling=true resolves to false", settings={"engine_args": {"async_scheduling": True}}),
    "quantisation dropped": Fault(
        3, "the engine does not run the checkpoint's quantisation",
        config={"quantization_config": {"quant_method": "compressed-tensors"}}),
    "W4A8 as W4A16": Fault(
        3, "4-bit weights with 8-bit activations run with unquantised activations", config=W4A8,
        server={"config": {"model_config": {"quantization": "compressed-tensors"}}}),
    "a slow client": Fault(
        5, "the client's process is held up 0.8 s at a time", server={"client_pause_s": 0.8}, also=(9, 15), alone=True),
    "sent late": Fault(5, "every request is sent a second late", record=lambda run: moved(run, 1.0), also=(15,)),
    "sent early": Fault(5, "every request is sent a second early", record=lambda run: moved(run, -1.0), also=(15,)),
    "a closed loop": Fault(
        5, "the client waits for each answer before it sends the next", record=one_at_a_time, load=LONGER, also=(15,)),
    "never sent": Fault(5, "a request is given up before it is sent", record=never_sent, also=(2, 15)),
    "the slowest left out": Fault(
        6, "the request that took longest is dropped from the table",
        record=lambda run: without(run, slowest(run)), also=(2, 5, 15)),
    "dropped streams left out": Fault(
        6, "streams that break half-way are dropped from the table", answer=CUT,
        record=lambda run: without(run, pl.col("status") != "ok"), also=(2, 5, 15)),
    "truncated tails": Fault(
        6, "percentiles and attainment are those of the answered requests", answer=CUT, record=of_survivors),
    "timeouts left out": Fault(
        6, "requests that never ended are dropped from the table",
        answer=Answer(chunks=((0.1, 1),), ending="hang"), record=lambda run: without(run, pl.col("status") != "ok"),
        also=(2, 5, 15)),
    "counted twice": Fault(6, "one request has two rows, another none", record=twice, also=(15,)),
    "max_tokens ignored": Fault(
        7, "answers go on for two tokens more than asked", answer=replace(GAP, extra_tokens=2), also=(2, 15)),
    "ended early": Fault(
        7, "an answer stops by itself, though ignore_eos was asked", answer=replace(GAP, finish_reason="stop")),
    "truncated answers": Fault(
        7, "an answer is a token short, and says that its length ended it", answer=replace(GAP, extra_tokens=-1),
        also=(2, 15)),
    "frozen draws": Fault(8, "sampled answers are the same whatever their seed", server={"seeds": 1}),
    "duplicated draws": Fault(8, "every third seed gives the same sampled answer", server={"seeds": 3}),
    "stalled calls": Fault(
        9, "three answers of twenty wait six seconds for their last token",
        answers=lambda plan: dict.fromkeys(some(plan, 1, 4), STALL), load=LONGER),
    "a start that hangs": Fault(
        9, "the first answer of each declared start waits six seconds for its last token",
        server=CACHES, answers=lambda plan: quick(plan, firsts(plan)), load=PREFIXED),
    "stalls after a start": Fault(
        9, "two answers of ten whose start is cached wait six seconds for their last token",
        server=CACHES, answers=lambda plan: quick(plan, some(plan, 6, 8)), load=PREFIXED),
    "a frozen engine": Fault(
        9, "the engine stands still for six seconds", server={"freeze_at": 19, "freeze_s": 6.0}, load=LONGER),
    "no lease": Fault(10, "the device was not held", record=lambda run: replace(run, lease=None)),
    "a shared lease": Fault(
        10, "the device was shared", record=lambda run: replace(run, lease={**HELD, "exclusive": False})),
    "a busy neighbour": Fault(
        10, "another process keeps a CPU of two busy",
        record=lambda run: replace(run, tenants={**ALONE, "other_cpus": 0.9, "busiest": ["cc1plus"]})),
    "a process on the GPU": Fault(
        10, "another process computes on the GPU",
        record=lambda run: replace(run, tenants={**ALONE, "gpu_processes": ["python (process 7, 400 MiB)"]})),
    "a warm-up that failed": Fault(
        13, "a request of the warm-up fails",
        answers=lambda plan: {plan.warmups["request_id"][0]: Answer(http_status=500)}),
    "no warm-up": Fault(13, "no warm-up is sent", record=nothing_warmed_up),
    "warm-up measured": Fault(
        13, "the warm-up consists of requests that are measured", record=warmed_up_by_measured),
    "a proxy that holds back": Fault(
        15, "something between server and client passes events on in pairs",
        answers=lambda plan: dict.fromkeys(plan.arrivals["request_id"], replace(GAP, gap_s=0.8, split="held"))),
    "a TTFT that lies": Fault(
        15, "the server's histogram says ten times the time to first token",
        server={"lies": {"time_to_first_token_seconds": 10.0}}),
    "an ITL that lies": Fault(
        15, "the server's histogram says ten times the time between tokens",
        server={"lies": {"inter_token_latency_seconds": 10.0}}),
    "no histograms": Fault(
        15, "the server has no histogram of TTFT", server={"without": ("time_to_first_token_seconds",)}),
}  # fmt: skip


# --- docs/guards.md -------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- faults: python -m tests.load.faults -->", "<!-- end of faults -->"


def table() -> str:
    """Every fault with the guard that has to name it, as Markdown."""
    rows = [(fault.guard, f"{fault.what}", "a run") for fault in FAULTS.values()]
    rows += [(fault.guard, fault.what, "two arms") for fault in ARM_FAULTS.values() if fault.guard]
    said = (
        f"{len(rows)} faults are injected; each is caught by the guard beside it, and the same run without it passes."
    )
    lines = [said, "", "| Guard | Fault | In |", "|---|---|---|"]
    lines += [f"| {guard} | {what} | {where} |" for guard, what, where in sorted(rows, key=lambda row: row[0])]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "guards.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
