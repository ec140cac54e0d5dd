"""How many streams a second one client can send and time rightly: oneaxis, `vllm bench serve` and guidellm.

    uv venv /tmp/peer-guidellm && uv pip install --python /tmp/peer-guidellm/bin/python guidellm==0.8.1
    python benchmarks/client_rate.py --guidellm /tmp/peer-guidellm/bin/guidellm --out rates.json

`stream_server.py` on core 0 answers every request with 50 tokens, one a chunk, 20 ms apart after 100 ms, and notes when
it read the request and sent each chunk. The client is on core 1, with all its processes. Requests come at even gaps,
for `--seconds` a rate, each rate `--step` times the one before; after two rates in a row that it does not hold, a tool
stops (guidellm, which takes a minute to start, goes through seven rates of 150 requests in one process). The tools take
turns, in the reverse order in every other round. `--first COMMAND` starts server and clients by one that puts them
before all else on a machine that is not quiet (`chrt -f 10`; not for guidellm, whose processes then starve each other).
A rate is held when

- every answer was received whole;
- the 99th percentile of the lag is under 5 ms: when the server read the k-th request, less k / rate, less the same of
  the most punctual request. No tool is asked for it, and all are measured alike;
- what the tool says of TTFT and ITL lies within 5% of the server's record, in the mean and in the 99th percentile.

Like is held against like. TTFT counts from the sending here (`ttft_from_sent` of ours). ITL is, of ours and of
`vllm bench serve`, a sample for each gap between tokens; guidellm gives one for each request, the mean of its gaps, and
the server's record is averaged in the same way for it. That is an easier thing to hold: single late reads cancel out.
"""

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNKS = 50
MAX_LAG_MS, MAX_OFF = 5.0, 0.05


# --- ours, as a child -----------------------------------------------------------------------------------------------


def as_oneaxis(port: int, seconds: float, folder: Path) -> None:
    """Run the product's client at the rates on standard input."""
    import numpy as np
    import uvloop

    from oneaxis.load.client import request_table, requests_of, send_all
    from oneaxis.load.metrics import inter_token_ms
    from oneaxis.load.plan import PLAN_SCHEMA

    import polars as pl  # isort: skip

    print("ready", flush=True)
    for line in sys.stdin:
        name, rate = line.split()[0], float(line.split()[1])
        count = round(rate * seconds)
        prompts = np.random.default_rng(0).integers(5, 1000, size=(count, 32)).tolist()
        plan = pl.DataFrame(
            [
                {"shape": "s", "level": "r", "rate_rps": rate, "service_class": "default", "request_id": f"q{k:06d}",
                 "intended_s": k / rate, "prompt_token_ids": prompts[k], "asked_output_tokens": CHUNKS}
                for k in range(count)
            ],
            schema=PLAN_SCHEMA,
        )  # fmt: skip
        requests = requests_of(plan, "golden")
        # As the sweep does.
        gc.collect()
        gc.freeze()
        sent = uvloop.run(
            send_all(f"http://127.0.0.1:{port}", requests, timeout_s=60, alive=lambda: True),
        )
        gc.unfreeze()
        table = request_table(sent).filter(pl.col("status") == "ok")
        result = {
            "ttft_ms": (1000 * (table["first_token_s"] - table["sent_s"])).to_list(),
            "itl_ms": [gap for times in table["token_times"].to_list() for gap in inter_token_ms(times)],
            "completed": table.height,
        }
        (folder / f"{name}.json").write_text(json.dumps(result))
        print("done", flush=True)


# --- what is compared -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A tool at a rate."""

    rate: float
    lag_p99_ms: float
    off: dict[str, float]
    """Relative difference of what was reported: `ttft mean`, `ttft p99`, `itl mean`, `itl p99`."""
    complete: float
    server_busy: float
    seconds: float
    """From the first request read to the last chunk sent."""

    @property
    def held(self) -> bool:
        near = all(abs(off) <= MAX_OFF for off in self.off.values())
        return self.complete == 1 and self.lag_p99_ms < MAX_LAG_MS and near


def rank(values: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile."""
    return sorted(values)[-(-percent * len(values) // 100) - 1]


def compare(
    rate: float, server: list[dict[str, Any]], busy: float, reported: dict[str, Any], *, per_request: bool
) -> Outcome:
    """The server's record of a run against what the tool said of it."""
    server = sorted(server, key=lambda one: one["read_at"])
    offsets = [one["read_at"] - k / rate for k, one in enumerate(server)]
    whole = [one for one in server if len(one["sent_at"]) == CHUNKS]
    ttft = [1000 * (one["sent_at"][0] - one["read_at"]) for one in whole]
    gaps = [[1000 * (b - a) for a, b in zip(one["sent_at"], one["sent_at"][1:], strict=False)] for one in whole]
    itl = [statistics.fmean(own) for own in gaps] if per_request else [gap for own in gaps for gap in own]
    off = {}
    for name, true, said in (("ttft", ttft, reported["ttft_ms"]), ("itl", itl, reported["itl_ms"])):
        for figure, of in (("mean", statistics.fmean), ("p99", lambda values: rank(values, 99))):
            off[f"{name} {figure}"] = of(said) / of(true) - 1 if said and true else math.inf
    return Outcome(
        rate=rate,
        lag_p99_ms=1000 * (rank(offsets, 99) - min(offsets)),
        off=off,
        complete=min(1.0, reported["completed"] / len(server)),
        server_busy=busy,
        seconds=max(one["sent_at"][-1] for one in whole) - server[0]["read_at"],
    )


# --- the tools --------------------------------------------------------------------------------------------------------


def post(port: int, path: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="POST"), timeout=60).read()


def read_record(folder: Path, name: str) -> tuple[list[dict[str, Any]], float]:
    record = json.loads((folder / f"{name}.json").read_text())
    return record["requests"], record["busy"]


def climb(
    tool: str, first: list[str], command: list[str], port: int, folder: Path, rates: Sequence[float], tag: str
) -> list[Outcome]:
    """Rates upwards, until two in a row are not held."""
    outcomes: list[Outcome] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(folder / f"{tool}-{tag}.log", "w") as log:
        child = subprocess.Popen(
            [*first, "taskset", "-c", "1", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        assert child.stdin is not None
        assert child.stdout is not None

        def wait_for(word: str) -> None:
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip() == word:
                    return
            raise SystemExit(f"{tool} ended; see {folder}/{tool}-{tag}.log")

        wait_for("ready")
        for rate in rates:
            name = f"{tool}-{tag}-{rate:g}"
            post(port, "/record/before")
            child.stdin.write(f"{name}-said {rate:g}\n")
            child.stdin.flush()
            wait_for("done")
            post(port, f"/record/{name}")
            server, busy = read_record(folder, name)
            outcomes.append(compare(rate, server, busy, said_by(tool, folder / f"{name}-said.json"), per_request=False))
            say(tool, outcomes[-1])
            if len(outcomes) > 1 and not (outcomes[-1].held or outcomes[-2].held):
                break
        child.stdin.close()
        child.wait()
    return outcomes


def said_by(tool: str, path: Path) -> dict[str, Any]:
    """TTFT and ITL as the tool gives them, in milliseconds."""
    result = json.loads(path.read_text())
    if tool == "oneaxis":
        return dict(result)
    return {
        "ttft_ms": [1000 * value for value in result["ttfts"]],
        "itl_ms": [1000 * value for own in result["itls"] for value in own],
        "completed": result["completed"],
    }


GUIDELLM_REQUESTS = 150
"""At each of its rates: its bounds hold for all of them."""


def guidellm(
    first: list[str], command: str, port: int, tokenizer: Path, folder: Path, rates: Sequence[float], tag: str
) -> list[Outcome]:
    """All rates in one process, which takes a minute to start on one core. Its result has a benchmark for each."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"w{k % 900} " * 32, "prompt_tokens_count": 32, "output_tokens_count": CHUNKS}
            for k in range(2 * GUIDELLM_REQUESTS * len(rates))]  # fmt: skip
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    name = f"guidellm-{tag}"
    post(port, "/record/before")
    wall = time.time() - time.perf_counter()
    with open(folder / f"{name}.log", "w") as log:
        subprocess.run(
            [*first, "taskset", "-c", "1", command, "run", "--backend",
             f"kind=openai_http,target=http://127.0.0.1:{port},model=golden,request_format=/v1/completions",
             "--profile", f"kind=constant,rate={rates[0]:g}",
             "--override", "profile.rate", ",".join(f"{rate:g}" for rate in rates),
             "--constraint", f"kind=max_requests,count={GUIDELLM_REQUESTS}",
             "--data", f"kind=json_file,path={prompts}", "--tokenizer", f"kind=hf_auto,model={tokenizer}",
             "--output", f"kind=json,path={folder}/{name}-said.json", "--disable-console"],
            check=True, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    post(port, f"/record/{name}")
    server, busy = read_record(folder, name)
    outcomes = []
    for rate, part in zip(rates, json.loads((folder / f"{name}-said.json").read_text())["benchmarks"], strict=True):
        ran = part["requests"]["successful"]
        # Its clock is the wall's. One it cancelled at its bound is not asked of it.
        own = [one for one in server if part["start_time"] - 0.5 < one["read_at"] + wall < part["end_time"] + 0.5]
        own = sorted(own, key=lambda one: one["read_at"])[:GUIDELLM_REQUESTS]
        said = {
            "ttft_ms": [one["time_to_first_token_ms"] for one in ran],
            "itl_ms": [one["inter_token_latency_ms"] for one in ran],
            "completed": len(ran),
        }
        outcomes.append(compare(rate, own, busy, said, per_request=True))
        say("guidellm", outcomes[-1])
    return outcomes


def say(tool: str, one: Outcome) -> None:
    off = ", ".join(f"{name} {100 * value:+.1f}%" for name, value in one.off.items())
    print(f"{tool:9} {one.rate:7g}/s {'held' if one.held else 'not held':8} lag p99 {one.lag_p99_ms:6.1f} ms; {off}; "
          f"complete {one.complete:.0%}; server busy {one.server_busy:.0%}", flush=True)  # fmt: skip


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of a thousand words: the peers want one, and spend little time in it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, **{f"w{k}": k + 1 for k in range(1000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="oneaxis,vllm,guidellm")
    parser.add_argument("--guidellm", default="/tmp/peer-guidellm/bin/guidellm", help="its command")
    parser.add_argument("--first", default="", help="command that all is started by, such as 'chrt -f 10'")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step", type=float, default=1.25)
    parser.add_argument("--start", default="oneaxis=400,vllm=100,guidellm=20", help="the first rate of each tool")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/client-rate"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-oneaxis", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_oneaxis:
        as_oneaxis(given.port, given.seconds, given.folder)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(given.folder)
    tools = given.tools.split(",")
    before = given.first.split()
    starts = {name: float(rate) for name, _, rate in (one.partition("=") for one in given.start.split(","))}
    server = subprocess.Popen([*before, "taskset", "-c", "0", sys.executable, str(HERE / "stream_server.py"), "--port",
                               str(given.port), "--record", str(given.folder)])  # fmt: skip
    results: dict[str, list[list[Outcome]]] = {tool: [] for tool in tools}
    try:
        time.sleep(1)
        for turn in range(given.rounds):
            for tool in tools if turn % 2 == 0 else reversed(tools):
                rates = [float(f"{starts[tool] * given.step**k:.3g}") for k in range(20)]
                tag = f"{turn}"
                if tool == "guidellm":
                    found = guidellm(before, given.guidellm, given.port, tokenizer, given.folder, rates[:7], tag)
                else:
                    command = [sys.executable, str(HERE / "peer" / "bench_serve.py"), str(given.port), str(tokenizer),
                               str(given.seconds), str(given.folder)]  # fmt: skip
                    if tool == "oneaxis":
                        command = [sys.executable, str(Path(__file__)), "--as-oneaxis", "--port", str(given.port),
                                   "--seconds", str(given.seconds), "--folder", str(given.folder)]  # fmt: skip
                    found = climb(tool, before, command, given.port, given.folder, rates, tag)
                results[tool].append(found)
    finally:
        server.terminate()
        server.wait()
    for tool, rounds in results.items():
        best = [max((one.rate for one in own if one.held), default=0.0) for own in rounds]
        print(f"{tool}: highest rate held, by round: {', '.join(f'{rate:g}' for rate in best)} requests/s")
    if given.out:
        rows = [{"tool": tool, "round": turn, **vars(one), "held": one.held}
                for tool, rounds in results.items() for turn, own in enumerate(rounds) for one in own]  # fmt: skip
        given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
