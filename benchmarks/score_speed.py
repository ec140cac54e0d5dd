"""Items per second of our scoring and of lm-eval's HF backend: 4 options after prompts of 100 tokens, float32.

    python benchmarks/score_speed.py CHECKPOINT ITEMS.parquet --out speed.md

Both score the same texts with the same weights in one process, in turns, with the same memory for a batch: lm-eval
holds `batch_size` whole sequences with logits and log-probabilities over the vocabulary at every position; ours holds
what one layer computes at each of its positions, and logits of 256 of them. What each turn takes above the start, by
the process's resident memory, is measured and shown. Each time includes the tokenizer. A turn
is timed by the wall clock and by the processor's: on a machine with other work the second is the one to read. To hold:
3 times the items per second, and tokens (padding too) within 10% of the least possible, P + k o of each item with k
options of o tokens after a prompt of P. Log-probabilities of both are compared.
"""

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import psutil

FASTER = 3.0
WITHIN = 1.1
OPTIONS = 4

Question = tuple[str, tuple[str, ...]]
"""A prompt and the continuations that follow it."""


def questions(items: Path, tokenizer: Any, count: int, prompt_tokens: int) -> list[Question]:
    """Items of four options, each behind others with their answers, as few-shot examples are, cut to a length."""
    frame = pl.read_parquet(items).filter(pl.col("options").list.len() == OPTIONS).sort("item_id")
    rows = list(frame.select("question", "options", "answer").iter_rows())
    drawn = random.Random(0).sample(rows, len(rows))
    asked = []
    for place, (question, options, _) in enumerate(drawn[:count]):
        own = f"Question: {question}\nAnswer:"
        before = ""
        for other, choices, answer in drawn[place + 1 :] + drawn[:place]:
            if len(tokenizer.encode(before + own)) >= prompt_tokens:
                break
            before = f"Question: {other}\nAnswer: {choices[answer]}\n\n{before}"
        ids = tokenizer.encode(before + own)[-prompt_tokens:]
        asked.append((tokenizer.decode(ids), tuple(f" {option}" for option in options)))
    return asked


def ours(model: Any, tokenizer: Any, asked: Sequence[Question], batch_tokens: int) -> tuple[list[float], Any]:
    """Sums of log-probabilities, and the tokens computed."""
    from oneaxis.score.boundary import encode_contexts, text_encoder
    from oneaxis.score.contexts import Context, Item
    from oneaxis.score.local import log_probabilities
    from oneaxis.score.scoring import targets_of

    contexts = []
    for place, (prompt, texts) in enumerate(asked):
        item = Item(str(place), "speed", prompt, texts, 0)
        contexts.append(Context(item, "question", 0, prompt, tuple(range(len(texts))), texts, delimiter=""))
    encode, leading = text_encoder(tokenizer)
    encoded = encode_contexts(contexts, encode, leading, 10**9)
    scored, work = log_probabilities(model, targets_of(contexts, encoded), batch_tokens)
    return [sum(values) for values in scored], work


def theirs(lm: Any, asked: Sequence[Question]) -> list[float]:
    """The same of lm-eval."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(prompt, text), idx=0)
        for prompt, texts in asked
        for text in texts
    ]
    return [float(logprob) for logprob, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def same_memory(config: Any, positions: int) -> int:
    """How many positions ours may hold, where lm-eval holds as many as are given: both in float32."""
    from oneaxis.score.local import ROWS_PER_HEAD

    logits = 2 * 4 * config.vocab_size
    layer = 4 * (8 * config.hidden_size + 4 * config.intermediate_size)
    return int((positions - ROWS_PER_HEAD) * logits // layer)


def timed(call: Callable[[], Any]) -> tuple[Any, float, float, float]:
    """What it gives, its seconds by the wall clock and by the processor's, and the MB that it took at most."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    done.set()
    thread.join()
    return result, wall, cpu, (peak - before) / 1e6


def main() -> None:
    """Measure, print JSON, write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("items", type=Path)
    parser.add_argument("--count", type=int, default=32, help="items a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences that lm-eval holds at once")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from oneaxis.score.local import log_probabilities  # noqa: F401  (its imports are no part of a turn)

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, device="cpu")
    asked = questions(options.items, tokenizer, options.count, options.prompt_tokens)
    lengths = [
        (len(tokenizer.encode(prompt)), [len(tokenizer.encode(prompt + text)) for text in texts])
        for prompt, texts in asked
    ]
    longest = max(max(wholes) for _, wholes in lengths)
    positions = options.batch_size * longest
    batch_tokens = max(same_memory(model.config, positions), longest)
    least = sum(prompt + sum(whole - prompt for whole in wholes) for prompt, wholes in lengths)
    naive = sum(sum(wholes) for _, wholes in lengths)

    theirs(lm, asked[:1])
    ours(model, tokenizer, asked[:1], batch_tokens)
    turns = []
    for turn in range(options.turns):
        (mine, work), wall, cpu, taken = timed(lambda: ours(model, tokenizer, asked, batch_tokens))
        other, other_wall, other_cpu, other_taken = timed(lambda: theirs(lm, asked))
        apart = max(abs(a - b) for a, b in zip(mine, other, strict=True))
        turns.append({"turn": turn, "ours_s": wall, "ours_cpu_s": cpu, "lm_eval_s": other_wall,
                      "lm_eval_cpu_s": other_cpu, "ours_mb": taken, "lm_eval_mb": other_taken,
                      "max_nats": apart})  # fmt: skip
        print(json.dumps(turns[-1]), flush=True)
    found = {
        "items": len(asked),
        "options": OPTIONS,
        "prompt_tokens": statistics.mean(prompt for prompt, _ in lengths),
        "positions": batch_tokens,
        "lm_eval_positions": positions,
        "ours_mb": max(turn["ours_mb"] for turn in turns),
        "lm_eval_mb": max(turn["lm_eval_mb"] for turn in turns),
        "faster_wall": statistics.median(turn["lm_eval_s"] / turn["ours_s"] for turn in turns),
        "faster_cpu": statistics.median(turn["lm_eval_cpu_s"] / turn["ours_cpu_s"] for turn in turns),
        "ours_items_per_s": len(asked) / statistics.median(turn["ours_s"] for turn in turns),
        "lm_eval_items_per_s": len(asked) / statistics.median(turn["lm_eval_s"] for turn in turns),
        "tokens": work.tokens,
        "tokens_padded": work.padded_tokens,
        "tokens_least": least,
        "tokens_naive": naive,
        "max_nats": max(turn["max_nats"] for turn in turns),
    }
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(table(found), encoding="utf-8")
    assert found["tokens_padded"] <= WITHIN * least, "more than 10% above the least number of tokens"
    assert found["faster_cpu"] >= FASTER, f"less than {FASTER:g} times lm-eval's items per second"


def table(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = [
        (
            "items a turn",
            f"{found['items']} x {found['options']} options, prompts of {found['prompt_tokens']:.0f} tokens",
        ),
        ("positions a batch, ours and lm-eval's", f"{found['positions']} and {found['lm_eval_positions']}"),
        ("MB above the start, ours and lm-eval's", f"{found['ours_mb']:.0f} and {found['lm_eval_mb']:.0f}"),
        ("items/s, ours", f"{found['ours_items_per_s']:.2f}"),
        ("items/s, lm-eval", f"{found['lm_eval_items_per_s']:.2f}"),
        ("ratio, wall clock", f"{found['faster_wall']:.2f}"),
        ("ratio, processor", f"{found['faster_cpu']:.2f}"),
        ("tokens with padding / least", f"{found['tokens_padded'] / found['tokens_least']:.3f}"),
        ("tokens one option at a time / least", f"{found['tokens_naive'] / found['tokens_least']:.2f}"),
        ("largest difference, nats", f"{found['max_nats']:.1e}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]) + "\n"


if __name__ == "__main__":
    main()
