"""Arrivals and prompts. Oracle: counts and moments of a Poisson process, sets of prefixes, counted by hand here."""

import numpy as np
import polars as pl
import pytest

from oneaxis.config.schema import Load
from oneaxis.errors import UserError
from oneaxis.load.client import requests_of
from oneaxis.load.plan import Plan, check_fits, draw_arrivals, draw_plan, text_tokens

TEXT = np.random.default_rng(7).integers(10, 400, size=3000).astype(np.int32)


def load(**changes: object) -> Load:
    """A `load` section."""
    values: dict[str, object] = {
        "arrival": "poisson",
        "shapes": [
            {"name": "long", "prompt_tokens": 200, "output_tokens": 4},
            {"name": "short", "prompt_tokens": 16, "output_tokens": 20},
        ],
        "rates_rps": [2.0, 6.0],
        "duration_s": 30.0,
        "warmup_requests": 3,
        "request_timeout_s": 10.0,
        "service_class": {"ttft_ms": 100.0, "tpot_ms": 10.0},
    }
    return Load.model_validate(values | changes)


def draw(section: Load, *, seed: int = 0, session: str = "default", repetition: int = 0) -> Plan:
    return draw_plan(section, TEXT, seed=seed, session=session, repetition=repetition)


def test_poisson_arrivals_have_the_rate_the_spread_and_the_memorylessness() -> None:
    generator = np.random.default_rng(3)
    draws = [draw_arrivals("poisson", 5.0, 100.0, generator) for _ in range(300)]
    counts = np.array([len(times) for times in draws])
    # Mean and variance of the count are both rate * duration = 500: the count is random, not fixed.
    assert counts.mean() == pytest.approx(500, rel=0.01)
    assert counts.var() == pytest.approx(500, rel=0.25)
    gaps = np.concatenate([np.diff(times) for times in draws])
    assert gaps.mean() == pytest.approx(0.2, rel=0.01)
    # P(gap > t) = exp(-rate t) at three points.
    for t in (0.1, 0.2, 0.6):
        assert (gaps > t).mean() == pytest.approx(np.exp(-5 * t), abs=0.005)
    assert all((times >= 0).all() and (times < 100).all() and (np.diff(times) >= 0).all() for times in draws)


def test_constant_arrivals() -> None:
    generator = np.random.default_rng(0)
    assert draw_arrivals("constant", 4.0, 1.0, generator).tolist() == [0, 0.25, 0.5, 0.75]
    assert draw_arrivals("constant", 0.5, 5.0, generator).tolist() == [0, 2, 4]
    # 0.1 * 3 is just over 0.3 in floating point: three arrivals, not four.
    assert len(draw_arrivals("constant", 10.0, 0.1 * 3, generator)) == 3


def test_every_prompt_has_its_length_and_a_start_of_its_own_in_the_whole_sweep() -> None:
    plan = draw(load())
    sent = pl.concat([plan.arrivals, plan.warmups])
    lengths = {"long": 200, "short": 16}
    for row in sent.iter_rows(named=True):
        assert len(row["prompt_token_ids"]) == lengths[row["shape"]]
    starts = [tuple(ids[:4]) for ids in sent["prompt_token_ids"].to_list()]
    assert len(set(starts)) == len(starts) > 100
    assert sent["request_id"].n_unique() == sent.height
    assert {token for ids in sent["prompt_token_ids"].to_list() for token in ids} <= set(TEXT.tolist())
    assert plan.warmups.group_by("shape", "level").len()["len"].to_list() == [3] * 4


def test_the_body_of_a_prompt_is_text_in_its_order() -> None:
    body = draw(load()).arrivals["prompt_token_ids"].to_list()[0][4:]
    doubled = [*TEXT.tolist(), *TEXT.tolist()]
    assert any(doubled[start : start + len(body)] == body for start in range(len(TEXT)))


def test_a_text_shorter_than_the_prompt_is_wrapped_around() -> None:
    plan = draw_plan(load(), TEXT[:50], seed=0, session="a", repetition=0)
    assert {len(ids) for ids in plan.arrivals["prompt_token_ids"].to_list()} == {200, 16}


def test_the_same_run_is_drawn_again_and_every_part_of_its_name_changes_it() -> None:
    base = draw(load())
    assert base.arrivals.equals(draw(load()).arrivals)
    for other in (draw(load(), seed=1), draw(load(), session="s2"), draw(load(), repetition=1)):
        assert base.arrivals["intended_s"].to_list()[:5] != other.arrivals["intended_s"].to_list()[:5]
        mine = {tuple(ids) for ids in base.arrivals["prompt_token_ids"].to_list()}
        assert not mine & {tuple(ids) for ids in other.arrivals["prompt_token_ids"].to_list()}


def test_another_rate_in_the_list_leaves_a_cell_as_it_was() -> None:
    def cell(plan: Plan) -> pl.DataFrame:
        return plan.arrivals.filter((pl.col("shape") == "short") & (pl.col("level") == "r6"))

    assert cell(draw(load())).equals(cell(draw(load(rates_rps=[6.0, 1.0]))))


def test_special_tokens_never_reach_a_prompt() -> None:
    def encode(text: str) -> list[int]:
        return [0, *(ord(letter) for letter in text), 1]

    ids = text_tokens(["abc", "bcd"], encode, {0, 1})
    assert ids.tolist() == [97, 98, 99, 98, 99, 100]
    assert len(text_tokens(["abcdef"] * 100, encode, {0, 1}, limit=20)) == 20
    with pytest.raises(UserError, match=r"heldout\.parquet"):
        text_tokens(["", "a"], encode, {0, 1})


def test_refuses_what_cannot_run() -> None:
    check_fits(load(), 204)
    with pytest.raises(UserError, match=r"load\.shapes: long: 200 \+ 4 = 204 tokens; .*\(203\)"):
        check_fits(load(), 203)
    with pytest.raises(UserError, match=r"load\.rates_rps: 0\.0001: no request arrives"):
        draw(load(rates_rps=[0.0001]))
    with pytest.raises(UserError, match="unique prompts"):
        draw_plan(load(rates_rps=[30.0]), np.array([5, 6], dtype=np.int32), seed=0, session="a", repetition=0)


def test_requests_carry_the_plan() -> None:
    plan = draw(load())
    requests = requests_of(plan.arrivals, "m")
    assert [request.intended_s for request in requests] == plan.arrivals["intended_s"].to_list()
    assert {(request.shape, request.asked_prompt_tokens, request.asked_output_tokens) for request in requests} == {
        ("long", 200, 4),
        ("short", 16, 20),
    }
