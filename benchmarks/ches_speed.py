"""Pairs per second of our CHES and of the published implementation's algorithm; and 100,000 pairs in a small memory.

    python benchmarks/ches_speed.py CHECKPOINT PAIRS.parquet --out ches.md
    python benchmarks/ches_speed.py --stream 100000

Published (Razin et al., 2024, `compute_preference_similarity_per_example.py`), written anew here: one pair at a time,
prompt and responses tokenized, two forwards of the causal model over prompt + response with all hidden states, the last
of them summed from the last prompt token to the second-to-last token. Shown beside it: the same without the
unembedding, which CHES does not need. All run in one process, in turns, on the same weights in float32; each time
includes the tokenizer, and the scores are compared. Prompts are lengthened by other pairs put before them, as few-shot
examples are. To hold: 1.5 times the published pairs per second where prompts are longer than responses.

`--stream` takes a random model of two layers: a run that is killed in the middle and goes on, with its resident memory
along the way; and with a tenth of the pairs, one killed and one not. To hold: the same bytes, and no more memory at the
end than in the second tenth, but for the numbers that are kept of each pair.
"""

import argparse
import functools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil

FASTER = 1.5
ROOT = Path(__file__).resolve().parents[1]
FILTER = {"score": "ln_ches", "rule": "quantile", "value": 0.75, "control_seed": None, "max_tokens": 512,
          "batch_tokens": 2048}  # fmt: skip
BYTES_A_PAIR = 1200
"""What may be in memory of a pair that is done: 236 were measured while pairs are scored (its numbers and ids), 1,000
more at the end, when the rule sorts all ids and the other measures are compared."""


def lengthened(pairs: pl.DataFrame, tokenizer: Any, count: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """Plain pairs, each behind others with their chosen answers, until its prompt has so many tokens."""
    rows = pairs.filter(~pl.col("conversational")).sort("pair_id").to_dicts()
    rows = random.Random(0).sample(rows, len(rows))
    made = []
    for place, row in enumerate(rows[:count]):
        prompt = row["prompt"]
        for other in rows[place + 1 :] + rows[:place]:
            if len(tokenizer.encode(prompt)) >= prompt_tokens:
                break
            prompt = f"{other['prompt']}{other['chosen']}\n\n{prompt}"
        made.append({**row, "prompt": prompt})
    return made


def published(model: Any, tokenizer: Any, rows: list[dict[str, Any]], *, unembed: bool) -> np.ndarray:
    """CHES and ln-CHES, (N, 2)."""
    import torch

    found = []
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        sums, counts = [], []
        for key in ("chosen", "rejected"):
            whole = tokenizer(row["prompt"] + row[key], return_tensors="pt")
            with torch.no_grad():
                output = (model if unembed else model.base_model)(**whole, output_hidden_states=True, use_cache=False)
            states = output.hidden_states[-1][0, prompt.shape[1] - 1 : -1]
            sums.append(states.sum(dim=0))
            counts.append(states.shape[0])
        cross, square = float(sums[0] @ sums[1]), float(sums[0] @ sums[0])
        found.append((cross - square, cross / (counts[0] * counts[1]) - square / counts[0] ** 2))
    return np.array(found)


def ours(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> np.ndarray:
    """CHES and ln-CHES, (N, 2), as a part of the stage computes them."""
    from oneaxis.config.schema import PairFilter
    from oneaxis.preference.filter import score_part

    config = PairFilter(**{**FILTER, "max_tokens": 4096})
    table, _ = score_part(model, tokenizer, pl.DataFrame(rows), config)
    return table.select("ches", "ln_ches").to_numpy()


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gives, its seconds by the wall clock and by the processor's."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def speed(checkpoint: Path, pairs: Path, count: int, turns: int, prompt_tokens: list[int], out: Path | None) -> None:
    """Measure each length of prompt, print JSON, write a table."""
    from oneaxis.preference.forward import load

    model, tokenizer = load(checkpoint)
    ways: dict[str, Callable[[list[dict[str, Any]]], np.ndarray]] = {
        "ours": lambda rows: ours(model, tokenizer, rows),
        "published": lambda rows: published(model, tokenizer, rows, unembed=True),
        "no_unembedding": lambda rows: published(model, tokenizer, rows, unembed=False),
    }
    measured = []
    for tokens in prompt_tokens:
        rows = lengthened(pl.read_parquet(pairs), tokenizer, count, tokens)
        for way in ways.values():
            way(rows[:2])
        walls: dict[str, list[float]] = {name: [] for name in ways}
        cpus: dict[str, list[float]] = {name: [] for name in ways}
        apart = 0.0
        for turn in range(turns):
            scores = {}
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                scores[name], wall, cpu = timed(functools.partial(ways[name], rows))
                walls[name].append(wall)
                cpus[name].append(cpu)
            spread = np.abs(scores["published"]).max(axis=0)
            apart = max(apart, float((np.abs(scores["ours"] - scores["published"]).max(axis=0) / spread).max()))
        lengths = [len(tokenizer.encode(row["prompt"])) for row in rows]
        answers = [len(tokenizer.encode(row[key])) for row in rows for key in ("chosen", "rejected")]
        found = {"prompt_tokens": statistics.mean(lengths), "response_tokens": statistics.mean(answers), "apart": apart}
        for name in ways:
            found[f"{name}_pairs_per_s"] = len(rows) / statistics.median(walls[name])
        for name in list(ways)[1:]:
            for clock, seconds in (("wall", walls), ("cpu", cpus)):
                ratios = [theirs / mine for theirs, mine in zip(seconds[name], seconds["ours"], strict=True)]
                found[f"{name}_{clock}"], found[f"{name}_{clock}_min"] = statistics.median(ratios), min(ratios)
        measured.append(found)
        print(json.dumps(found), flush=True)
    if out:
        out.write_text(table(measured, count, turns), encoding="utf-8")
    for found in measured:
        assert found["apart"] < 1e-3, "the scores differ"
        if found["prompt_tokens"] > found["response_tokens"]:
            assert found["published_cpu"] >= FASTER, f"less than {FASTER} times the published pairs per second"


def table(measured: list[dict[str, float]], count: int, turns: int) -> str:
    """The figures as Markdown."""
    head = ["prompt / response tokens", "oneaxis, pairs/s", "published, pairs/s", "faster (wall)", "faster (processor)",
            "without its unembedding", "largest difference of a score"]  # fmt: skip
    rows = [
        [f"{m['prompt_tokens']:.0f} / {m['response_tokens']:.0f}", f"{m['ours_pairs_per_s']:.2f}",
         f"{m['published_pairs_per_s']:.2f}", f"{m['published_wall']:.2f}", f"{m['published_cpu']:.2f}",
         f"{m['no_unembedding_cpu']:.2f}", f"{m['apart']:.1e}"] for m in measured
    ]  # fmt: skip
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return f"{count} pairs a turn, medians of {turns} turns.\n\n" + "\n".join(lines) + "\n"


# --- many pairs ------------------------------------------------------------------------------------------------------


def made_up(path: Path, count: int) -> None:
    """Pairs of random words: prompts of 4 to 12, responses of 2 to 8, one in twenty held out."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstuvw", k=draw.randint(2, 8))) for _ in range(3000)]

    def text(low: int, high: int) -> str:
        return "".join(f" {word}" for word in draw.choices(words, k=draw.randint(low, high)))

    pl.DataFrame([
        {"pair_id": f"p{number:07}", "source": "made up", "prompt": f"Question:{text(4, 12)}?\nAnswer:",
         "chosen": text(2, 8), "rejected": text(2, 8), "conversational": False,
         "split": "heldout" if number % 20 == 0 else "train"} for number in range(count)
    ]).write_parquet(path)  # fmt: skip


def child(checkpoint: Path, pairs: Path, out: Path, parts: Path) -> None:
    """One run of the filter; the counts go to standard output."""
    from oneaxis.config.schema import PairFilter
    from oneaxis.preference.filter import filter_pairs

    out.mkdir(exist_ok=True)
    observed: dict[str, Any] = {}
    filter_pairs(checkpoint, pairs, PairFilter(**FILTER), out, parts=parts, observed=observed)
    print(json.dumps(observed), flush=True)


def watched(command: list[str], parts: Path, stop_at: int | None) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Run a child, killed when it has `stop_at` parts; its counts, and (parts done, resident MiB) along the way."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    resident: list[tuple[int, float]] = []
    done = 0
    while process.poll() is None:
        # They are taken away at the end.
        done = max(done, len(list(parts.rglob("*.parquet"))))
        try:
            resident.append((done, psutil.Process(process.pid).memory_info().rss / 2**20))
        except psutil.NoSuchProcess:
            break
        if stop_at is not None and done >= stop_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
    said, _ = process.communicate()
    return json.loads(said or "{}"), resident


def stream(count: int) -> None:
    """All pairs by a run that is killed and resumed, with its memory; a tenth of them also without a kill, compared."""
    from oneaxis.checkpoint.fetch import fetch_model
    from oneaxis.config.schema import ModelRandom
    from oneaxis.preference.filter import PAIRS_PER_PART

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch_model(
            ModelRandom(kind="random", num_layers=2, hidden_size=64, intermediate_size=128, num_heads=2,
                        num_kv_heads=1, vocab_size=1024, max_position=1024),
            seed=0, root=ROOT, out=folder / "checkpoint",
        )  # fmt: skip

        def run(pairs: Path, out: str, stop_at: int | None) -> tuple[dict[str, Any], list[tuple[int, float]]]:
            paths = (folder / "checkpoint", pairs, folder / out, folder / f"{out}_parts")
            return watched([sys.executable, __file__, "--child", *map(str, paths)], paths[-1], stop_at)

        def killed_and_resumed(pairs: Path, out: str, total: int) -> tuple[dict[str, Any], list[tuple[int, float]]]:
            _, before = run(pairs, out, total // 2)
            assert not (folder / out / "pairs.parquet").exists(), "it was to be killed in the middle"
            resumed, after = run(pairs, out, None)
            assert 0 < resumed["parts_found"] < total
            return resumed, before + after

        many, few = folder / "many.parquet", folder / "few.parquet"
        made_up(many, count)
        made_up(few, count // 10)
        total, tenth = (-(-number // PAIRS_PER_PART) for number in (count, count // 10))
        resumed, resident = killed_and_resumed(many, "many", total)
        run(few, "whole", None)
        killed_and_resumed(few, "killed", tenth)
        same = all((folder / "whole" / file).read_bytes() == (folder / "killed" / file).read_bytes()
                   for file in ("pairs.parquet", "distribution.csv"))  # fmt: skip
        early = max(mib for done, mib in resident if total // 10 <= done < total // 5)
        peak = max(mib for _, mib in resident)
        found = {
            "pairs": count, "pairs_mib": many.stat().st_size / 2**20, **resumed,
            "resident_mib_in_the_second_tenth": early, "resident_mib_peak": peak,
            "resident_mib_by_tenths": [max((mib for done, mib in resident if done * 10 // total == part), default=None)
                                       for part in range(11)],
            "same_bytes": same,
        }  # fmt: skip
        print(json.dumps(found, indent=2))
        assert same
        assert peak - early < BYTES_A_PAIR * count / 2**20 + 40, "memory grows with the pairs"


def main() -> None:
    """Either measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("pairs", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=24, help="pairs a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[0, 60, 120, 240], help="at least, per table row"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--stream", type=int, metavar="PAIRS")
    parser.add_argument("--child", nargs=4, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    elif options.stream:
        stream(options.stream)
    elif options.checkpoint and options.pairs:
        speed(options.checkpoint, options.pairs, options.count, options.turns, options.prompt_tokens, options.out)
    else:
        parser.error("give CHECKPOINT and PAIRS.parquet, or --stream PAIRS")


if __name__ == "__main__":
    main()
