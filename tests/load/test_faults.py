"""Each fault of a load is caught by the guard that is named for it, and a clean run passes all of them.

Oracle: the fault that was injected (`faults.py`). Faked: the engine (`fake_server.py`).
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from oneaxis.judge.guards import Guard
from tests.load.fake_server import Answer, fake_server
from tests.load.faults import CLEAN, FAULTS, SMALL, Fault, draw, measured, sweep_all, with_table

CLEAN_RUNS = 100


@pytest.fixture(scope="module")
def judged() -> Mapping[str, list[Guard]]:
    """The guards of a sweep with each fault, and of one without."""
    return sweep_all({**CLEAN, **FAULTS})


@pytest.mark.parametrize("load", CLEAN)
def test_without_a_fault_every_guard_passes(judged: Mapping[str, list[Guard]], load: str) -> None:
    assert [guard for guard in judged[load] if not guard.valid] == []
    assert [guard.number for guard in judged[load]] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 13, 15]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_by_its_guard(judged: Mapping[str, list[Guard]], fault: str) -> None:
    failed = {guard.number: guard for guard in judged[fault] if not guard.valid}
    assert FAULTS[fault].guard in failed
    assert failed.keys() <= {FAULTS[fault].guard, *FAULTS[fault].also}, failed
    for guard in failed.values():
        assert guard.reason
        assert guard.recommendation


def test_the_table_of_faults_in_the_docs_is_that_of_the_tests(root: Path) -> None:
    page = (root / "docs" / "guards.md").read_text(encoding="utf-8")
    assert page == with_table(page), "make it anew: python -m tests.load.faults"


@pytest.mark.clock
def test_a_hundred_clean_runs_raise_no_guard() -> None:
    """Of all chunkings, with other prompts, arrivals and shapes each."""
    cases = []
    with ExitStack() as servers:
        for seed in range(CLEAN_RUNS):
            long, short = 2 + seed % 3, 4 + seed % 4
            shapes = [shape.model_copy(update={"output_tokens": tokens})
                      for shape, tokens in zip(SMALL.shapes, (long, short), strict=True)]  # fmt: skip
            arrivals = {"arrival": "poisson", "rates_rps": [20.0]} if seed % 2 else {"arrival": "constant"}
            load = SMALL.model_copy(update={"shapes": shapes, **arrivals})
            per_chunk = 1 + seed % 3
            answer = Answer(
                gap_s=0.5 / -(-short // per_chunk),
                per_chunk=per_chunk,
                split=("event", "middle", "character", "bytes", "merged")[seed % 5],
                ping=seed % 7 == 0,
            )
            plan = draw(seed, load)
            quick = dict.fromkeys(plan.warmups["request_id"], Answer(gap_s=0.01))
            cases.append((servers.enter_context(fake_server(answer, quick)), Fault(0, "", load=load), plan))
        found = [run.judged() for run in measured(cases, at_once=17)]
    alarms = [(seed, guard) for seed, guards in enumerate(found) for guard in guards if not guard.valid]
    assert alarms == []
    assert len(found) == CLEAN_RUNS


def test_the_golden_server_sends_what_its_record_says() -> None:
    """Its own record against the client's, byte by byte broken: every character is read whole, every token counted."""
    plan = draw()
    answers = {name: Answer(gap_s=0.05, split=split, per_chunk=2, ping=True)
               for name, split in zip(plan.arrivals["request_id"], ("middle", "character", "bytes", "merged"),
                                      strict=False)}  # fmt: skip
    with fake_server(Answer(gap_s=0.02), answers=answers) as server:
        [run] = measured([(server, Fault(0, ""), plan)], at_once=1)
        assert server.get("/health") == ""
        assert "fake" in server.get("/v1/models")
    for row in run.sweep.requests.iter_rows(named=True):
        seen = server.seen[row["request_id"]]
        assert row["status"] == "ok", row
        assert len(row["token_times"]) == sum(seen.chunk_tokens) == row["output_tokens"]
        assert len(seen.chunk_at) == row["chunks"] or row["request_id"] in answers
