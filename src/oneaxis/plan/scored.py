"""A finished run as a row of the table that `shift` ranks: from our own scores, timings and records."""

from oneaxis.errors import UserError
from oneaxis.names import model_name
from oneaxis.plan.compare import Run
from oneaxis.plan.shift import Candidate


def candidate_of_run(run: Run, honesty: float | None) -> Candidate:
    """I: 100 x the mean accuracy (acc_bytes) over its tasks. F: tokens/s of its fastest stream. T: the engine's memory.

    Args:
        honesty: 0 to 100; no stage scores it. None: the row has no SHIFT.

    Raises:
        UserError: the run has no sweep, or its record says nothing of memory.
    """
    metrics = run.results.metrics
    accuracies = [value for name, value in metrics.items() if name.startswith("score/") and name.endswith("/acc_bytes")]
    tpots = [value for name, value in metrics.items() if name.startswith("sweep/") and name.endswith("/tpot_p50_ms")]
    peak = run.results.provenance.get("sweep", {}).get("peak_rss_mib")
    if not tpots or not peak:
        raise UserError(f"{run.results.folder}: holds no TPOT or no peak memory of a sweep; allowed: a run whose sweep "
                        "is done")  # fmt: skip
    model = run.model
    return Candidate(
        model=f"{model_name(run.results.section('model'))} ({model.storage.kind})",
        H=honesty,
        I=100 * sum(accuracies) / len(accuracies) if accuracies else None,
        F=1000 / min(tpots),
        S=model.num_active() / 1e9,
        T=peak * 2**20 / 1e9,
        params_b=model.num_parameters / 1e9,
        bits=8 * model.weight_bytes() / model.num_parameters,
    )
