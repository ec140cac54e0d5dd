"""The closed forms against the check numbers of the methods they come from, and against simulation.

Oracles: published figures, arithmetic by hand in a comment, and Monte Carlo with numpy. Nothing is faked.
"""

import numpy as np
import pytest

from oneaxis.errors import UserError
from oneaxis.plan import serving, speculation
from oneaxis.plan.cost import cost_per_million
from oneaxis.plan.hardware import read_device
from oneaxis.plan.shift import Candidate, rank


def near(value: float, digits: float) -> object:
    """As many digits as were given: `near(2.31, 0.005)`."""
    return pytest.approx(value, abs=digits)


@pytest.mark.parametrize(
    ("device", "scheme", "tokens"),
    [
        ("h100_sxm", "bf16", 296),
        ("h100_sxm", "w8a16_fp8", 148),
        ("h100_sxm", "w8a8_fp8", 295),
        ("h100_sxm", "w4a16", 74),
        ("a100_80g", "bf16", 153),
        ("a100_80g", "w4a16", 38),
    ],
)
def test_the_roofline_crosses_where_it_should(root, device, scheme, tokens):
    told, (size, arithmetic) = read_device(root, device), serving.SCHEMES[scheme]
    found = serving.crossover_tokens(told.peak(arithmetic), told.bandwidth_bytes_s, size)
    assert found == near(tokens, 0.6)
    # At the crossover both roofs meet: bandwidth's and arithmetic's.
    assert serving.attainable_flops(found * 0.999, told.peak(arithmetic), told.bandwidth_bytes_s, size) < told.peak(
        arithmetic
    )
    assert serving.attainable_flops(found * 1.001, told.peak(arithmetic), told.bandwidth_bytes_s, size) == told.peak(
        arithmetic
    )


def test_the_ridge_of_an_h100(root):
    told = read_device(root, "h100_sxm")
    assert serving.ridge(told.peak("bf16"), told.bandwidth_bytes_s) == near(295.5, 0.05)


@pytest.mark.parametrize(
    ("device", "ms", "tok_s"), [("h100_pcie", 4.1, 240), ("h100_sxm", 2.4, 410), ("h200", 1.7, 585)]
)
def test_one_read_of_the_weights(root, device, ms, tok_s):
    took = serving.step_s(8.2e9, 0, 1, read_device(root, device).bandwidth_bytes_s)
    assert 1e3 * took == near(ms, 0.06)
    assert 1 / took == near(tok_s, 4)


def test_a_batch_shares_the_read_and_tends_to_the_cache_s_limit():
    # W 8 GB, K 0.25 GB, B 2 TB/s, t0 1 ms: b = 4 -> 1 + (8 + 1)/2 = 5.5 ms.
    assert serving.step_s(8e9, 0.25e9, 4, 2e12, 1e-3) == pytest.approx(5.5e-3)
    fleet = [b / serving.step_s(8e9, 0.25e9, b, 2e12, 1e-3) for b in (1, 10, 1000, 10**6)]
    assert fleet == sorted(fleet)
    assert fleet[-1] == pytest.approx(2e12 / 0.25e9, rel=1e-3)


def test_prefix_hits_behind_a_round_robin_router():
    assert serving.round_robin_hit_rate(0.5, 4) == 0.625
    # Simulated: a conversation's turn lands on a random worker of n; its own part hits where it was last.
    rng, n, shared = np.random.default_rng(0), 5, 0.3
    workers = rng.integers(n, size=(2000, 40))
    hits = shared + (1 - shared) * (workers[:, 1:] == workers[:, :-1])
    assert serving.round_robin_hit_rate(shared, n) == pytest.approx(hits.mean(), abs=0.01)


def test_transfer_against_prefill():
    kv, flops = 320 * 1024, 400e12
    assert kv * 8192 == near(2.68e9, 0.005e9)
    assert 1e3 * serving.dense_prefill_s(70e9, 8192, 4, flops) == near(717, 0.5)
    for link, ms, share in ((12.5e9, 215, 0.30), (25e9, 107, 0.15), (50e9, 54, 0.07)):
        assert 1e3 * serving.transfer_s(kv, 8192, link) == near(ms, 0.5)
        assert serving.transfer_ratio(kv, link, 70e9, 4, flops) == near(share, 0.006)
    # Qwen3-32B over eight links.
    assert 1e3 * serving.transfer_s(256 * 1024, 16_000, 8 * 50e9) == near(10.5, 0.05)


def test_decode_slots_and_loop_time():
    assert serving.decode_slots(8, 128, 10.4e-3) == near(10.6, 0.06)
    assert serving.decode_slots(8, 128, 7.0e-3) == near(7.2, 0.05)
    assert serving.loop_share(8, 14.7e-3) == near(0.12, 0.005)


def test_distinct_experts():
    assert serving.distinct_experts(128, 8, 32) == near(111.8, 0.05)
    assert serving.distinct_experts(8, 2, 1) == pytest.approx(2)
    rng = np.random.default_rng(1)
    drawn = [len({expert for _ in range(6) for expert in rng.choice(16, size=3, replace=False)}) for _ in range(4000)]
    assert serving.distinct_experts(16, 3, 6) == pytest.approx(np.mean(drawn), abs=0.1)


def test_tokens_of_a_verification():
    assert speculation.uniform_tokens(0.8, 4) == near(3.36, 0.005)
    assert speculation.speed_up(speculation.uniform_tokens(0.8, 4), 4, 0.1) == near(2.40, 0.005)
    assert speculation.uniform_tokens(0.75, 2) == near(2.31, 0.005)
    falling = [0.80, 0.72, 0.66, 0.60, 0.55]
    for k, tokens, speed in ((2, 2.376, 1.98), (3, 2.756, 2.12), (4, 2.984, 2.13), (5, 3.110, 2.07)):
        found = speculation.tokens_per_verification(falling[:k])
        assert found == near(tokens, 0.0006)
        assert speculation.speed_up(found, k, 0.1) == near(speed, 0.005)


def test_tokens_of_a_verification_simulated():
    rng, chances = np.random.default_rng(2), rng_shares(5)
    accepted = rng.random((200_000, 5)) < chances
    kept = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
    assert speculation.tokens_per_verification(list(chances)) == pytest.approx(kept.mean(), abs=0.02)
    for a, k in zip(rng.random(20), rng.integers(1, 12, 20), strict=True):
        assert speculation.uniform_tokens(a, int(k)) == pytest.approx(
            speculation.tokens_per_verification([a] * int(k)), rel=1e-12
        )
    assert speculation.uniform_tokens(1.0, 4) == 5


def rng_shares(n: int) -> np.ndarray:
    """Random acceptances."""
    return np.random.default_rng(3).random(n)


def test_tokens_in_flight_pass_the_crossover(root):
    told = read_device(root, "h100_sxm")
    crossover = serving.crossover_tokens(told.peak("bf16"), told.bandwidth_bytes_s, 2)
    assert speculation.tokens_in_flight(8, 4) == 40 < crossover
    assert speculation.tokens_in_flight(64, 4) == 320 > crossover


def test_acceptance_is_what_rejection_sampling_accepts():
    rng = np.random.default_rng(4)
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
    drafts = rng.choice(7, size=200_000, p=q)
    accepted = rng.random(200_000) < np.minimum(1, p[drafts] / q[drafts])
    assert speculation.acceptance_of(list(p), list(q)) == pytest.approx(accepted.mean(), abs=0.005)
    assert speculation.acceptance_of([0.5, 0.5], [1.0, 0.0]) == 0.5


def test_copies_of_recurrent_state():
    assert speculation.copy_rule(0.6, 4) == near(0.92, 0.005)
    assert speculation.copy_rule(0.8, 4) == near(1.34, 0.005)
    assert speculation.state_bytes(1, 128, 64, 128, 4) == 4 * 2**20
    assert speculation.state_bytes(40, 128, 64, 128, 4) == 160 * 2**20


def test_the_copy_rule_is_what_the_bytes_say_at_a_large_batch():
    """Where weights no longer count, speculation with copies moves fewer bytes a token exactly when the rule is met."""
    for accept in (0.6, 0.8):
        kept = speculation.uniform_tokens(accept, 4)
        plain, spec, replay, both = (
            speculation.hybrid_bytes_per_token(
                setup, weights=1.0, state=1e6, log=1e3, batch=10**6, tokens_kept=kept, drafts=4, window=16
            )
            for setup in speculation.SETUPS
        )
        assert plain / spec == pytest.approx(speculation.copy_rule(accept, 4), rel=1e-6)
        assert both < replay < plain


def test_cost_of_a_million_tokens():
    assert cost_per_million(2.5, 650, 0.60, 1.15) == near(2.05, 0.005)


def test_shift_pir_and_wcs():
    # SHIFT 0.4 x 90 + 0.6 x 70 = 78; PIR 70 x 90 x 50 / (4 x 3) = 26,250 and 60 x 80 x 100 / (2 x 1.5) = 160,000.
    first, best = rank(
        [Candidate(model="a", H=90, I=70, F=50, S=4, T=3), Candidate(model="b", H=80, I=60, F=100, S=2, T=1.5)]
    )
    assert first.shift == pytest.approx(78)
    assert first.pir == pytest.approx(26_250)
    assert best.pir == pytest.approx(160_000)
    assert best.pir_norm == pytest.approx(100)
    # 100 x log10(26250) / log10(160000) = 100 x 4.41913 / 5.20412 = 84.916; sqrt(78 x 84.916) = 81.385.
    assert first.pir_norm == near(84.916, 0.001)
    assert first.wcs == near(81.385, 0.001)


def test_what_has_no_wcs_says_why():
    rows = [
        # The article's champion: 21 billion parameters in 1.5 GB. 4-bit weights alone are 10.5 GB.
        Candidate(model="impossible", H=100, I=60, F=100, S=3.6, T=1.5, params_b=21),
        Candidate(model="below one", H=1, I=1, F=0.1, S=1, T=1),
        Candidate(model="dishonest", H=0, I=80, F=100, S=1, T=1),
        Candidate(model="unscored", I=80, F=100, S=1, T=1),
        Candidate(model="fine", H=50, I=50, F=10, S=1, T=1),
    ]
    ranked = {one.model: one for one in rank(rows)}
    assert [name for name, one in ranked.items() if one.wcs is not None] == ["fine"]
    assert ranked["fine"].pir_norm == 100, "what cannot be sets no maximum"
    assert "10.5 GB of 1.5" in ranked["impossible"].why
    assert ranked["below one"].why == "PIR below 1"
    assert ranked["unscored"].why == "H is not scored"
    low = rank([Candidate(model="low", H=1, I=1, F=1, S=1, T=1)])[0]
    assert (low.pir, low.wcs, low.why) == (1, None, "no PIR above 1 in the table")


@pytest.mark.parametrize(
    "broken",
    [
        lambda: serving.crossover_tokens(0, 1e12, 2),
        lambda: serving.step_s(8e9, -1, 1, 2e12),
        lambda: serving.step_s(8e9, 0, 0, 2e12),
        lambda: serving.step_s(8e9, 0, 1, float("nan")),
        lambda: serving.round_robin_hit_rate(1.5, 4),
        lambda: serving.distinct_experts(8, 9, 1),
        lambda: serving.cache_tokens(-1, 1, 16),
        lambda: speculation.tokens_per_verification([0.5, -0.1]),
        lambda: speculation.speed_up(3, 2, -1),
        lambda: speculation.acceptance_of([0.5], [0.5, 0.5]),
        lambda: cost_per_million(2.5, 650, 1.2, 1),
        lambda: cost_per_million(0, 650, 1, 1),
    ],
)
def test_what_has_no_meaning_is_refused(broken):
    with pytest.raises(UserError, match="allowed"):
        broken()
