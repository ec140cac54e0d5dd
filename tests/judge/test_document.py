"""Every value of a recorded file in turn replaced by one that does not belong there: a result, or one line.

The samples are the recorded ones with fewer requests. Which place of a list is changed, and which changes are made, is
drawn from `SEED`; a failure names the change.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oneaxis.cli import main
from oneaxis.errors import UserError
from oneaxis.judge.document import Node, numbers, whole
from oneaxis.judge.foreign import METRICS, basis, metric, read_arm, refusals

RECORDED = Path(__file__).parent / "foreign"
SEED = 5
NUM_READ, NUM_JUDGED = 200, 4
"""Changes of a tool's files that are read and measured, and of those that are read the first that are judged."""
WRONG = {"null": None, "text": "x", "list": [1], "object": {"x": 1}, "-1": -1, "NaN": float("nan"), "1e30": 1e30,
         "400 digits": 10**399, "true": True}  # fmt: skip
OTHERS = {"vllm": "vllm_bench_single.json", "guidellm": "guidellm_poisson.json", "aiperf": "guidellm.json"}
"""What a tool's files are judged against."""
Key = str | int
Documents = dict[str, Any]
"""File name -> its document; of JSON lines a list of them."""


def documents(tool: str) -> Documents:
    if tool == "vllm":
        return {"vllm_bench.json": json.loads((RECORDED / "vllm_bench.json").read_text())}
    if tool == "guidellm":
        report = json.loads((RECORDED / "guidellm.json").read_text())
        (benchmark,) = report["benchmarks"]
        benchmark["requests"]["successful"] = benchmark["requests"]["successful"][:2]
        benchmark["scheduler_state"]["successful_requests"] = 2
        return {"guidellm.json": report}
    folder = RECORDED / "aiperf"
    # The first two are of the warm-up; of the others some failed.
    records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()[1:]]
    return {"profile_export.jsonl": records} | {
        name: json.loads((folder / name).read_text()) for name in ("profile_export_aiperf.json", "inputs.json")
    }


def places(value: Any, path: tuple[Key, ...] = ()) -> Iterator[tuple[Key, ...]]:
    """Of every value in a document, containers too."""
    if path:
        yield path
    inner: list[tuple[Key, Any]] = list(value.items()) if isinstance(value, dict) else []
    inner += list(enumerate(value)) if isinstance(value, list) else []
    for key, each in inner:
        yield from places(each, (*path, key))


def changes(tool: str, draw: random.Random) -> list[tuple[tuple[Key, ...], str]]:
    """(Place, name of the wrong value), of places that differ by their place in a list one."""
    alike: dict[tuple[Key, ...], list[tuple[Key, ...]]] = {}
    for path in places(documents(tool)):
        alike.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)
    return [(draw.choice(paths), name) for paths in alike.values() if len(paths[0]) > 1 for name in WRONG]


def write(folder: Path, found: Documents) -> Path:
    """The files; the one to judge."""
    for name, document in found.items():
        lines = document if name.endswith(".jsonl") and isinstance(document, list) else [document]
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    return folder / next(iter(found))


def told(path: Path) -> str | None:
    """What is said of a file that is refused; None where it is read, and every metric of it computed."""
    try:
        (run,) = read_arm(path)
    except UserError as error:
        return str(error)
    refused = refusals([run])
    for name in METRICS:
        if name not in refused and name.partition("_")[0] not in refused:
            metric(run, name, basis([run]) is not None)
    return None


@pytest.mark.parametrize("tool", OTHERS)
def test_a_wrong_value_gives_a_result_or_one_line(tmp_path: Path, tool: str) -> None:
    draw = random.Random(SEED)
    every = changes(tool, draw)
    whole_text = json.dumps(documents(tool))
    other = str(RECORDED / OTHERS[tool])
    num_judged = num_refused = 0
    for path, name in draw.sample(every, min(NUM_READ, len(every))):
        found = json.loads(whole_text)
        inner = found
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = WRONG[name]
        file = write(tmp_path, found)
        try:
            said = told(file)
            if said is None and num_judged < NUM_JUDGED:
                num_judged += 1
                main(["judge", other, str(file), "--metric", "ttft_p50_ms"])
        except Exception as error:
            raise AssertionError(f"seed {SEED}: {path} as {name}: {error!r}") from error
        num_refused += said is not None
        assert said is None or ("\n" not in said and "allowed: " in said), (SEED, path, name, said)
    assert num_judged == NUM_JUDGED
    assert num_refused > NUM_READ // 10


def test_a_value_is_named_with_its_place() -> None:
    node = Node({"list": [{"time": -1.0}, 3], "text": "a\ud800"}, "a.json")
    with pytest.raises(UserError, match=r"^a.json: list\[1\] is 3; allowed: an object$"):
        node.nodes("list")
    first = Node({"list": [{"time": -1.0}]}, "a.json").nodes("list")[0]
    with pytest.raises(UserError, match=r"^a.json: list\[0\].time is -1.0; allowed: 0 or more$"):
        first.number("time")
    with pytest.raises(UserError, match=r"^a.json: text is a\\ud800; allowed: a text of whole characters$"):
        node.text("text")
    assert (first.number("time", least=None), first.number("other"), first.node("x").nodes("y")) == (-1.0, None, [])


def test_counts_are_exact_and_gaps_are_looked_at_one_by_one() -> None:
    """Nanoseconds since 1970 are more than a double holds."""
    assert whole(1796043007386796471, "sent", most=2**63 - 1) == 1796043007386796471
    with pytest.raises(UserError, match=r"tokens is 13\.5; allowed: a whole number"):
        whole(13.5, "tokens")
    for wrong, said in ((float("nan"), "a finite number"), (-1e-9, "0 or more"), (1e30, "at most"), ("1", "a finite")):
        with pytest.raises(UserError, match=f"^gaps is .*; allowed: {said}"):
            numbers([0.1, wrong, 0.2], "gaps")
