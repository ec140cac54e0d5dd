"""The tables that `dvc plots` draws: literal rows, and nothing where there is no number."""

import polars as pl

from oneaxis.dvc_plots import (
    accuracy_by_scorer,
    copies_by_kind,
    escape_curves,
    nll_by_sequence,
    over_rate,
    training_curve,
)


def test_training_curve_keeps_absolute_log_probabilities() -> None:
    log = pl.DataFrame({"step": [2, 4], "loss": [0.7, 0.6], "logps/chosen": [-2.0, -3.0],
                        "logps/rejected": [-5.0, -9.0], "probe/hedge_logp": [None, -19.0],
                        "probe/empty_logp": [None, -7.0],
                        "rewards/margins": [0.0, 0.3]})  # fmt: skip
    assert training_curve(log).rows() == [(2, -2.0, -5.0, 0.0), (4, -3.0, -9.0, 0.3)]
    assert escape_curves(log).rows() == [(4, "hedge", -19.0), (4, "empty", -7.0)], "only where they were scored"


def test_nll_by_sequence_is_the_mean_over_its_tokens() -> None:
    before = pl.DataFrame({"sequence": [1, 0, 0], "position": [1, 1, 2], "source": ["a", "a", "b"],
                           "nll": [4.0, 1.0, 2.0]})  # fmt: skip
    after = before.with_columns(pl.col("nll") * 2)
    table = nll_by_sequence(before, after)
    assert table.columns == ["sequence", "nll_before", "nll_after"]
    assert table.rows() == [(0, 1.5, 3.0), (1, 4.0, 8.0)]


def test_copies_by_kind_are_shares_in_the_order_of_the_table() -> None:
    before = pl.DataFrame({"kind": ["json_keys", "json_keys", "base64"], "exact": [True, False, True]})
    after = before.with_columns(exact=pl.lit(False))
    assert copies_by_kind(before, after).rows() == [("json_keys", 0.5, 0.0), ("base64", 1.0, 0.0)]


def test_over_rate_has_a_row_for_each_number_and_none_for_what_was_not_reached() -> None:
    cell = {f"{name}_{percentile}_ms": 10.0 for name in ("ttft", "tpot") for percentile in ("p50", "p90", "p99")}
    cells = pl.DataFrame([
        {"shape": "long", "level_size": 2.0, **cell, "goodput_tok_s": 5.0, "attainment": 0.5},
        {"shape": "long", "level_size": 1.0, **cell, "ttft_p99_ms": None, "goodput_tok_s": 4.0, "attainment": 1.0},
    ])  # fmt: skip
    rows = over_rate(cells).rows()
    assert rows[0] == ("long", 1.0, "TTFT, ms", "p50", 10.0)
    assert len([row for row in rows if row[1] == 2.0]) == 8
    assert [row[3] for row in rows if row[1] == 1.0 and row[2] == "TTFT, ms"] == ["p50", "p90"]
    assert rows[-2:] == [("long", 2.0, "goodput, tok/s", "all", 5.0), ("long", 2.0, "attainment", "all", 0.5)]


def test_accuracy_by_scorer_takes_what_has_a_standard_error() -> None:
    metrics = {"score/piqa/acc": 0.5, "score/piqa/acc_stderr": 0.1, "score/piqa/n": 25.0, "score/items_dropped": 0.0}
    assert accuracy_by_scorer(metrics).rows() == [("piqa acc", 0.5, 0.1)]
    assert accuracy_by_scorer({}).columns == ["scorer", "accuracy", "stderr"]
