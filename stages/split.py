"""split: prefill and decode on two engines against one that does both, or nothing with `split=none`."""

import os
import sys

from oneaxis.artifacts import write_json
from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write the answers of both deployments and the account of the split one; one that moved nothing is INVALID."""
    settings = stage.config.split
    if settings.kind == "none":
        stage.notes["split"] = "none"
        return {"split/requests": 0.0}
    stage.take_device("timing")
    from oneaxis.load.text import served_text
    from oneaxis.split.deployment import prompts_of, run_split
    from oneaxis.split.nixl import check_nixl

    check_nixl(settings.kind)
    measure, serve = stage.config.measure, stage.config.serve
    assert serve.kind == "vllm"  # the schema allows no split of another's engine
    stage.observed.update(session=measure.session, repetition=measure.repetition)
    text = served_text(stage.served, stage.artifact("prepare_data", "heldout.parquet"))
    answers, summary, realised = run_split(
        stage.served, serve, settings, prompts_of(text, settings, seed=stage.config.seed),
        seed=stage.config.seed, cores=len(os.sched_getaffinity(0)), logs=stage.root / STATE / "logs",
        observed=stage.observed,
    )  # fmt: skip
    answers.write_parquet(stage.out / "answers.parquet")
    write_json(stage.out / "summary.json", summary)
    write_json(stage.out / "realised.json", realised)
    for reason in summary["invalid"]:
        print(f"oneaxis: split: INVALID: {reason}", file=sys.stderr)
    return {f"split/{name}": float(value) for name, value in summary.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    run("split", work)
