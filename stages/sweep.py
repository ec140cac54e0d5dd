"""sweep: load on the served checkpoint, every shape at every level, and whether the numbers can be trusted.

Reads the served checkpoint, the held-out text (prompts are cut from it) and a trace. Writes `arrivals.parquet` (the
plan), `draws.parquet` (guard 8's probe), `requests.parquet`, `server_samples.parquet`, `server_histograms.parquet`,
`cells.parquet`, `summary.json` and `guards.json`. A sweep whose guards fail is written all the same, and says INVALID.
"""

import sys
from typing import Any

from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    from oneaxis.draft.engine import speculating
    from oneaxis.serve import realised_config, serving

    settings = speculating(stage.config.serve, stage.config.draft, stage.draft)
    lease = stage.take_engines_device("timing")
    from oneaxis.load.capacity import run_load
    from oneaxis.load.draws import PROMPT_TOKENS, draw_answers, redraw
    from oneaxis.load.plan import check_fits, draw_plan
    from oneaxis.load.record import write_record
    from oneaxis.load.steps import step_fits, step_metrics
    from oneaxis.load.summary import cache_block_tokens, flat_metrics, judge, report_lines, summarise, summary_document
    from oneaxis.load.text import served_text
    from oneaxis.load.trace import read_trace
    from oneaxis.tenants import gpu_processes, other_work

    config, measure, load = stage.config, stage.config.measure, stage.config.load
    trace = read_trace(load.trace, stage.root) if load.trace else None
    check_fits(load, config.serve.max_model_len, trace)
    text = served_text(stage.served, stage.artifact("prepare_data", "heldout.parquet"))
    drawn: Any = {"seed": config.seed, "session": measure.session, "repetition": measure.repetition}
    plan = draw_plan(load, text, trace=trace, **drawn)
    on_gpu = gpu_processes()
    log_path = stage.root / STATE / "logs" / "sweep-engine.log"
    with serving(stage.served, settings, log_path=log_path, observed=stage.observed) as engine:
        realised = realised_config(engine, stage.served)
        draws = draw_answers(engine, text[:PROMPT_TOKENS].tolist(), seed=config.seed)
        with other_work(engine.processes()) as others:
            plan, sweep, found = run_load(engine, plan, load, text, most_users=config.serve.max_num_seqs, **drawn)
    cells = summarise(sweep, load)
    tenants = others | {"gpu_processes": on_gpu}
    verdicts = judge(plan, sweep, cells, realised["differences"], config.guards, load=load, lease=lease.as_json(),
                     tenants=tenants, draws=draws, cache_block_tokens=cache_block_tokens(realised),
                     redraw=redraw(realised))  # fmt: skip
    steps = {} if load.think_time_s else step_fits(cells, settings.max_num_seqs)
    document = summary_document(cells, verdicts, sweep, load, found) | {"steps": steps}
    write_record(stage.out, plan, sweep, draws, cells, document, verdicts)
    stage.notes.update(num_requests=plan.arrivals.height, num_warmup_requests=plan.warmups.height)
    stage.observed.update(cells=sweep.conditions, tenants=tenants, **measure.model_dump())
    for line in report_lines(document, verdicts):
        print(f"oneaxis: sweep: {line}", file=sys.stderr)
    return flat_metrics(cells, verdicts, found, load) | step_metrics(steps)


if __name__ == "__main__":
    run("sweep", work)
