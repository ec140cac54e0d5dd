"""The client against a server whose tokens, gaps and faults are scripted.

Oracle: the fake server's own record of what it sent and when (`fake_server.py`), and the script itself. Faked: the
engine. Real: sockets, streaming, the clock.
"""

import socket
import time
from collections.abc import Callable, Sequence

import polars as pl
import pytest
import uvloop

from oneaxis.load.client import Record, Request, request_table, requests_of, send_all
from oneaxis.load.plan import PLAN_SCHEMA
from tests.load.fake_server import Answer, fake_server

pytestmark = pytest.mark.clock
TOLERANCE_S = 0.06
"""On a shared machine; the scripted gaps are told apart by far more."""


def plan(rows: Sequence[tuple[str, float, int]], prompt_tokens: int = 6) -> list[Request]:
    """Requests of (id, intended_s, output tokens)."""
    table = pl.DataFrame(
        [
            {
                "shape": "s",
                "level": "r1",
                "rate_rps": 1.0,
                "request_id": name,
                "intended_s": intended,
                "prompt_token_ids": [*range(index, index + prompt_tokens)],
                "asked_output_tokens": tokens,
            }
            for index, (name, intended, tokens) in enumerate(rows)
        ],
        schema=PLAN_SCHEMA,
    )
    return requests_of(table, "fake")


def send(
    base_url: str, requests: list[Request], *, timeout_s: float = 20, alive: Callable[[], bool] = lambda: True
) -> dict[str, Record]:
    """Send all and give the records by request id."""

    records = uvloop.run(send_all(base_url, requests, timeout_s=timeout_s, alive=alive))
    return {record.request_id: record for record in records}


def test_accounts_for_every_token_and_times_them_as_the_server_sent_them() -> None:
    answers = {
        "even": Answer(gap_s=0.05),
        # 1, then 3 at once after a stall, then 2: six tokens in three chunks.
        "bursts": Answer(chunks=((0.1, 1), (0.3, 3), (0.05, 2))),
        "broken-up": Answer(gap_s=0.03, split="middle"),
        "one": Answer(chunks=((0.2, 1),)),
    }
    rows = [("even", 0.0, 8), ("bursts", 0.1, 6), ("broken-up", 0.15, 5), ("one", 0.2, 1)]
    with fake_server(answers=answers) as server:
        records = send(server.base_url, plan(rows, prompt_tokens=9))
    for name, _, tokens in rows:
        record, seen = records[name], server.seen[name]
        assert record.status == "ok", record
        assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (9, tokens, "length")
        assert len(record.token_times) == tokens
        assert record.chunks == len(seen.chunk_at)
        # The zero of the client's clock, by the server: when a request was received, less when it was sent.
        offset = server.seen["even"].received_at - (records["even"].sent_s or 0)
        arrived = [t - offset for t, k in zip(seen.chunk_at, seen.chunk_tokens, strict=True) for _ in range(k)]
        assert record.token_times == pytest.approx(arrived, abs=TOLERANCE_S)
        assert record.first_token_s == record.token_times[0]
        assert record.done_s == record.token_times[-1]
    bursts = records["bursts"].token_times
    assert len({*bursts}) == 3
    assert bursts[1] - bursts[0] == pytest.approx(0.3, abs=TOLERANCE_S)


def test_asks_for_exactly_the_tokens_and_nothing_else() -> None:
    with fake_server(Answer(gap_s=0)) as server:
        send(server.base_url, plan([("a", 0.0, 3)], prompt_tokens=5))
    assert server.seen["a"].body == {
        "model": "fake",
        "prompt": [0, 1, 2, 3, 4],
        "max_tokens": 3,
        "min_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_output_tokens_are_the_usage_record_even_where_chunks_say_otherwise() -> None:
    answers = {"lies": Answer(usage_offset=4), "plain": Answer(running_usage=False)}
    with fake_server(answers=answers) as server:
        records = send(server.base_url, plan([("lies", 0, 3), ("plain", 0, 3)]))
    assert (records["lies"].output_tokens, len(records["lies"].token_times)) == (7, 3)
    # Without running usage a chunk counts as a token.
    assert (records["plain"].output_tokens, len(records["plain"].token_times)) == (3, 3)


def test_sends_on_the_clock_while_the_engine_holds_every_answer() -> None:
    # 40 requests, 20 ms apart; each answer takes 1.5 s. A closed loop or a connection limit would delay the later ones.
    rows = [(f"r{index}", 0.02 * index, 2) for index in range(40)]
    with fake_server(Answer(chunks=((1.5, 1), (0.0, 1)))) as server:
        records = send(server.base_url, plan(rows))
    lags = [(record.sent_s or 0) - record.intended_s for record in records.values()]
    assert min(lags) > -0.001
    assert sorted(lags)[35] < TOLERANCE_S
    first = server.seen["r0"].received_at
    for name, intended, _ in rows:
        assert server.seen[name].received_at - first == pytest.approx(intended, abs=2.5 * TOLERANCE_S)


def test_each_fault_has_its_status() -> None:
    answers = {
        "ok": Answer(gap_s=0.01),
        "http": Answer(http_status=500),
        "error": Answer(chunks=((0.01, 1),), ending="error"),
        "hang": Answer(chunks=((0.01, 1),), ending="hang"),
        "cut": Answer(chunks=((0.05, 1), (0.05, 1)), ending="cut"),
        "stop": Answer(chunks=((0.01, 1),), ending="stop"),
    }
    with fake_server(answers=answers) as server:
        records = send(server.base_url, plan([(name, 0.0, 4) for name in answers]), timeout_s=1.0)
    statuses = {name: record.status for name, record in records.items()}
    assert statuses == {
        "ok": "ok",
        "http": "server_error",
        "error": "server_error",
        "hang": "timeout",
        "cut": "unfinished",
        "stop": "unfinished",
    }
    assert "500" in (records["http"].error or "")
    assert "scripted failure" in (records["error"].error or "")
    assert "without its finish reason, after 1 tokens" in (records["stop"].error or "")
    assert len(records["cut"].token_times) == 2
    for name, record in records.items():
        assert record.ended_s is not None
        assert (record.done_s is None) == (name != "ok")
    assert records["hang"].ended_s == pytest.approx(1.0, abs=0.3)
    table = request_table(records.values())
    assert table.height == 6
    assert table.filter(pl.col("status") == "ok")["error"].to_list() == [None]


def test_a_broken_connection_of_a_dead_engine_is_told_apart() -> None:
    with fake_server(Answer(chunks=((0.01, 1),), ending="cut")) as server:
        records = send(server.base_url, plan([("a", 0.0, 4)]), alive=lambda: False)
    assert records["a"].status == "engine_died"


def test_a_dead_engine_may_be_seen_to_be_dead_a_moment_after_its_connections_broke() -> None:
    broken_at: list[float] = []

    def alive() -> bool:
        # Asked only once, later than the kernel needs to end the process.
        broken_at.append(time.perf_counter())
        return broken_at[0] - cut_at < 0.2

    with fake_server(Answer(chunks=((0.01, 1),), ending="cut")) as server:
        cut_at = time.perf_counter()
        records = send(server.base_url, plan([("a", 0.0, 4)]), alive=alive)
    assert records["a"].status == "engine_died"
    assert records["a"].ended_s is not None
    assert records["a"].ended_s < broken_at[0] - cut_at - 0.2


def test_a_port_that_nobody_listens_on_is_refused() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{holder.getsockname()[1]}"
        assert send(url, plan([("a", 0.0, 4)]))["a"].status == "refused"
        assert send(url, plan([("a", 0.0, 4)]), alive=lambda: False)["a"].status == "engine_died"


def test_the_time_limit_counts_from_the_intended_moment() -> None:
    with fake_server(Answer(ending="hang", chunks=())) as server:
        records = send(server.base_url, plan([("a", 0.0, 4), ("b", 0.5, 4)]), timeout_s=0.6)
    assert records["a"].ended_s == pytest.approx(0.6, abs=0.2)
    assert records["b"].ended_s == pytest.approx(1.1, abs=0.2)
