"""diverge: the same prompts at temperature 0, over and over, alone and many at a time; nothing with `diverge=none`.

Reads the served checkpoint and the held-out text, of which prompts are cut. Writes `outputs.parquet` (a row per
request), `prompts.parquet`, `realised.json` (what the engine ran) and `summary.json`.
"""

import shutil
import sys

from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    settings = stage.config.diverge
    if settings.kind == "none":
        stage.notes["diverge"] = "none"
        return {"diverge/prompts": 0.0}
    from oneaxis.draft.engine import speculating

    config, draft, measure = stage.config, stage.config.draft, stage.config.measure
    serve = speculating(config.serve, draft, stage.draft)
    stage.take_engines_device("compute")
    from oneaxis.diverge.measure import flat_metrics
    from oneaxis.diverge.run import check_length, cut_prompts, parts_folder, run_divergence, write_record
    from oneaxis.load.text import served_text
    from oneaxis.serve import serving

    check_length(settings, serve.max_model_len)
    text = served_text(stage.served, stage.artifact("prepare_data", "heldout.parquet"))
    prompts = cut_prompts(text, settings, seed=config.seed)
    checkpoints = [stage.served, *([stage.draft] if draft.kind == "layers" else [])]
    drawn = {"seed": config.seed, "session": measure.session, "repetition": measure.repetition}
    folder = parts_folder(stage.root / STATE / "diverge", checkpoints, prompts, settings, serve, drawn=drawn)
    log_path, observed = stage.root / STATE / "logs" / "diverge-engine.log", stage.observed
    table, realised, emptied = run_divergence(
        prompts, settings, stage.served, seed=config.seed, folder=folder, observed=observed,
        engine=lambda: serving(stage.served, serve, log_path=log_path, observed=observed),
    )  # fmt: skip
    summary = write_record(stage.out, table, prompts, realised, serve, emptied=emptied)
    if folder:
        shutil.rmtree(folder)
    for reason in summary["invalid"]:
        print(f"oneaxis: diverge: INVALID: {reason}", file=sys.stderr)
    return {f"diverge/{name}": value for name, value in flat_metrics(summary).items()}


if __name__ == "__main__":
    run("diverge", work)
