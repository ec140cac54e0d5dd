"""Which metrics a run will have, from its settings: a claim on any other is refused before the run.

Two names in a claim stand for a cell of the sweep whatever its levels are, so that a claim survives `profile=tiny`:
`sweep/<shape>/rmax/...` is the highest level of the load, `sweep/<shape>/rmin/...` the lowest.
"""

import re

from oneaxis.config import Config
from oneaxis.config.schema import Load, Score
from oneaxis.diverge.measure import metric_names as diverge_names
from oneaxis.load.levels import at_one_rate, level_size, levels, shape_names
from oneaxis.load.steps import MIN_LEVELS, STEP_METRICS
from oneaxis.load.summary import CAPACITY_METRICS, CELL_METRICS
from oneaxis.sample.rules import KINDS
from oneaxis.score.contexts import premises_of
from oneaxis.score.metrics import CLOZE, LETTER
from oneaxis.structured.measures import conditions_of, measure_names

TABLES = ("calibration", "heldout", "pairs", "items", "prompts", "probes")
SOURCES = ("prose", "pairs", "items", "prompts", "probes")
CALIBRATE = ("perplexity", "nll", "outlier_ratio_max", "tensors_above_ratio_10", "absmax_max",
             "channels_exceeded_share", "clip_rate", "beyond_channel_rate", "tokens", "heldout_tokens")  # fmt: skip
CALIBRATE_COPIES = ("copy_exact", "copy_exact_weak", "copy_nll", "copy_nll_weak", "copy_tasks", "copy_discriminates")
QUALITY = ("perplexity_ratio", "checkpoint_bytes", *(f"{name}{end}" for name in ("delta_nll", "kl", "top1_agreement")
                                                     for end in ("", "_ci_low", "_ci_high")))  # fmt: skip
QUALITY_COPIES = tuple(f"{name}{end}" for name in ("copy_exact_delta", "copy_nll_delta")
                       for end in ("", "_ci_low", "_ci_high"))  # fmt: skip
SAMPLED = ("prompts", "prompts_all_pass", "prompts_all_fail", "prompts_without_pair", "responses", "pass_rate",
           "pass_rate_ci_low", "pass_rate_ci_high", "duplicate_share", "cut_share", "tokens", "pairs",
           "pairs_per_prompt")  # fmt: skip
QUANTIZE = ("fold_error_max", "weight_error_max", "output_error_max", "num_quantized_linears")

SPLIT = ("requests", "prompt_tokens", "transferred_tokens", "transferred_share", "transferred_bytes", "bytes_per_token",
         "transfer_ms", "answers_equal", "prefill_ms", "first_token_ms", "decode_ms", "client_ms", "server_ms",
         "tpot_ms", "rate_rps", "decode_slots", "decode_slots_seen", "slots_share")  # fmt: skip


def cell_metric(metric: str, load: Load) -> str:
    """`metric` with `rmax` and `rmin` replaced by the level that they stand for in this load."""
    named = re.fullmatch(r"(sweep/[^/]+/)(rmax|rmin)(/.+)", metric)
    if not named:
        return metric
    pick = max if named[2] == "rmax" else min
    return named[1] + pick(levels(load), key=level_size) + named[3]


def metric_names(config: Config, stage: str) -> set[str]:
    """The metrics that `stage` gives with these settings; some may be left out where they are undefined."""
    return {f"{stage}/{name}" for name in _names(config, stage)}


def _names(config: Config, stage: str) -> set[str]:
    match stage:
        case "fetch_model":
            return {"num_parameters", "bytes"}
        case "prepare_data":
            return {f"{table}_rows" for table in TABLES} | {f"{source}_dropped" for source in SOURCES}
        case "sample_pairs" if config.sample.kind == "none":
            return {"pairs"}
        case "sample_pairs":
            return {"train_pairs", "heldout_pairs"} | {f"{prefix}{name}" for name in SAMPLED
                                                       for prefix in ("", *(f"{kind}/" for kind in KINDS))}  # fmt: skip
        case "filter_pairs":
            cutoff = {f"{config.pairs.score}_cutoff"} if config.pairs.control_seed is None else set()
            return {"pairs", "train_pairs", "kept", "dropped", "unusable", "ln_ches_median", "ches_median",
                    "edit_similarity_kept", "edit_similarity_dropped", "edit_overlap", "embedding_overlap",
                    "ches_edit_correlation", "ches_length_correlation"} | cutoff  # fmt: skip
        case "train_dpo" if config.train.kind == "none":
            return {"steps"}
        case "train_dpo":
            assert config.train.kind == "dpo"
            times = ("before", "after", "after_float32", *(("source",) if config.train.sft.epochs else ()))
            escapes = [f"escape_{name}" for name in config.train.probes.texts]
            shares = ["refusal_rate", "empty_rate"] if config.train.probes.answers else []
            logps = {f"{side}_logp_{when}" for side in ("chosen", "rejected", *escapes) for when in times}
            logps |= {f"{share}_{when}" for share in shares for when in ("before", "after")}
            deltas = {f"{side}_delta{end}" for side in ("chosen", "rejected", "margin", *escapes, *shares)
                      for end in ("", "_ci_low", "_ci_high")}  # fmt: skip
            return {"steps", "stopped_early"} | logps | deltas
        case "calibrate":
            return set(CALIBRATE) | (set(CALIBRATE_COPIES) if config.calibrate.copying.sequences else set())
        case "quantize":
            sides, copies = ("before", "after"), config.calibrate.copying.sequences > 0
            names = {f"{name}_{side}" for name in ("perplexity", *(["copy_exact"] if copies else [])) for side in sides}
            if config.quantize.kind == "none" and config.quantize.kv == "none":
                return names
            names |= set(QUALITY) | (set(QUALITY_COPIES) if copies else set())
            return names if config.quantize.kind == "none" else names | set(QUANTIZE)
        case "make_draft" if config.draft.kind != "layers":
            return {"num_parameters"}
        case "make_draft":
            return {"num_parameters", "parameter_share", "kl_before", "kl_after", "agreement_before", "agreement_after"}
        case "serve":
            return {"cold_start_s", "config_differences", "smoke_ok", "kv_cache_tokens"}
        case "split" if config.split.kind == "none":
            return {"requests"}
        case "split":
            return set(SPLIT)
        case "diverge" if config.diverge.kind == "none":
            return {"prompts"}
        case "diverge":
            return diverge_names()
        case "sweep":
            shapes = shape_names(config.load)
            guesses = 0 if config.draft.kind == "none" else config.draft.num_tokens
            accepted = [f"accepted_at_{position + 1}" for position in range(guesses)]
            cells = {f"{shape}/{level}/{name}" for shape in shapes for level in levels(config.load)
                     for name in (*CELL_METRICS, *accepted)}  # fmt: skip
            shown = shapes if any(map(at_one_rate, levels(config.load))) else []
            ends = ("", "_ci_low", "_ci_high")
            fitted = {f"{shape}/{name}{end}" for shape in shapes for name in step_names(config) for end in ends}
            whole = {"valid", "requests", "failed", "prefix_hit_rate"} | fitted
            return whole | cells | {f"{shape}/{name}" for shape in shown for name in CAPACITY_METRICS}
        case "score":
            tasks = config.data.items.tasks
            return {f"{task}/{name}" for task in tasks for name in score_names(config.score, task)} | {
                "items_dropped", "boundary_backed_off", "truncated", "batch_difference_nats"}  # fmt: skip
        case "extract" if config.extract.kind == "none":
            return {"answers"}
        case "extract":
            assert config.extract.kind == "documents"
            parts = conditions_of(config.extract)
            return {"answers"} | {f"{part}/{name}" for part in parts for name in ("n", *measure_names(part))}
        case _:
            return {"valid", "reasons", "warnings", "stages_missing"}


def step_names(config: Config) -> tuple[str, ...]:
    """What is said of a step, where enough numbers of users do not queue."""
    closed = config.load.arrival == "closed" and not config.load.think_time_s
    together = [users for users in config.load.users if users <= config.serve.max_num_seqs]
    return STEP_METRICS if closed and len(together) >= MIN_LEVELS else ()


def score_names(settings: Score, task: str) -> set[str]:
    """The metrics of one task in stage `score`."""
    scorers, others = set(CLOZE), {"n"}
    if settings.controls.items_per_task:
        others.add("pmi_n")
        if len(premises_of(task, settings.premises)) > 1:
            others |= {"pmi_dc_spread", "pmi_dc_moved_share"}
    else:
        scorers.remove("pmi")
    if settings.letter.items_per_task:
        letters = set(LETTER) if settings.letter.content_free else set(LETTER) - {"letter_calibrated"}
        scorers |= letters
        others |= {"letter_n", "pride_n", "letter_moved_share"} | {f"{name}_rstd" for name in letters}
    return {f"{name}{end}" for name in scorers for end in ("", "_stderr")} | others
