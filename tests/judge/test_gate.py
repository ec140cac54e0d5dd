"""Every row of the decision table in docs/verdicts.md, the properties that a decision must have, and how often it errs.

Numbers are made up so that the interval is known: differences +1 and -1 around a mean have a t interval worked by hand.
"""

import numpy as np
import pytest

from oneaxis.config.schema import Gate
from oneaxis.judge.gate import Decision, Evidence, decide, floor_of, weigh
from oneaxis.judge.units import Kind, Paired

GATE = Gate(confidence=0.95, floor=0.95, max_spread=0.10, min_pairs=6)


def runs(baseline: list[float] | np.ndarray, candidate: list[float] | np.ndarray) -> Evidence:
    """Repetitions of two arms."""
    one, other = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    return weigh("repetitions", Paired(one, other, float(one.mean()), float(other.mean())), 0.95)


BASE = [100.0, 101.0, 99.0, 100.0, 101.0, 99.0]


def shifted(by: float, wobble: float = 1.0) -> Evidence:
    """Differences by+wobble, by-wobble, ...: mean `by`; sample deviation wobble sqrt(6/5), so that the margin is
    2.5706 x wobble sqrt(6/5) / sqrt(6) = 1.1496 x wobble."""
    return runs(BASE, [x + by + wobble * (-1) ** k for k, x in enumerate(BASE)])


def test_the_interval_of_the_examples() -> None:
    evidence = shifted(5)
    assert (evidence.effect, evidence.n) == (pytest.approx(5), 6)
    assert evidence.ci_low == pytest.approx(5 - 1.1496, abs=1e-4)
    assert evidence.p_value == 2 / 64
    assert evidence.relative == pytest.approx(0.05)


# --- the rows of the table ---------------------------------------------------------------------------------------


def test_too_few_pairs_is_unresolved() -> None:
    decision = decide(runs(BASE[:5], [x + 9 for x in BASE[:5]]), "higher", 0, GATE)
    assert decision.word == "unresolved"
    assert "5 pairs of runs; a claim about a timing needs 6" in decision.reasons[0]
    # A gate that asks for two pairs does not make the sign-flip test able to decide with five.
    lax = GATE.model_copy(update={"min_pairs": 2})
    assert decide(runs(BASE[:5], [x + 9 for x in BASE[:5]]), "higher", 0, lax).word == "unresolved"
    assert decide(shifted(5), "higher", 0, GATE.model_copy(update={"min_pairs": 7})).word == "unresolved"


def test_an_excess_of_spread_is_unresolved_and_never_a_pass() -> None:
    wide = [100.0, 112.0, 100.0, 112.0, 100.0, 112.0]
    decision = decide(runs(wide, [x + 30 for x in wide]), "higher", 0, GATE)
    assert decision.word == "unresolved"
    assert "the baseline's runs spread by 10.7% (gate.max_spread 10%)" in decision.reasons
    assert decide(runs(BASE, [200, 200, 200, 200, 200, 230]), "higher", 0, GATE).reasons == [
        "the candidate's runs spread by 13.0% (gate.max_spread 10%)"
    ]


def test_under_the_floor_is_a_reject_even_where_nothing_is_shown() -> None:
    # Mean 94 of 100, one pair that goes the other way: sign-flip p = 4/64 and more, so no effect is shown.
    evidence = runs(BASE, [93.0, 93.0, 91.0, 91.0, 93.0, 99.5])
    assert evidence.p_value > 0.05
    decision = decide(evidence, "higher", 0, GATE)
    assert decision.word == "reject"
    assert "under the floor: 93.42 against 95.00, which is 95% of the baseline" in decision.reasons[0]
    # Where lower is better the floor is its inverse: 100 / 0.95 = 105.26.
    assert floor_of(evidence, "lower", GATE) == pytest.approx(105.263, abs=1e-3)
    over = runs(BASE, [108.0, 107.0, 106.0, 107.0, 108.0, 98.9])
    assert over.p_value > 0.05
    assert decide(over, "lower", 0, GATE).word == "reject"
    assert decide(over, "higher", 0, GATE).word == "tie"


def test_worse_is_a_reject() -> None:
    assert decide(shifted(-3), "higher", 0, GATE).word == "reject"
    assert "wrong side" in decide(shifted(3), "lower", 0, GATE).reasons[0]


def test_no_effect_shown_is_a_tie_with_the_largest_effect_still_compatible() -> None:
    decision = decide(shifted(0.5), "higher", 0, GATE)
    assert decision.word == "tie"
    assert decision.reasons[1] == "the largest gain still compatible is +1.65, the largest loss −0.650"
    # In a metric where lower is better the gain is a fall.
    assert "largest gain still compatible is −0.650" in decide(shifted(0.5), "lower", 0, GATE).reasons[1]
    assert "bar's size is excluded" in decide(shifted(0.5), "higher", 3, GATE).recommendations[0]
    assert "would decide (there are 6)" in decide(shifted(0.5), "higher", 1.5, GATE).recommendations[0]


def test_sign_alone_never_passes() -> None:
    # All six are better (p = 2/64), and the t interval still holds zero: one pair carries the mean.
    evidence = runs(BASE, [x + d for x, d in zip(BASE, [9, 0.1, 0.1, 0.1, 0.1, 0.1], strict=True)])
    assert evidence.p_value == 2 / 64
    assert evidence.ci_low < 0
    assert decide(evidence, "higher", 0, GATE).word == "tie"


def test_the_t_interval_alone_never_passes() -> None:
    # One pair goes the other way: the interval is clear of zero, and the sign-flip test has p = 4/64.
    evidence = runs(BASE, [x + d for x, d in zip(BASE, [5, 6, 5, 6, 5, -0.5], strict=True)])
    assert evidence.ci_low > 0
    assert evidence.p_value > 0.05
    assert decide(evidence, "higher", 0, GATE).word == "tie"


def test_shown_alone_but_not_among_the_claims_is_unresolved() -> None:
    assert decide(shifted(5), "higher", 0, GATE, p_adjusted=0.049, num_claims=9).word == "accept"
    decision = decide(shifted(5), "higher", 0, GATE, p_adjusted=0.06, num_claims=9)
    assert decision.word == "unresolved"
    assert "not among 9 claims (Holm: 0.06)" in decision.reasons[0]


def test_a_real_effect_wholly_under_the_bar_is_a_reject() -> None:
    decision = decide(shifted(5), "higher", 7, GATE)
    assert decision.word == "reject"
    assert decision.reasons == ["the effect is real and too small: at most +6.15, and the bar is +7.00"]


def test_a_bar_inside_the_interval_is_unresolved_and_says_how_many_more() -> None:
    decision = decide(shifted(5), "higher", 4.5, GATE)
    assert decision.word == "unresolved"
    assert "whether by the bar of +4.50 is open: between +3.85 and +6.15" in decision.reasons[0]
    # Deviation sqrt(6/5) = 1.0954: t(0.975; 20) x 1.0954 / sqrt(21) = 2.0860 x 0.23904 = 0.4986 is the first under 0.5.
    assert decision.recommendations == ["about 21 pairs of runs would decide (there are 6)"]


def test_beyond_the_bar_is_accepted() -> None:
    assert decide(shifted(5), "higher", 3.8, GATE) == Decision(
        "accept", ["the 95% interval lies beyond the bar of +3.80"], ["take the candidate"]
    )
    assert decide(shifted(-5), "lower", 3.8, GATE).reasons == ["the 95% interval lies beyond the bar of −3.80"]
    assert decide(shifted(-5), "lower", 0, GATE).word == "accept"


# --- items and log-probabilities ---------------------------------------------------------------------------------


def items(gained: int, lost: int, n: int, both: int) -> Evidence:
    """`both` right in both arms."""
    one = np.array([1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * (n - both - gained - lost))
    other = np.array([1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * (n - both - gained - lost))
    return weigh("items", Paired(one, other, one.mean(), other.mean()), 0.95)


def test_247_against_246_of_276_is_a_tie_at_any_discordance() -> None:
    for lost in range(29):
        evidence = items(lost + 1, lost, 276, 246 - lost)
        assert evidence.candidate_value == pytest.approx(247 / 276)
        assert evidence.baseline_value == pytest.approx(246 / 276)
        assert evidence.p_value == 1
        assert decide(evidence, "higher", 0, GATE).word == "tie"


def test_items_that_do_not_differ_leave_a_largest_effect() -> None:
    decision = decide(items(0, 0, 200, 60), "higher", 0, GATE)
    assert decision.word == "tie"
    assert decision.reasons[0] == "no effect shown: no item differs"
    assert "+0.0188" in decision.reasons[1]


def test_a_gain_in_items_is_accepted_without_a_spread() -> None:
    evidence = items(30, 8, 200, 60)
    assert evidence.spreads is None
    assert evidence.detail == "30 gained, 8 lost"
    assert decide(evidence, "higher", 0, GATE).word == "accept"


def test_perplexity_goes_through_the_log_ratio() -> None:
    one, step = np.full(8, np.log(20.0)), np.log(1.1) + np.array([0.01, -0.01] * 4)
    values = float(np.exp(one.mean())), float(np.exp((one + step).mean()))
    evidence = weigh("perplexity", Paired(one, one + step, *values), 0.95)
    # The differences have mean ln 1.1 and margin t(0.975; 7) x 0.01 sqrt(8/7) / sqrt(8) = 2.36462 x 0.0037796.
    margin = 2.36462 * 0.01 / 7**0.5
    assert evidence.effect == pytest.approx(2.0)
    assert evidence.relative == pytest.approx(0.1)
    assert evidence.ci_low == pytest.approx(20 * (1.1 * np.exp(-margin) - 1), abs=1e-5)
    assert evidence.ci_high == pytest.approx(20 * (1.1 * np.exp(margin) - 1), abs=1e-5)


def test_log_probabilities_and_differences_have_no_floor() -> None:
    kinds: tuple[Kind, ...] = ("pairs", "nll")
    for kind in kinds:
        evidence = weigh(kind, Paired(np.array([1.0, 2.0]), np.array([0.1, 0.2]), 1.5, 0.15), 0.95)
        assert floor_of(evidence, "higher", GATE) is None


# --- properties --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["repetitions", "pairs", "nll", "items", "perplexity"])
def test_swapping_the_arms_negates_and_order_does_not_matter(kind: Kind) -> None:
    draw = np.random.default_rng()
    if kind == "items":
        one, other = (draw.integers(0, 2, 60).astype(float) for _ in range(2))
    else:
        one, other = draw.normal(3, 0.2, 9), draw.normal(3.1, 0.2, 9)

    def weighed(a: np.ndarray, b: np.ndarray) -> Evidence:
        values = (float(np.exp(a.mean())), float(np.exp(b.mean()))) if kind == "perplexity" else (a.mean(), b.mean())
        return weigh(kind, Paired(a, b, *values), 0.95)

    there, back = weighed(one, other), weighed(other, one)
    assert back.effect == pytest.approx(-there.effect)
    assert back.p_value == pytest.approx(there.p_value)
    if kind == "perplexity":
        # The interval of the ratio inverts; in perplexity it is taken around another baseline.
        ratios = [1 + end / there.baseline_value for end in (there.ci_low, there.ci_high)]
        inverse = [1 + end / back.baseline_value for end in (back.ci_high, back.ci_low)]
        assert ratios == pytest.approx([1 / r for r in inverse])
    else:
        assert (back.ci_low, back.ci_high) == (pytest.approx(-there.ci_high), pytest.approx(-there.ci_low))
    order = draw.permutation(len(one))
    assert weighed(one[order], other[order]).ci_low == pytest.approx(there.ci_low)
    words = {"accept": "reject", "reject": "accept"}
    gate = GATE.model_copy(update={"floor": 0.0, "max_spread": 9.0})
    word = decide(there, "higher", 0, gate).word
    assert decide(back, "higher", 0, gate).word == words.get(word, word)
    assert decide(back, "lower", 0, gate).word == word


def test_the_unit_of_measure_does_not_matter() -> None:
    draw = np.random.default_rng()
    one = draw.normal(100, 2, 7)
    other = one + draw.normal(4, 2, 7)
    first, second = runs(one, other), runs(one * 1000, other * 1000)
    assert second.relative == pytest.approx(first.relative)
    assert (second.p_value, second.p_family) == (pytest.approx(first.p_value), pytest.approx(first.p_family))
    assert second.spreads == pytest.approx(first.spreads)
    assert decide(second, "higher", 2000, GATE).word == decide(first, "higher", 2, GATE).word


# --- how often it errs -------------------------------------------------------------------------------------------


def rate_of_accepts(effect: float, noise: float, gate: Gate, pairs: int = 6, experiments: int = 4000) -> float:
    """Share of simulated experiments that are accepted: normal noise, relative, in both arms independently."""
    draw = np.random.default_rng(2026)
    one = 100 * (1 + noise * draw.normal(size=(experiments, pairs)))
    other = 100 * (1 + effect) * (1 + noise * draw.normal(size=(experiments, pairs)))
    return float(
        np.mean([decide(runs(a, b), "higher", 0, gate).word == "accept" for a, b in zip(one, other, strict=True)])
    )


def test_without_an_effect_under_5_percent_are_accepted_though_the_spread_gate_is_open() -> None:
    """Six pairs, 5% noise: a gate that lets every spread through accepts one in forty at most."""
    rate = rate_of_accepts(0.0, 0.05, GATE.model_copy(update={"max_spread": 9.0}))
    assert 0.005 < rate < 0.025


def test_power() -> None:
    """The figures of docs/verdicts.md: 10% effect, six pairs, the CPU's gate."""
    assert rate_of_accepts(0.10, 0.02, GATE, experiments=1000) > 0.97
    assert rate_of_accepts(0.10, 0.05, GATE, experiments=1000) < 0.35  # Most are too noisy to be judged.
    assert rate_of_accepts(0.02, 0.02, GATE, experiments=1000) < 0.40


# --- a claim that no more than a margin is lost ------------------------------------------------------------------


def test_a_loss_within_the_margin_is_accepted_beyond_it_rejected_and_between_left_open() -> None:
    """Effects of -1 and -5 with intervals of +-1.1496 around them (`shifted`), and margins on either side."""
    accepted = decide(shifted(-1), "higher", 0, GATE, margin=2.2)
    assert accepted.word == "accept"
    assert "a loss beyond the margin of −2.20 is excluded: the worst still compatible is −2.15" in accepted.reasons[0]
    assert decide(shifted(1), "lower", 0, GATE, margin=2.2).word == "accept"
    rejected = decide(shifted(-4), "higher", 0, GATE, margin=2.0)
    assert (rejected.word, rejected.recommendations) == ("reject", ["keep the baseline"])
    unresolved = decide(shifted(-1), "higher", 0, GATE, margin=1.5)
    assert unresolved.word == "unresolved"
    assert "is open: between −2.15 and +0.150" in unresolved.reasons[0]
    assert "would decide" in unresolved.recommendations[0]
    # A gain needs no test of its own, and a margin of zero asks for "not worse".
    assert decide(shifted(3), "higher", 0, GATE, margin=0.0).word == "accept"


def test_of_items_a_margin_takes_the_place_of_the_floor() -> None:
    """15 of 100 items right where there were 17: under 95% of the baseline, and both losses may be luck."""
    evidence = items(gained=0, lost=2, n=100, both=15)
    assert floor_of(evidence, "higher", GATE) == pytest.approx(0.1615)
    assert decide(evidence, "higher", 0, GATE).word == "reject"
    assert floor_of(evidence, "higher", GATE, 0.08) is None
    assert decide(evidence, "higher", 0, GATE, margin=0.08).word == "accept"
    assert decide(evidence, "higher", 0, GATE, margin=0.05).word == "unresolved"
    assert decide(items(gained=0, lost=17, n=100, both=0), "higher", 0, GATE, margin=0.08).word == "reject"


@pytest.mark.parametrize("n", [10, 24, 34])
def test_how_many_units_that_all_agree_would_decide(n: int) -> None:
    """As many as it says decide, and one fewer does not, by the interval itself."""
    decision = decide(items(gained=0, lost=0, n=n, both=0), "lower", 0, GATE, margin=0.1)
    assert decision.word == "unresolved"
    assert decision.recommendations == [f"about 35 items would decide (there are {n})"]
    assert decide(items(gained=0, lost=0, n=34, both=0), "lower", 0, GATE, margin=0.1).word == "unresolved"
    assert decide(items(gained=0, lost=0, n=35, both=0), "lower", 0, GATE, margin=0.1).word == "accept"


def test_a_claim_that_no_outcome_could_refute_is_no_claim() -> None:
    """Failures at 100% cannot rise by a tenth, and 5 right answers of 100 cannot become 8 fewer."""
    failing = items(gained=0, lost=0, n=40, both=40)
    decision = decide(failing, "lower", 0, GATE, margin=0.1)
    assert decision.word == "unresolved"
    assert decision.reasons == [
        "nothing to lose: the baseline is at 1.00, so whatever the candidate does it cannot lose more than the margin "
        "of +0.100"
    ]
    assert decide(failing, "higher", 0, GATE, margin=0.1).word == "accept"
    assert decide(items(gained=3, lost=0, n=100, both=5), "higher", 0, GATE, margin=0.08).word == "unresolved"
    assert decide(items(gained=3, lost=0, n=100, both=30), "higher", 0, GATE, margin=0.08).word == "accept"
    # A share of a list's rows is one too; a number of tokens is none.
    rows = Paired(np.array([0.0, 0.05, 0.1, 0.0]), np.array([0.0, 0.1, 0.1, 0.0]), 0.0375, 0.05)
    assert decide(weigh("documents", rows, 0.95), "higher", 0, GATE, margin=0.1).word == "unresolved"
    tokens = Paired(np.array([0.0, 0.05, 30.0, 0.0]), np.array([0.0, 0.1, 30.0, 0.0]), 7.5125, 7.525)
    assert decide(weigh("documents", tokens, 0.95), "lower", 0, GATE, margin=9.0).word == "accept"


def test_a_margin_does_not_lift_the_floor_or_the_spread_of_timings() -> None:
    assert decide(shifted(-6), "higher", 0, GATE, margin=50.0).word == "reject"
    wide = [100.0, 112.0, 100.0, 112.0, 100.0, 112.0]
    assert decide(runs(wide, wide), "higher", 0, GATE, margin=50.0).word == "unresolved"
