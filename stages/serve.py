"""serve: start the engine on the served checkpoint once, and record what it really runs and how it answers.

Reads the served checkpoint. Writes `realised.json` (settings asked and resolved, the checkpoint's own wishes, their
differences), `realised.csv` (the same, a row each) and `smoke.json` (greedy answers). The times of the cold start go to
the provenance. The engine is stopped at the end; later stages start it through the same function. A server that was
attached to is asked the same, has no cold start, and is left running.
"""

import sys

from oneaxis.artifacts import write_json
from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    from oneaxis.draft.engine import speculating
    from oneaxis.serve import realised_config, realised_table, serving, smoke_answers

    settings = speculating(stage.config.serve, stage.config.draft, stage.draft)
    stage.take_engines_device("timing")
    measure = stage.config.measure
    stage.observed.update(session=measure.session, repetition=measure.repetition)
    log_path = stage.root / STATE / "logs" / "serve-engine.log"
    # Its start is what is measured here, imports and all: never a fork of a process that has them behind it.
    observed = stage.observed
    with serving(stage.served, settings, log_path=log_path, observed=observed, cold=True) as engine:
        realised = realised_config(engine, stage.served)
        answers = smoke_answers(engine, stage.served)
    write_json(stage.out / "realised.json", realised)
    realised_table(realised).write_csv(stage.out / "realised.csv")
    write_json(stage.out / "smoke.json", answers)
    stage.notes.update(num_answers=len(answers), num_differences=len(realised["differences"]))

    for difference in realised["differences"]:
        print("oneaxis: serve: not as asked: {key}: asked {asked}, resolved {resolved}: {reason}".format(**difference),
              file=sys.stderr)  # fmt: skip
    for answer in answers:
        if not answer["sane"]:
            print(f"oneaxis: serve: odd answer to {answer['prompt']!r}: {', '.join(answer['problems'])}: "
                  f"{answer['text']!r}", file=sys.stderr)  # fmt: skip
    metrics = {
        "serve/config_differences": float(len(realised["differences"])),
        "serve/smoke_ok": float(all(answer["sane"] for answer in answers)),
    }
    if "cold_start" in observed:
        metrics["serve/cold_start_s"] = observed["cold_start"]["total_s"]
    if tokens := realised["resolved"].get("kv_cache_tokens"):
        metrics["serve/kv_cache_tokens"] = float(tokens)
    return metrics


if __name__ == "__main__":
    run("serve", work)
