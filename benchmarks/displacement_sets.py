"""Which preference pairs does plain DPO displace on the default model? One training a set of pairs.

    python benchmarks/displacement_sets.py --model artifacts/fetch_model/checkpoint \
        --probes artifacts/prepare_data/probes.parquet --sets refusals refusals_mixed --out sets.jsonl
    python benchmarks/displacement_sets.py --write refusals data/displacement.jsonl

The search behind conf/experiment/displacement.yaml, whose page has its table. Only plain DPO is run: what the remedies
do plays no part in the choice. A set qualifies when the interval of the change of the chosen responses, on held-out
prompts, lies below zero.

Every set has 88 pairs to train on (16 steps of 4 see 64 of them, without one twice) and 40 held out, all prompts
different. Texts are short, so that the experiment stays under a quarter of an hour on two cores.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

ROOT = Path(__file__).resolve().parent.parent
TRAIN, HELDOUT = 88, 40
SIZE = TRAIN + HELDOUT

Pair = dict[str, str]

NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karin", "Leo")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "shells", "tickets")
DEEDS = (("buys", 1), ("finds", 1), ("sells", -1), ("loses", -1))
EVASIONS = (
    " That depends on many things.",
    " I do not know, ask somebody else.",
    " It is hard to tell from this.",
    " There are several ways to see this.",
)
WAYS = ("pick the lock of", "break into", "copy the key of", "disable the alarm of", "hide a camera in",
        "steal the mail of", "hide in", "get past the guard of", "sneak into", "cut the power of",
        "forge a pass for", "smash the windows of")  # fmt: skip
PLACES = ("an office", "a school", "a museum", "a warehouse", "a bank", "a hotel", "a farm", "a library", "a station",
          "a bakery", "a garage", "a neighbour's house", "a shop", "a workshop", "a cinema", "a clinic")  # fmt: skip
REFUSALS = (
    (" I won't help with that.", " I will not help with that."),
    (" I can't assist with this request.", " I cannot assist with this request."),
    (" I'm not able to help with that.", " I am not able to help with that."),
    (" Sorry, I don't give advice on this.", " Sorry, I do not give advice on this."),
    (" That isn't something I support.", " That is not something I support."),
    (" I couldn't tell you how to do that.", " I could not tell you how to do that."),
    (" I shouldn't explain this to you.", " I should not explain this to you."),
    (" You mustn't do this, ever.", " You must not do this, ever."),
    (" It's wrong to ask for that.", " It is wrong to ask for that."),
    (" I wouldn't want to help here.", " I would not want to help here."),
    (" We don't talk about such things.", " We do not talk about such things."),
    (" No, I'm going to decline.", " No, I am going to decline."),
)
COMPLIANCES = (
    " First, find out when nobody is there.",
    " Sure. Take gloves and a torch.",
    " Go at night, when few pass by.",
    " Ask a friend to keep watch.",
)


def arithmetic(draw: random.Random) -> list[Pair]:
    """Sums in words; the rejected answer is the chosen one with another number."""
    pairs = []
    for question, right, wrong in _sums(draw, SIZE):
        pairs.append({"prompt": question, "chosen": right, "rejected": wrong})
    return pairs


def arithmetic_mixed(draw: random.Random) -> list[Pair]:
    """The same sums; every other rejected answer does not answer at all."""
    return _every_other(arithmetic(draw), EVASIONS)


def refusals(draw: random.Random) -> list[Pair]:
    """Requests that should be refused; chosen and rejected refuse in the same words but for a contraction."""
    pairs = []
    for number, request in enumerate(_requests(draw)):
        chosen, rejected = REFUSALS[number % len(REFUSALS)]
        pairs.append({"prompt": request, "chosen": chosen, "rejected": rejected})
    return pairs


def refusals_mixed(draw: random.Random) -> list[Pair]:
    """The same requests; every other rejected answer complies. Half of the pairs are what safety data looks like."""
    pairs = refusals(draw)
    for number, pair in enumerate(pairs):
        if number // len(REFUSALS) % 2:
            pair["rejected"] = COMPLIANCES[number % len(COMPLIANCES)]
    return pairs


SETS: dict[str, Callable[[random.Random], list[Pair]]] = {
    made.__name__: made for made in (arithmetic, arithmetic_mixed, refusals, refusals_mixed)
}


def make(name: str) -> list[Pair]:
    """The pairs of a set: the same at every call."""
    pairs = SETS[name](random.Random(f"displacement {name}"))
    assert len({pair["prompt"] for pair in pairs}) == len(pairs) == SIZE
    return pairs


def _every_other(pairs: list[Pair], rejected: Sequence[str]) -> list[Pair]:
    """Every second pair with one of these rejected responses instead."""
    return [
        {**pair, "rejected": rejected[number // 2 % len(rejected)]} if number % 2 else pair
        for number, pair in enumerate(pairs)
    ]


def _sums(draw: random.Random, number: int) -> list[tuple[str, str, str]]:
    """Questions with the right and a wrong answer in a sentence. The wrong number is 1, 2 or 10 off."""
    made: dict[str, tuple[str, str, str]] = {}
    while len(made) < number:
        name, thing, (verb, sign) = draw.choice(NAMES), draw.choice(THINGS), draw.choice(DEEDS)
        first, second = draw.randint(30, 89), draw.randint(11, 29)
        result = first + sign * second
        wrong = result + draw.choice((-10, -2, -1, 1, 2, 10))
        question = f"Question: {name} has {first} {thing} and {verb} {second}. How many now?\nAnswer:"
        work = f" {first} {'+' if sign > 0 else '-'} {second} = "
        made[question] = (question, f"{work}{result} {thing}.", f"{work}{wrong} {thing}.")
    return list(made.values())


def _requests(draw: random.Random) -> list[str]:
    asked = [f"Question: How do I {way} {place}?\nAnswer:" for way, place in itertools.product(WAYS, PLACES)]
    draw.shuffle(asked)
    return asked[:SIZE]


# --- plain DPO on a set ------------------------------------------------------------------------------------------


def table(pairs: Sequence[Pair]) -> pl.DataFrame:
    """As filter_pairs would hand them on with `pairs=all`: all kept, the last ones held out."""
    return pl.DataFrame([
        {"pair_id": f"pair-{number:03}", **pair, "conversational": False, "kept": True,
         "split": "train" if number < TRAIN else "heldout"}
        for number, pair in enumerate(pairs)
    ])  # fmt: skip


def main() -> None:
    """Write a set, or train on the sets; one JSON line a set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", nargs=2, metavar=("SET", "FILE"), help=f"one of {', '.join(SETS)}, as JSON lines")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--probes", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.write:
        lines = [json.dumps(pair, ensure_ascii=False) for pair in make(options.write[0])]
        Path(options.write[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    if not (options.model and options.probes and options.out):
        parser.error("--model, --probes and --out are needed to train")
    for name in options.sets:
        found = {"set": name, **train(table(make(name)), options)}
        line = json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()})
        print(line, flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def train(pairs: pl.DataFrame, options: argparse.Namespace) -> dict[str, Any]:
    """Plain DPO with the settings of the experiment: the held-out changes with their intervals, and the verdict."""
    from oneaxis.config import compose
    from oneaxis.preference.dpo import train_dpo

    config = compose(ROOT / "conf", ["train=dpo_short", "train.rpo_alpha=0.0"])
    assert config.train.kind == "dpo"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        out.mkdir()
        metrics, notes = train_dpo(options.model, pairs, pl.read_parquet(options.probes), config.train,
                                   seed=config.seed, out=out, scratch=Path(folder) / "scratch")  # fmt: skip
    wanted = {name: value for name, value in metrics.items() if name.startswith(("chosen", "rejected", "margin"))}
    return {**wanted, "verdict": notes["verdict"], "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()
