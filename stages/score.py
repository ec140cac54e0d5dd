"""score: the served checkpoint on multiple-choice items; one log-probability table, and every scorer read from it."""

import shutil

from oneaxis.artifacts import write_json
from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write table.parquet, items_scored.parquet and summary.json."""
    if stage.config.score.engine == "vllm":
        stage.take_engines_device("compute")
    else:
        stage.take_device("compute")
    from oneaxis.dvc_plots import accuracy_by_scorer
    from oneaxis.score.scoring import read_items, score_checkpoint

    items = read_items(stage.artifact("prepare_data", "items.parquet"))
    scored = score_checkpoint(
        stage.served,
        items,
        stage.config.score,
        stage.config.serve,
        stage.config.seed,
        log=stage.root / ".oneaxis" / "score-engine.log",
        observed=stage.observed,
        parts=stage.root / ".oneaxis" / "score",
    )
    scored.table.write_parquet(stage.out / "table.parquet")
    scored.items.write_parquet(stage.out / "items_scored.parquet")
    accuracy_by_scorer(scored.metrics).write_csv(stage.out / "accuracy.csv")
    write_json(stage.out / "summary.json", scored.summary)
    if scored.parts:
        shutil.rmtree(scored.parts)
    stage.notes.update(items=len(items), dropped=scored.dropped, engine=stage.config.score.engine)
    return scored.metrics


if __name__ == "__main__":
    run("score", work)
