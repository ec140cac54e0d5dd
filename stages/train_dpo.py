"""train_dpo: DPO on the kept pairs, or nothing with `train=none`; the policy and whether it was displaced."""

from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write the policy with its log and verdict; with `train=none` the manifest only points to the fetched model."""
    config = stage.config.train
    if config.kind == "none":
        stage.notes["policy"] = stage.paths["policy"]
        return {"train_dpo/steps": 0.0}

    stage.take_device("compute", gpus=config.processes)
    import polars as pl

    from oneaxis.dvc_plots import escape_curves, training_curve
    from oneaxis.live import live_logger
    from oneaxis.preference.dpo import train_dpo

    live = live_logger(stage.root)
    try:
        metrics, notes = train_dpo(
            stage.artifact("fetch_model", "checkpoint"),
            pl.read_parquet(stage.artifact("filter_pairs", "pairs.parquet")),
            pl.read_parquet(stage.artifact("prepare_data", "probes.parquet")),
            config,
            seed=stage.config.seed,
            out=stage.out,
            scratch=stage.root / STATE / "scratch" / "train_dpo",
            on_log=live,
            observed=stage.observed,
        )
    finally:
        live.close()
    log = pl.read_parquet(stage.out / "train_log.parquet")
    training_curve(log).write_csv(stage.out / "curve.csv")
    escape_curves(log).write_csv(stage.out / "escapes.csv")
    stage.notes.update(notes)
    return {f"train_dpo/{name}": value for name, value in metrics.items()}


if __name__ == "__main__":
    run("train_dpo", work)
