"""Metrics of divergence: on outputs laid out by hand, and on random ones against counts done another way."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import binom

from oneaxis.diverge.measure import (
    OUTPUTS,
    describe,
    exact_interval,
    first_difference,
    flat_metrics,
    metric_names,
    per_prompt,
    share_diverged,
    summarise,
    unseen_at_most,
    with_first_divergence,
)

Outputs = Sequence[Sequence[Sequence[int]]]
"""Prompt, repeat, token."""


def table(
    alone: Outputs, loaded: Outputs, *, steps: tuple[float | None, float | None] = (1.0, 3.0), **own: Any
) -> pl.DataFrame:
    """A table of `OUTPUTS`; `own`: gaps and runners_up of the level alone, by prompt and repeat."""
    rows = []
    for level, together, outputs, tokens in (("alone", 1, alone, steps[0]), ("loaded", 4, loaded, steps[1])):
        for prompt, repeats in enumerate(outputs):
            for repeat, ids in enumerate(repeats):
                told = [own[name][prompt][repeat] if level == "alone" and name in own else None
                        for name in ("gaps", "runners_up")]  # fmt: skip
                rows.append((prompt, level, together, repeat, list(ids), False, *told, tokens, 0.0))
    return pl.DataFrame(rows, schema=OUTPUTS, orient="row")


GIVEN: dict[str, Any] = {"max_num_seqs": 8, "prefix_caching": False, "differences": [], "emptied": True}


def found(alone: Outputs, loaded: Outputs | None = None, **more: Any) -> dict[str, Any]:
    return summarise(table(alone, loaded or alone), **GIVEN | more)


def test_the_check_of_methods() -> None:
    """0.1% a token over 500 tokens: 1 - 0.999^500 = 39.4% of outputs."""
    assert share_diverged(0.001, 500) == pytest.approx(0.3936, abs=5e-5)
    assert share_diverged(0.0, 500) == 0
    assert (share_diverged(1.0, 1), share_diverged(1.0, 0)) == (1.0, 0.0)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    # One ended where the other went on.
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


A, B, C = (5, 6, 7, 8), (5, 6, 9, 8), (1, 6, 7, 8)
# Prompt 0: A A A A, one output. Prompt 1: A B A C, A leads, B leaves it at token 2 and C at 0. Prompt 2: B A B A: both
# lead, B was seen first, and the two A leave it at 2.
ALONE = [[A, A, A, A], [A, B, A, C], [B, A, B, A]]


def test_by_hand() -> None:
    own = describe(table(ALONE, ALONE), "alone")
    assert (own["outputs"], own["prompts_several"], own["unique_max"]) == (12, 2, 3)
    assert own["unique_mean"] == pytest.approx((1 + 3 + 2) / 3)
    assert own["modal_share"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    # Beside one copy of the commonest output of each prompt there are nine outputs, and four of them left it.
    assert (own["diverged"], own["trials"]) == (4, 9)
    assert (own["first_divergence_min"], own["first_divergence_median"]) == (0, 2.0)
    # At risk: 4 + 4 + 4; 3 (B), 4 (A), 1 (C); 3, 4, 3.
    assert own["flip_rate"] == pytest.approx(4 / (12 + 8 + 10))
    # Each prompt once: 4 tokens without a flip, 1 and 3 with one.
    assert own["flip_rate_at_most"] == pytest.approx(exact_interval(2, 8)[1])
    marked = with_first_divergence(table(ALONE, ALONE)).filter(pl.col("level") == "alone")
    assert marked["first_divergence"].to_list() == [None] * 4 + [None, 2, None, 0] + [None, 2, None, 2]


def test_what_never_diverged_is_no_number_and_has_an_upper_bound() -> None:
    own = describe(table([[A, A]] * 20, [[A, A]] * 20), "alone")
    assert own["first_divergence_min"] is None
    assert own["first_divergence_median"] is None
    assert (own["flip_rate"], own["several_share"]) == (0.0, 0.0)
    # Oracle: the largest p for which 0 of n still has a chance of 2.5% is 1 - 0.025^(1/n); 20 prompts of 4 tokens.
    assert own["several_share_ci_high"] == pytest.approx(1 - 0.025 ** (1 / 20))
    assert own["flip_rate_at_most"] == pytest.approx(1 - 0.025 ** (1 / 80))
    flat = flat_metrics(found([[A, A]] * 20))
    assert not [name for name in flat if "first_divergence" in name or "gap" in name]
    assert set(flat) <= metric_names()


def test_one_output_shows_nothing() -> None:
    own = describe(table([[A], [B]], [[A], [B]]), "alone")
    assert [own[name] for name in ("diverged_share", "flip_rate", "flip_rate_at_most", "diverged_at_500")] == [None] * 4
    assert unseen_at_most(1) == 1.0
    # All of four equal: with a commonest output of probability q that has probability q^3 at the most.
    assert (1 - unseen_at_most(4)) ** 3 == pytest.approx(0.05)


def test_levels_against_each_other() -> None:
    # Prompt 0: A alone, B under load. Prompt 1: A at both. Prompt 2: A and B lead alone, A under load.
    one = found([[A, A], [A, A], [A, B]], [[B, B], [A, A], [A, A]])
    assert (one["modal_differs"], one["prompts"]) == (1, 3)
    assert one["agree_with_alone"] == pytest.approx(4 / 6)
    moved = per_prompt(table([[A, A], [A, B]], [[B, B], [B, C]]), "modal_differs_share")
    assert moved["value"].to_list() == [1.0, 0.0]
    several = per_prompt(table([[A, A], [A, B]], [[B, C], [A, A]]), "loaded/several_share")
    assert several["value"].to_list() == [1.0, 0.0]


def test_where_the_commonest_output_under_load_leaves_the_one_alone() -> None:
    """Prompt 0 at token 2, an exact tie; prompt 1 at token 0, 0.5 nats apart; prompt 2 nowhere."""
    gaps = [[[1.0, 2.0, 0.0, 3.0]] * 2, [[0.5, 0.0, 4.0, 3.0]] * 2, [[0.0] * 4] * 2]
    given = table([[A, A]] * 3, [[B, B], [C, C], [A, B]], gaps=gaps, runners_up=[[[9] * 4] * 2] * 3)
    one = summarise(given, **GIVEN)
    assert (one["modal_differs"], one["modal_divergence_min"], one["modal_divergence_median"]) == (2, 0, 1.0)
    assert (one["modal_divergence_tie_share"], one["modal_divergence_gap_max"]) == (0.5, 0.5)
    same = found([[A, A]])
    assert same["modal_divergence_min"] is same["modal_divergence_tie_share"] is None
    assert "modal_divergence_min" not in flat_metrics(same)


def test_gaps_where_outputs_part() -> None:
    """Prompt 0 parts at token 2, an exact tie, to the second choice; prompt 1 at token 0, with 0.5 nats between, to
    another token than the second choice."""
    gaps = [[[1.0, 2.0, 0.0, 3.0]] * 2, [[0.5, 0.0, 4.0, 3.0]] * 2]
    others = [[[0, 0, 9, 0]] * 2, [[2, 0, 0, 0]] * 2]
    own = describe(table([[A, B], [A, C]], [[A, A]] * 2, gaps=gaps, runners_up=others), "alone")
    # Two of the eight positions along the two commonest outputs are ties.
    assert own["tie_share"] == pytest.approx(2 / 8)
    assert (own["ties"], own["gaps"], own["divergence_tie_share"]) == (1, 2, 0.5)
    assert (own["divergence_gap_median"], own["divergence_gap_max"]) == (0.25, 0.5)
    assert own["runner_up_share"] == 0.5
    assert describe(table([[A, B]], [[A, A]]), "alone")["tie_share"] is None


def test_what_was_not_computed_together_is_invalid() -> None:
    [reason] = summarise(table(ALONE, ALONE, steps=(1.0, 1.0)), **GIVEN)["invalid"]
    assert reason == "4 requests at a time were never computed together: 1.00 tokens a step, 1.00 alone"
    # An engine of one at a time is told so: that is its point.
    alone = summarise(table(ALONE, ALONE, steps=(1.0, 1.0)), **GIVEN | {"max_num_seqs": 1})
    assert alone["invalid"] == []
    assert "the engine computes 1 (serve.max_num_seqs)" in alone["warnings"][0]
    unknown = summarise(table(ALONE, ALONE, steps=(1.0, None)), **GIVEN)
    assert (unknown["invalid"], len(unknown["warnings"])) == ([], 1)
    assert flat_metrics(found(ALONE, differences=["serve.dtype: asked a, runs b"]))["valid"] == 0.0


def test_a_cache_that_gave_nothing_or_was_not_emptied_is_said() -> None:
    assert "no prompt token came from the cache" in found(ALONE, prefix_caching=True)["warnings"][0]
    assert "could not be emptied" in found(ALONE, emptied=False)["warnings"][0]
    assert found(ALONE)["warnings"] == []


@pytest.mark.parametrize("seed", range(30))
def test_random_outputs_against_brute_force(seed: int) -> None:
    """Oracle: every count is taken anew by loops over the outputs, with sets and `itertools.groupby`."""
    draw = random.Random(seed)
    repeats, length = draw.randint(2, 5), draw.randint(1, 6)

    def outputs() -> list[list[tuple[int, ...]]]:
        # Two letters and short texts, so that equal outputs and early and late divergences are all there.
        return [[tuple(draw.choice((1, 1, 1, 2)) for _ in range(length)) for _ in range(repeats)] for _ in range(6)]

    alone, loaded = outputs(), outputs()
    summary = found(alone, loaded)
    for level, own in (("alone", alone), ("loaded", loaded)):
        told = summary["levels"][level]
        several = diverged = risk = 0
        firsts = []
        for answers in own:
            ranked = [(len(list(run)), -answers.index(key)) for key, run in itertools.groupby(sorted(answers))]
            modal = answers[-max(ranked)[1]]
            several += len(set(answers)) > 1
            others = list(answers)
            others.remove(modal)
            for other in others:
                same = 0
                while same < length and other[same] == modal[same]:
                    same += 1
                risk += min(same + 1, length)
                if same < length:
                    diverged += 1
                    firsts.append(same)
        assert (told["prompts_several"], told["diverged"], told["trials"]) == (several, diverged, 6 * (repeats - 1))
        assert told["flip_rate"] == pytest.approx(diverged / risk)
        assert told["first_divergence_min"] == min(firsts, default=None)
        assert told["first_divergence_median"] == (pytest.approx(np.median(firsts)) if firsts else None)
    moved = 0
    for one, other in zip(alone, loaded, strict=True):
        tops = [{o for o in side if side.count(o) == max(map(side.count, side))} for side in (one, other)]
        moved += not tops[0].intersection(tops[1])
    assert summary["modal_differs"] == moved


def test_the_flip_rate_that_made_outputs_is_found_again() -> None:
    """Oracle: outputs drawn from a known rate, 6,000 of up to 30 tokens; the estimate is within 4 standard errors."""
    draw, rate, length = np.random.default_rng(7), 0.01, 30
    base = (0,) * length
    own, at_risk = [], 0
    for _ in range(2000):
        flips = [int(draw.geometric(rate)) for _ in range(3)]
        drawn = [base[: flip - 1] + (1,) * (length - flip + 1) for flip in flips]
        at_risk += sum(min(flip, length) for flip in flips)
        # The commonest output is the one without a flip.
        own.append([base, base, base, *drawn])
    told = describe(table(own, own), "alone")
    # Of the three copies two count as outputs that never diverged.
    of_drawn = told["flip_rate"] * (at_risk + 2000 * 2 * length) / at_risk
    assert of_drawn == pytest.approx(rate, abs=4 * math.sqrt(rate / at_risk))


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (0, 48), (3, 48), (24, 48), (48, 48), (7, 500)])
def test_the_exact_interval_by_its_definition(hits: int, n: int) -> None:
    """Oracle: the binomial distribution itself (scipy.stats), at the ends of the interval."""
    low, high = exact_interval(hits, n)
    if hits:
        assert binom.sf(hits - 1, n, low) == pytest.approx(0.025, rel=1e-6)
    if hits < n:
        assert binom.cdf(hits, n, high) == pytest.approx(0.025, rel=1e-6)
    assert (low == 0) == (hits == 0)
    assert (high == 1) == (hits == n)
