"""prepare_data: text, preference pairs, items, prompts and probes, from the sources in `data.*` to parquet."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write every table; the manifest says what was read, dropped and taken, and under which licence."""
    from oneaxis.prepare import prepare

    metrics, stage.notes["tables"] = prepare(stage.config.data, seed=stage.config.seed, root=stage.root, out=stage.out)
    return metrics


if __name__ == "__main__":
    run("prepare_data", work)
