"""`oneaxis plan WHAT`: from words of a command line to the closed forms, and their answers as text, JSON and a plot.

    oneaxis plan roofline     tokens in flight from which a scheme is bound by compute
    oneaxis plan decode       bandwidth ceiling of one stream, and what a batch gives
    oneaxis plan kv           KV bytes a token, longest context and most sequences that a device holds
    oneaxis plan prefill      seconds to compute a prompt
    oneaxis plan routing      hit rate of prefix caches behind a round-robin router
    oneaxis plan speculation  tokens a verification, speed-up, tokens in flight
    oneaxis plan hybrid       speculation on recurrent state: the copy rule, bytes by setup and batch
    oneaxis plan transfer     prefill/decode split: transfer against prefill, decode slots, loop time
    oneaxis plan experts      distinct experts that a step reads
    oneaxis plan cost         cost of a million tokens
    oneaxis plan meter        what events, or a finished run, come to at a price list
    oneaxis plan shift        SHIFT, PIR and WCS of a table of models
    oneaxis plan state        rounding of recurrent state, and replay against state copies, in numbers
    oneaxis plan compare      a finished run beside all plans that it can be laid beside
    oneaxis plan --measure    this CPU's own ceilings, stored for --hardware here

Numbers take their unit: 3.35TB/s, 400Gb/s, 80GiB, 10.4ms, 8/s, 60%.
"""

import argparse
from pathlib import Path
from typing import Any

from oneaxis.errors import UserError

BESIDE = ("decode", "kv", "prefill", "speculation")
"""Plans that `--run` replaces by a comparison."""
BATCHES = "1,2,4,8,16,32,64,128,256"


def add_plan_parser(commands: Any) -> None:
    """Add `plan` to the command line's parsers."""
    parser = commands.add_parser(
        "plan",
        help="the arithmetic before a run: ceilings, memory, speculation, transfer, cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--measure", action="store_true", help="measure this CPU's ceilings and store them")
    parser.add_argument("--threads", metavar="N", help="with --measure: threads (default: as serve.threads)")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser.set_defaults(action=_bare, json=False, what=None)
    plans = parser.add_subparsers(metavar="WHAT")

    def plan(name: str, text: str) -> Any:
        own = plans.add_parser(name, help=text)
        own.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        own.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve: .svg, .png or .pdf")
        own.set_defaults(action=_run_plan, what=name, defaults=own.get_default)
        return own

    def model(own: Any) -> None:
        own.add_argument("--model", type=Path, metavar="PATH",
                         help="config.json or its folder (default: the served checkpoint)")  # fmt: skip

    def hardware(own: Any) -> None:
        own.add_argument("--hardware", metavar="NAME", help="a file of conf/hardware/, or `here` (measured; default)")
        own.add_argument("--threads", metavar="N", help="with --hardware here: threads (default: as serve.threads)")

    def beside(own: Any) -> None:
        own.add_argument("--run", type=Path, nargs="?", const=Path(), metavar="PATH",
                         help="lay it beside a finished run (default: this project's artifacts)")  # fmt: skip

    own = plan("roofline", "tokens in flight from which a scheme is bound by compute")
    hardware(own)
    own.add_argument("--scheme", metavar="NAME,...", help="default: all that the device has a peak for")

    own = plan("decode", "bandwidth ceiling and batch curve")
    model(own)
    hardware(own)
    beside(own)
    own.add_argument("--weights", metavar="8.2GB", help="bytes read a step, in place of --model")
    own.add_argument("--kv", metavar="300MB", help="with --weights: bytes of a sequence's cache (default: none)")
    own.add_argument("--bandwidth", metavar="3.35TB/s", help="in place of --hardware")
    own.add_argument("--context", metavar="TOKENS", default="2048", help="of each sequence (default: 2048)")
    own.add_argument("--batch", metavar="B,...", default=BATCHES, help=f"default: {BATCHES}")
    own.add_argument("--overhead", metavar="0.5ms", default="0ms", help="t0 of a step (default: 0ms)")

    own = plan("kv", "KV bytes, longest context, most sequences")
    model(own)
    hardware(own)
    beside(own)
    own.add_argument("--kv-dtype", metavar="NAME", help="bf16, fp8, f32 (default: as the checkpoint asks)")
    own.add_argument("--memory", metavar="80GB", help="in place of --hardware")
    own.add_argument("--runtime", metavar="2GiB", default="2GiB", help="kept for the runtime (default: 2GiB)")
    own.add_argument("--context", metavar="TOKENS", default="2048", help="of each sequence (default: 2048)")
    own.add_argument("--block", metavar="TOKENS", default="16", help="of a cache block (default: 16; vLLM's CPU: 128)")

    own = plan("prefill", "seconds to compute a prompt")
    model(own)
    hardware(own)
    beside(own)
    own.add_argument("--tokens", metavar="N,...", default="128,512,2048,8192", help="default: 128,512,2048,8192")
    own.add_argument("--flops", metavar="400TFLOP/s", help="effective, in place of --hardware")
    own.add_argument("--gpus", metavar="N", default="1", help="that share it (default: 1)")

    own = plan("routing", "hit rate of prefix caches behind round-robin")
    own.add_argument("--shared", metavar="SHARE", required=True, help="of the prompt, common to all conversations")
    own.add_argument("--workers", metavar="N,...", default="1,2,4,8,16,32", help="default: 1,2,4,8,16,32")

    own = plan("speculation", "tokens a verification, speed-up, tokens in flight")
    hardware(own)
    beside(own)
    own.add_argument("--accept", metavar="A,...", help="one acceptance, or one for each position")
    own.add_argument("--drafts", metavar="K", default="8", help="with one acceptance: the most drafts (default: 8)")
    own.add_argument("--draft-cost", metavar="C", default="0", help="of a draft, by a target step (default: 0: n-gram)")
    own.add_argument("--batch", metavar="B,...", default="8,64", help="for tokens in flight (default: 8,64)")
    own.add_argument("--scheme", metavar="NAME", default="bf16", help="whose crossover is meant (default: bf16)")

    own = plan("hybrid", "speculation on recurrent state")
    own.add_argument("--accept", metavar="P", required=True, help="acceptance of a draft")
    own.add_argument("--drafts", metavar="T", required=True)
    own.add_argument(
        "--layers", metavar="N", default="40", help="with recurrent state (default: Nemotron-3-Super's 40)"
    )
    own.add_argument("--heads", metavar="N", default="128")
    own.add_argument("--head-size", metavar="N", default="64")
    own.add_argument("--state-size", metavar="N", default="128")
    own.add_argument("--state-bytes", metavar="N", default="4", help="of an element (default: 4)")
    own.add_argument("--weights", metavar="12GB", default="12GB", help="read a step (default: 12GB)")
    own.add_argument("--window", metavar="TOKENS", default="16", help="of replay (default: 16)")
    own.add_argument("--batch", metavar="B,...", default="16,64,128,256,512", help="default: 16,64,128,256,512")

    own = plan("transfer", "prefill/decode split: transfer, slots, loop time")
    model(own)
    own.add_argument("--params", metavar="70B", help="in place of --model's")
    own.add_argument("--kv-per-token", metavar="320KiB", help="in place of --model's")
    own.add_argument("--tokens", metavar="N,...", default="2048,8192,32768", help="default: 2048,8192,32768")
    own.add_argument("--gpus", metavar="N", default="1", help="that share the prefill (default: 1)")
    own.add_argument("--flops", metavar="400TFLOP/s", help="effective, of a GPU")
    own.add_argument("--link", metavar="400Gb/s", help="of one link")
    own.add_argument("--links", metavar="N", default="1", help="used at once (default: 1)")
    own.add_argument("--rate", metavar="8/s", help="arrivals, for slots and loop time")
    own.add_argument("--output", metavar="TOKENS", help="with --rate: of an answer")
    own.add_argument("--tpot", metavar="10.4ms", help="with --rate")
    own.add_argument("--max-num-seqs", metavar="N", help="with --rate: of the decode engine")
    own.add_argument("--setup", metavar="14.7ms", help="with --rate: engine time to set a request up")

    own = plan("experts", "distinct experts that a step reads")
    model(own)
    own.add_argument("--experts", metavar="E", help="in place of --model's")
    own.add_argument("--per-token", metavar="K", help="in place of --model's")
    own.add_argument("--batch", metavar="B,...", default=BATCHES, help=f"default: {BATCHES}")

    own = plan("cost", "cost of a million tokens")
    beside(own)
    own.add_argument("--hourly", metavar="2.5USD/h", required=True)
    own.add_argument("--throughput", metavar="650tok/s", help="in place of --run's best cell")
    own.add_argument("--utilisation", metavar="SHARE", default="1", help="of the hour (default: 1)")
    own.add_argument("--overhead", metavar="FACTOR", default="1", help="1.15: 15%% more (default: 1)")

    own = plan("meter", "what events or a run come to")
    beside(own)
    own.add_argument("--events", type=Path, nargs="+", metavar="FILE", help="JSONL, in place of --run")
    own.add_argument("--prices", type=Path, required=True, metavar="FILE", help="YAML: USD a million tokens, by model")
    own.add_argument("--as", dest="name", metavar="MODEL", help="with --run: the model's name in the price list")

    own = plan("shift", "SHIFT, PIR and WCS of a table")
    beside(own)
    own.add_argument("table", type=Path, metavar="TABLE", help=".csv or .json: model, H, I, F, S, T, params_b, bits")
    own.add_argument("--honesty", metavar="H", help="with --run: its honesty, 0 to 100, which no stage scores")

    own = plan("state", "rounding of recurrent state, and replay, in numbers")
    own.add_argument("--decay", metavar="A", default="0.99", help="of the state, a token (default: 0.99)")
    own.add_argument("--tokens", metavar="N", default="2048", help="default: 2048")
    own.add_argument("--width", metavar="N", default="16", help="of keys and values (default: 16)")
    own.add_argument("--dtype", metavar="NAME", default="bf16", help="bf16, f16, f32, fp8_e4m3 (default: bf16)")
    own.add_argument("--windows", metavar="N,...", default="1,4,16,64", help="default: 1,4,16,64")
    own.add_argument("--drafts", metavar="T", default="4", help="for replay (default: 4)")
    own.add_argument("--accept", metavar="P", default="0.7", help="for replay (default: 0.7)")
    own.add_argument("--seed", metavar="N", default="0")

    own = plan("compare", "a finished run beside all plans")
    hardware(own)
    own.add_argument("run", type=Path, nargs="?", default=Path(), metavar="PATH", help="default: this project")


def _bare(options: argparse.Namespace) -> int:
    from oneaxis.plan.answer import print_answer

    if not options.measure:
        raise UserError("plan: say what; allowed: roofline, decode, kv, prefill, routing, speculation, hybrid, "
                        "transfer, experts, cost, meter, shift, state, compare, or --measure")  # fmt: skip
    from oneaxis.plan.measure import measure
    from oneaxis.plan.plans import project, threads_of

    root = project()
    print_answer(measure(root, threads_of(root, options.threads)), as_json=options.json, plot=None)
    return 0


def _run_plan(options: argparse.Namespace) -> int:
    from oneaxis.plan.answer import print_answer
    from oneaxis.plan.plans import PLANS

    if options.measure:
        raise UserError(f"plan {options.what}: --measure stands alone; allowed: `oneaxis plan --measure` first")
    if options.what in BESIDE and options.run is not None:
        used = ("run", "hardware", "threads", "json", "plot", "action", "what", "defaults", "measure")
        for name, value in vars(options).items():
            if name not in used and value != options.defaults(name):
                raise UserError(f"--{name.replace('_', '-')}={value}: --run takes all from the run; allowed: one of "
                                "the two")  # fmt: skip
    print_answer(PLANS[options.what](options), as_json=options.json, plot=options.plot)
    return 0
