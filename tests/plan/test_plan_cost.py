"""Metering: what an event costs, that it counts once, and that no store can hold up or break the metered call."""

import threading
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneaxis.errors import UserError
from oneaxis.plan.cost import Event, Meter, Prices, append_to, bills, read_events, read_prices

PRICES = {"small": Prices(input=2.0, cached_input=0.5, output=8.0)}


def event(id: str, model: str = "small", input_tokens: int = 1000, cached: int = 0, output: int = 0) -> Event:
    return Event(id=id, model=model, input_tokens=input_tokens, cached_tokens=cached, output_tokens=output)


def test_cached_input_has_its_own_price():
    # 200 fresh x 2 + 800 cached x 0.5 + 100 x 8 = 400 + 400 + 800 = 1,600 USD a million = 0.0016 USD.
    (bill,) = bills([event("a", cached=800, output=100)], PRICES)
    assert bill.usd == pytest.approx(0.0016)
    (without,) = bills([event("a", cached=0, output=100)], PRICES)
    assert without.usd == pytest.approx(0.0028)


def test_an_event_counts_once_however_often_it_is_sent():
    sent = [event("a"), event("b"), event("a"), event("a"), event("b", input_tokens=9)]
    (bill,) = bills(sent, PRICES)
    assert (bill.events, bill.repeats, bill.conflicts, bill.input_tokens) == (2, 3, 1, 2000)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.randoms())
def test_order_and_repeats_change_nothing(ids, shuffler):
    once = [event(str(number), input_tokens=100 * number + 1, output=number) for number in sorted(set(ids))]
    sent = [one for one in once for _ in range(ids.count(int(one.id)))]
    shuffler.shuffle(sent)
    (bill,), (expected,) = bills(sent, PRICES), bills(once, PRICES)
    assert (bill.events, bill.input_tokens, bill.output_tokens) == (
        expected.events,
        expected.input_tokens,
        expected.output_tokens,
    )
    assert bill.usd == pytest.approx(expected.usd)


def test_an_unknown_model_is_unpriced_and_never_free():
    priced, unpriced = bills([event("a"), event("b", model="new")], PRICES)
    assert priced.usd == pytest.approx(0.002)
    assert unpriced.model == "new"
    assert unpriced.usd is None


def test_more_cached_than_sent_is_refused():
    with pytest.raises(UserError, match="cached_tokens=1001: allowed: up to input_tokens=1000"):
        bills([event("a", cached=1001)], PRICES)


def test_what_a_meter_stores_comes_back(tmp_path):
    meter = Meter(append_to(tmp_path / "events.jsonl"))
    for _ in range(250):
        meter.record("small", 10, 2, cached_tokens=5)
    meter.record("small", 10, 2, id="mine")
    meter.record("small", 10, 2, id="mine")
    assert meter.close()
    assert meter.dropped == 0
    found = read_events(tmp_path / "events.jsonl")
    assert len(found) == 252
    assert len({uuid.UUID(one.id) for one in found if one.id != "mine"}) == 250
    (bill,) = bills(found, PRICES)
    assert (bill.events, bill.repeats, bill.cached_tokens) == (251, 1, 1250)


def test_a_store_that_hangs_holds_nothing_up():
    """The store never returns; 5,000 calls are metered all the same, and what the queue cannot take is counted."""
    free = threading.Event()
    meter = Meter(lambda _: free.wait() and None, capacity=100)
    began = time.perf_counter()
    for _ in range(5000):
        meter.record("small", 10, 2)
    assert not meter.close(timeout_s=0.05)
    assert time.perf_counter() - began < 5
    assert meter.dropped >= 5000 - 100 - 100
    free.set()


def test_a_store_that_fails_fails_nothing():
    tried = []

    def store(events):
        tried.append(len(events))
        raise ConnectionError("away")

    meter = Meter(store)
    meter.record("small", 10, 2)
    meter.record("small", -1, 2)
    meter.record("", 10, 2)
    assert meter.close()
    assert meter.dropped == 3
    assert sum(tried) == 2, "one event, sent twice"


def test_a_store_that_recovers_gets_the_batch_again():
    seen = []

    def store(events):
        seen.append([one.id for one in events])
        if len(seen) == 1:
            raise TimeoutError

    meter = Meter(store)
    meter.record("small", 10, 2, id="a")
    assert meter.close()
    assert seen == [["a"], ["a"]]
    assert meter.dropped == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("small: {input: 1, cached_input: 1}", "small.output: field required"),
        ("small: {input: -1, cached_input: 1, output: 1}", "small.input=-1"),
        ("small: {input: .nan, cached_input: 1, output: 1}", "small.input=nan"),
        ("small: 3", "small=3"),
        ("small: [", "not YAML"),
    ],
)
def test_prices_that_are_none_are_refused(tmp_path, text, says):
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_prices(tmp_path / "prices.yaml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_events_that_are_none_are_refused(tmp_path):
    (tmp_path / "e.jsonl").write_text(
        event("a").model_dump_json() + '\n{"id": "b", "model": "m", "input_tokens": -1}\n'
    )
    with pytest.raises(UserError, match="line 2: input_tokens=-1"):
        read_events(tmp_path / "e.jsonl")
