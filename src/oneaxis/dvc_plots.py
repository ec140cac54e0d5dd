"""From the tables of a stage to the small CSV files that `dvc plots` draws (it reads no parquet).

Each stage writes its own into its payload; `dvc.yaml` says how they are drawn. A number that does not exist has no
row: Vega would draw an empty cell as zero.
"""

from collections.abc import Mapping

import polars as pl

PERCENTILES = ("p50", "p90", "p99")


def training_curve(log: pl.DataFrame) -> pl.DataFrame:
    """`train_log.parquet` as step, chosen_logp, rejected_logp, margin: nats, absolute."""
    return log.select(
        "step",
        pl.col("logps/chosen").alias("chosen_logp"),
        pl.col("logps/rejected").alias("rejected_logp"),
        pl.col("rewards/margins").alias("margin"),
    )


def escape_curves(log: pl.DataFrame) -> pl.DataFrame:
    """`train_log.parquet` as step, escape, logp: nats, mean over the watched prompts; steps without one left out."""
    names = [column for column in log.columns if column.startswith("probe/")]
    long = log.unpivot(names, index="step", variable_name="escape", value_name="logp").drop_nulls("logp")
    return long.with_columns(pl.col("escape").str.strip_prefix("probe/").str.strip_suffix("_logp"))


def nll_by_sequence(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Two tables of `heldout_nll.parquet` as sequence, nll_before, nll_after: means over tokens, nats."""
    means = [
        table.group_by("sequence").agg(pl.col("nll").mean().round(6).alias(f"nll_{side}"))
        for table, side in ((before, "before"), (after, "after"))
    ]
    return means[0].join(means[1], on="sequence", validate="1:1").sort("sequence")


def copies_by_kind(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Two tables of `copy.parquet` as kind, exact_before, exact_after: shares of the strings, in the suite's order."""
    shares = [
        table.group_by("kind", maintain_order=True).agg(pl.col("exact").mean().round(6).alias(f"exact_{side}"))
        for table, side in ((before, "before"), (after, "after"))
    ]
    return shares[0].join(shares[1], on="kind", validate="1:1", maintain_order="left")


def over_rate(cells: pl.DataFrame) -> pl.DataFrame:
    """A sweep's cells as shape, load (requests a second), panel, line, value: latencies, goodput and attainment."""
    rows = []
    for cell in cells.sort("shape", "level_size").iter_rows(named=True):
        at = {"shape": cell["shape"], "load": cell["level_size"]}
        drawn = [
            (f"{latency.upper()}, ms", percentile, cell[f"{latency}_{percentile}_ms"])
            for latency in ("ttft", "tpot")
            for percentile in PERCENTILES
        ]
        drawn += [("goodput, tok/s", "all", cell["goodput_tok_s"]), ("attainment", "all", cell["attainment"])]
        rows += [{**at, "panel": panel, "line": line, "value": float(value)} for panel, line, value in drawn
                 if value is not None]  # fmt: skip
    return pl.DataFrame(rows)


def accuracy_by_scorer(metrics: Mapping[str, float]) -> pl.DataFrame:
    """`score/<task>/<scorer>` as scorer (`<task> <scorer>`), accuracy, stderr: what has a standard error."""
    rows = [
        {"scorer": " ".join(name.split("/")[1:]), "accuracy": value, "stderr": metrics[f"{name}_stderr"]}
        for name, value in sorted(metrics.items())
        if f"{name}_stderr" in metrics
    ]
    return pl.DataFrame(rows, schema={"scorer": pl.String, "accuracy": pl.Float64, "stderr": pl.Float64})
