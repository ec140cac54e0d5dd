"""sweep: open-loop load on the served checkpoint, every shape at every rate, and whether the numbers can be trusted.

Reads the served checkpoint and the held-out text (prompts are cut from it). Writes `arrivals.parquet` (the plan, with
every prompt), `requests.parquet`, `server_samples.parquet`, `cells.parquet`, `summary.json` and `guards.json`. A sweep
whose guards fail is written all the same, and says INVALID.
"""

import sys

from oneaxis.artifacts import write_json
from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    from oneaxis.serve import num_gpus, realised_config, running_engine

    lease = stage.take_device("timing", gpus=num_gpus(stage.config.serve))
    import polars as pl
    from transformers import AutoTokenizer

    from oneaxis.dvc_plots import over_rate
    from oneaxis.load.plan import check_fits, draw_plan, text_tokens
    from oneaxis.load.summary import flat_metrics, judge, report_lines, summarise, summary_document
    from oneaxis.load.sweep import run_sweep

    config, measure = stage.config, stage.config.measure
    check_fits(config.load, config.serve.max_model_len)
    texts = pl.read_parquet(stage.artifact("prepare_data", "heldout.parquet"))["text"]
    tokenizer = AutoTokenizer.from_pretrained(stage.served)
    text = text_tokens(texts, lambda t: tokenizer.encode(t, add_special_tokens=False), set(tokenizer.all_special_ids))
    plan = draw_plan(config.load, text, seed=config.seed, session=measure.session, repetition=measure.repetition)

    log_path = stage.root / STATE / "logs" / "sweep-engine.log"
    with running_engine(stage.served, config.serve, log_path=log_path, observed=stage.observed) as engine:
        differences = realised_config(engine, stage.served)["differences"]
        sweep = run_sweep(
            engine, plan, duration_s=config.load.duration_s, timeout_s=config.load.request_timeout_s
        )  # fmt: skip

    cells = summarise(sweep, config.load)
    verdicts = judge(plan, sweep, cells, differences, config.guards, lease=lease.as_json())
    document = summary_document(cells, verdicts, sweep, config.load)
    plan.arrivals.write_parquet(stage.out / "arrivals.parquet")
    sweep.requests.write_parquet(stage.out / "requests.parquet")
    sweep.samples.write_parquet(stage.out / "server_samples.parquet")
    cells.write_parquet(stage.out / "cells.parquet")
    over_rate(cells).write_csv(stage.out / "over_rate.csv")
    write_json(stage.out / "summary.json", document)
    write_json(stage.out / "guards.json", [guard.as_json() for guard in verdicts])
    stage.notes.update(num_requests=plan.arrivals.height, num_warmup_requests=plan.warmups.height)
    stage.observed.update(session=measure.session, repetition=measure.repetition, cells=sweep.conditions)
    for line in report_lines(document, verdicts):
        print(f"oneaxis: sweep: {line}", file=sys.stderr)
    return flat_metrics(cells, verdicts)


if __name__ == "__main__":
    run("sweep", work)
