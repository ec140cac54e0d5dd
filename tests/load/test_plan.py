"""Arrivals and prompts. Oracle: the laws themselves (KS, moments), sets of prefixes, rows counted by hand."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError
from scipy import stats

from oneaxis.config.schema import Load, LognormalLengths, UniformLengths
from oneaxis.errors import UserError
from oneaxis.load.client import requests_of
from oneaxis.load.plan import (
    Plan,
    check_fits,
    draw_arrivals,
    draw_lengths,
    draw_plan,
    draw_ramp,
    expected_hit_rates,
    reused_tokens,
    text_tokens,
)
from oneaxis.load.trace import read_trace
from tests.load.sections import UNUSED

TEXT = np.random.default_rng(7).integers(10, 400, size=3000).astype(np.int32)


SHAPES: list[dict[str, object]] = [
    {"name": "long", "prompt_tokens": 200, "output_tokens": 4},
    {"name": "short", "prompt_tokens": 16, "output_tokens": 20},
]


def load(**changes: object) -> Load:
    """A `load` section."""
    values: dict[str, object] = {
        "arrival": "poisson",
        "shapes": SHAPES,
        "rates_rps": [2.0, 6.0],
        **UNUSED,
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


def test_gamma_gaps_have_the_rate_and_the_spread_that_burstiness_says() -> None:
    # Gamma of shape b: coefficient of variation 1 / sqrt(b). KS against the law itself, on gaps that no window cut.
    for burstiness, cv in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5)):
        generator = np.random.default_rng(int(100 * burstiness))
        times = draw_arrivals("gamma", 5.0, 2000.0, generator, burstiness=burstiness)
        gaps = np.diff(times)
        assert gaps.mean() == pytest.approx(0.2, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
        assert stats.kstest(gaps, stats.gamma(burstiness, scale=0.2 / burstiness).cdf).pvalue > 0.01
        assert stats.kstest(gaps, stats.gamma(2 * burstiness, scale=0.1 / burstiness).cdf).pvalue < 1e-6


@pytest.mark.parametrize(("first", "last"), [(1.0, 9.0), (9.0, 1.0), (5.0, 5.0)])
def test_a_ramp_has_the_intensity_of_its_line(first: float, last: float) -> None:
    # Given their number, arrivals of such a process are independent with density rate(t) / total: KS against its
    # integral, written here as (first t + (last - first) t^2 / 2T) / total. The count is Poisson of 5 * 40 = 200.
    draws = [draw_ramp(first, last, 40.0, np.random.default_rng(seed)) for seed in range(200)]
    counts = np.array([len(times) for times in draws])
    assert counts.mean() == pytest.approx(200, rel=0.02)
    assert counts.var() == pytest.approx(200, rel=0.3)
    times = np.concatenate(draws)
    assert (times >= 0).all()
    assert (times < 40).all()

    def integral(t: np.ndarray) -> np.ndarray:
        return (first * t + (last - first) * t**2 / 80) / (20 * (first + last))

    assert stats.kstest(times, integral).pvalue > 0.01
    if first != last:
        assert stats.kstest(times, lambda t: t / 40).pvalue < 1e-6


def test_a_closed_loop_is_drawn_whole_with_the_pauses_of_each_user() -> None:
    section = load(arrival="closed", rates_rps=[], users=[3], think_time_s=2.0, requests_per_user=400)
    arrivals = draw(section).arrivals.filter(pl.col("shape") == "short")
    assert arrivals["level"].unique().to_list() == ["u3"]
    assert arrivals.group_by("user", maintain_order=True).len().rows() == [(0, 400), (1, 400), (2, 400)]
    assert arrivals["intended_s"].null_count() == arrivals["rate_rps"].null_count() == 1200
    assert stats.kstest(arrivals["think_s"].to_numpy(), stats.expon(scale=2.0).cdf).pvalue > 0.01
    starts = {tuple(ids[:4]) for ids in arrivals["prompt_token_ids"].to_list()}
    assert len(starts) == 1200


def test_lengths_are_drawn_as_they_are_stated() -> None:
    generator = np.random.default_rng(5)
    uniform = draw_lengths(UniformLengths(distribution="uniform", min=10, max=19), 20000, generator)
    assert sorted(set(uniform)) == list(range(10, 20))
    assert stats.chisquare(np.bincount(uniform)[10:]).pvalue > 0.01
    free = LognormalLengths(distribution="lognormal", mean=200.0, cv=0.5, min=1, max=100000)
    lengths = np.array(draw_lengths(free, 40000, generator))
    assert lengths.mean() == pytest.approx(200, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.03)
    held = LognormalLengths(distribution="lognormal", mean=200.0, cv=0.5, min=150, max=220)
    assert (min(draw_lengths(held, 500, generator)), max(draw_lengths(held, 500, generator))) == (150, 220)

    shapes = [{"name": "chat", "prompt_tokens": free.model_dump() | {"min": 8, "max": 400},
               "output_tokens": {"distribution": "uniform", "min": 2, "max": 6}},
              {"name": "short", "prompt_tokens": 16, "output_tokens": 20}]  # fmt: skip
    arrivals = draw(load(shapes=shapes)).arrivals.filter(pl.col("shape") == "chat")
    assert arrivals["prompt_token_ids"].list.len().n_unique() > 20
    assert set(arrivals["asked_output_tokens"].to_list()) == {2, 3, 4, 5, 6}


def test_declared_prefixes_are_shared_by_their_groups_and_nothing_else_is() -> None:
    shapes = [{"name": "rag", "prompt_tokens": 150, "output_tokens": 4,
               "shared_prefix": {"tokens": 70, "groups": 3, "share": 0.6}},
              {"name": "short", "prompt_tokens": 16, "output_tokens": 20}]  # fmt: skip
    arrivals = draw(load(shapes=shapes, rates_rps=[20.0])).arrivals
    rag = arrivals.filter(pl.col("shape") == "rag")
    n, shared = rag.height, rag.filter(pl.col("prefix_group").is_not_null())
    assert shared.height / n == pytest.approx(0.6, abs=0.08)
    assert shared.group_by("prefix_group").len().height == 3
    prompts = rag["prompt_token_ids"].to_list()
    assert {len(prompt) for prompt in prompts} == {150}
    by_group = dict(zip(prompts and [tuple(p[:70]) for p in shared["prompt_token_ids"].to_list()],
                        shared["prefix_group"], strict=True))  # fmt: skip
    assert len(by_group) == 3
    assert len({tuple(prompt[70:74]) for prompt in shared["prompt_token_ids"].to_list()}) == shared.height
    # Blocks of 16 tokens: 4 whole ones in 70, for all but the first of each group; of all the cell's prompt tokens.
    expected = expected_hit_rates(arrivals, 16, together=False)
    assert expected == {"rag r20": pytest.approx((shared.height - 3) * 64 / (150 * n))}
    # Blocks longer than the prefix: nothing.
    assert expected_hit_rates(arrivals, 128, together=False) == {"rag r20": 0}
    # All shapes at once: over the tokens of both.
    level = expected_hit_rates(arrivals, 16, together=True)
    of_both = 150 * n + 16 * (arrivals.height - n)
    assert level == {cell: pytest.approx((shared.height - 3) * 64 / of_both) for cell in ("rag r20", "short r20")}


def test_a_request_finds_its_declared_start_once_another_of_its_group_has_a_token() -> None:
    shapes = [{"name": "rag", "prompt_tokens": 150, "output_tokens": 4,
               "shared_prefix": {"tokens": 70, "groups": 3, "share": 0.6}},
              {"name": "short", "prompt_tokens": 16, "output_tokens": 20}]  # fmt: skip
    arrivals = draw(load(shapes=shapes)).arrivals
    generator = np.random.default_rng()
    sent_s = arrivals["intended_s"].to_numpy() + generator.uniform(0, 0.1, arrivals.height)
    first_s: list[float | None] = (sent_s + generator.uniform(0.1, 2.0, arrivals.height)).tolist()
    for failed in generator.choice(arrivals.height, size=10, replace=False):
        first_s[failed] = None
    requests = arrivals.select("shape", "level", "request_id").with_columns(
        sent_s=pl.Series(sent_s), first_token_s=pl.Series(first_s, dtype=pl.Float64)
    )
    rows = [(row["level"], row["prefix_group"], row["request_id"]) for row in arrivals.iter_rows(named=True)]
    expected = {}
    for sent, (level, group, name) in zip(sent_s, rows, strict=True):
        others = [first for first, (of, same, _) in zip(first_s, rows, strict=True)
                  if group is not None and (of, same) == (level, group) and first is not None]  # fmt: skip
        if any(first <= sent for first in others):
            expected[name] = 64
    assert 20 < len(expected) < arrivals["prefix_group"].count()
    assert reused_tokens(arrivals, requests, 16) == expected
    # Of blocks that are longer than the start nothing is found; nor by requests that were not planned.
    assert reused_tokens(arrivals, requests, 128) == {}
    assert reused_tokens(arrivals, requests.with_columns(pl.col("request_id") + "?"), 16) == {}


def test_prompts_repeat_only_where_that_is_asked_for() -> None:
    arrivals = draw(load(repeat_prompts=5)).arrivals
    for _, cell in arrivals.group_by("shape", "level"):
        prompts = [tuple(ids) for ids in cell["prompt_token_ids"].to_list()]
        assert len(set(prompts)) == 5
        assert prompts[5:] == prompts[:-5]


def test_shapes_together_have_their_own_arrivals_by_weight_in_one_order() -> None:
    shapes = [{"name": "long", "prompt_tokens": 200, "output_tokens": 4, "weight": 0.25},
              {"name": "short", "prompt_tokens": 16, "output_tokens": 20, "service_class": "chat"}]  # fmt: skip
    section = load(shapes=shapes, together=True, arrival="constant", classes={"chat": {"ttft_ms": 9.0, "tpot_ms": 9.0}})
    plan = draw(section)
    assert plan.together
    # 2 and 6 a second for 30 s; the long ones at a quarter of that.
    counts = plan.arrivals.group_by("level", "shape", "rate_rps", "service_class", maintain_order=True).len().rows()
    assert counts == [("r2", "long", 0.5, "default", 15), ("r2", "short", 2.0, "chat", 60),
                      ("r6", "long", 1.5, "default", 45), ("r6", "short", 6.0, "chat", 180)]  # fmt: skip
    for _, level in plan.arrivals.group_by("level"):
        assert level["intended_s"].is_sorted()


TRACES = {
    "mooncake.jsonl": '{"timestamp": 1000, "input_length": 30, "output_length": 5, "hash_ids": [0]}\n'
    '{"timestamp": 4500, "input_length": 40, "output_length": 6, "hash_ids": [0]}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,30,5\n"
    "2023-11-16 18:17:07.4799600,40,6\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,30,5,35,API log\n"
    "8.5,GPT-4,40,6,46,API log\n",
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_gives_moments_and_lengths(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(TRACES[name])
    trace = read_trace(name, tmp_path)
    assert trace["time_s"].to_list() == pytest.approx([0, 3.5])
    assert trace.select("prompt_tokens", "output_tokens").rows() == [(30, 5), (40, 6)]
    section = load(arrival="trace", shapes=[], rates_rps=[], trace=name, trace_speed=[1.0, 2.0], duration_s=3.0)
    plan = draw_plan(section, TEXT, seed=0, session="a", repetition=0, trace=trace)
    # At its own speed the second comes too late for 3 s; at twice the speed after 1.75 s.
    assert plan.arrivals.select("shape", "level", "asked_output_tokens").rows() == [
        ("trace", "x1", 5), ("trace", "x2", 5), ("trace", "x2", 6)]  # fmt: skip
    assert plan.arrivals["intended_s"].to_list() == pytest.approx([0, 0, 1.75])
    assert plan.arrivals["prompt_token_ids"].list.len().to_list() == [30, 30, 40]
    check_fits(section, 46, trace)
    with pytest.raises(UserError, match=r"line [23]: 40 \+ 6 = 46 tokens.*max_model_len \(45\)"):
        check_fits(section, 45, trace)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timestamp": 0, "input_length": 30, "output_length": 5}\n{"timestamp": 1}', "line 2 has timestamp; "),
        ('{"timestamp": 0, "input_length": 30, "output_length": 5}\n\n{nope', "line 3 is not JSON"),
        ('{"timestamp": "x", "input_length": 30, "output_length": 5}', "line 1: timestamp is 'x'; allowed: a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,30,5\n2023-11-16 18:17:09,3,5",
         "line 3: ContextTokens is '3'; allowed: a whole number from 4"),
        ("Timestamp,Request tokens,Response tokens\n1,30,0", "line 2: Response tokens is '0'; allowed: a whole number"),
        ("a,b\n1,2", "line 2 has a, b; allowed: timestamp, input_length, output_length; TIMESTAMP"),
        ("Timestamp,Request tokens,Response tokens\n", "holds no request"),
        (f'{{"timestamp": {"9" * 400}, "input_length": 30, "output_length": 5}}',
         r"line 1: timestamp is 9{60}\.\.\.; allowed: a time$"),
        pytest.param('{"timestamp": 0, "input_length": 30, "output_length": 5}\n{"timestamp":' + "[" * 100_000,
                     "line 2 is not JSON", id="nested"),
        pytest.param("Timestamp,Request tokens,Response tokens\n1,30,5\n2,30," + "5" * 131_073,
                     "line 3 is not CSV .field larger", id="field"),
        ('{"timestamp": 0, "input_length": 1e300, "output_length": 5}',
         r"line 1: input_length is 1e\+300; allowed: a whole number from 4 to 10000000"),
        ("Timestamp,Request tokens,Response tokens\n1,30,1e30", "line 2: Response tokens is '1e30'; allowed: a whole"),
    ],
)  # fmt: skip
def test_a_bad_row_of_a_trace_is_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(UserError, match=r"load\.trace=.*" + words):
        read_trace("t", tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"burstiness": 2.0}, "burstiness is 2.0 and does nothing with arrival=poisson; allowed: null"),
        ({"arrival": "gamma"}, "burstiness is null; arrival=gamma needs a value"),
        ({"arrival": "ramp", "rates_rps": [1.0]}, "arrival=ramp needs two"),
        ({"arrival": "closed"}, "rates_rps is .* and does nothing with arrival=closed; allowed: \\[\\]"),
        ({"users": [3]}, "users is .* and does nothing"),
        (
            {"arrival": "trace", "rates_rps": [], "trace": "x", "trace_speed": [1.0]},
            "shapes is 2 and does nothing with arrival=trace",
        ),
        ({"classes": {"chat": {"ttft_ms": 1.0, "tpot_ms": 1.0}}}, "classes has chat, which no shape names"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        load(**changes)


LOGNORMAL = {"distribution": "lognormal", "mean": 64.0, "cv": 0.5, "min": 16, "max": 128}


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, {"prompt_tokens": {**LOGNORMAL, "cv": 1e300}}),
        ({}, {"prompt_tokens": {**LOGNORMAL, "max": 10**30}}),
        ({}, {"output_tokens": 10**30}),
        ({}, {"weight": 1e-320}),
        ({}, {"shared_prefix": {"tokens": 4, "groups": 10**9, "share": 0.5}}),
        ({"rates_rps": [1e-320]}, {}),
        ({"rates_rps": [1e300]}, {}),
        ({"duration_s": 1e-320}, {}),
        ({"duration_s": 1e300, "rates_rps": [1e-6]}, {}),
        ({"request_timeout_s": 1e300}, {}),
        ({"warmup_requests": 10**9}, {}),
        ({"arrival": "gamma", "burstiness": 1e-9}, {}),
        ({"arrival": "closed", "rates_rps": [], "users": [10**400], "think_time_s": 0.0, "requests_per_user": 1}, {}),
        ({"arrival": "closed", "rates_rps": [], "users": [1], "think_time_s": 1e300, "requests_per_user": 1}, {}),
        ({"search": {"probes": 10**9, "resolution": 1e-9, "users": None, "max_drift": 0.2}}, {}),
    ],
)
def test_numbers_that_nothing_can_be_drawn_from_have_bounds(
    changes: dict[str, object], shape: dict[str, object]
) -> None:
    shapes = [SHAPES[0] | shape, SHAPES[1]]
    with pytest.raises(ValidationError, match=r"1 validation error[^$]*(less|greater) than or equal to"):
        load(**({"shapes": shapes} | changes))


def test_the_widest_lengths_that_are_allowed_can_be_drawn() -> None:
    wide = LognormalLengths(distribution="lognormal", mean=9e6, cv=10.0, min=1, max=10_000_000)
    assert max(draw_lengths(wide, 100, np.random.default_rng(0))) <= 10_000_000


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
    section = load(arrival="trace", shapes=[], rates_rps=[], trace="a.csv", trace_speed=[1.0, 2.0], duration_s=3.0)
    dense = pl.DataFrame({"line": 1, "time_s": np.linspace(0, 6, 300_000), "prompt_tokens": 9, "output_tokens": 1})
    # Half of them come within 3 s, and at twice the speed all but the last.
    with pytest.raises(
        UserError, match=r"load\.trace=a\.csv: 299999 requests .* load\.trace_speed=2; allowed: at most"
    ):
        check_fits(section, 2048, dense)
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
