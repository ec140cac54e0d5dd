"""What a sweep says: from the recorded tables to a row per cell, the guards, `summary.json` and flat metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from oneaxis.config.schema import Guards, Load
from oneaxis.judge import guards
from oneaxis.judge.stalls import stalls
from oneaxis.load.capacity import Capacity
from oneaxis.load.draws import REDRAW
from oneaxis.load.levels import at_one_rate, level_name, level_size, levels
from oneaxis.load.metrics import (
    CAPACITY_ATTAINMENT,
    HEADLINE_PERCENTILE,
    LATENCIES,
    PERCENTILES,
    capacity,
    percentile,
    requests_needed,
    summarise_cell,
)
from oneaxis.load.plan import Plan, declared_prefixes, due, expected_hit_rates, out_of_prompts, reused_tokens
from oneaxis.load.sweep import Sweep

CELL_METRICS = (
    "n",
    "failed",
    *(f"{name}_p{percent}_ms" for name in LATENCIES for percent in PERCENTILES),
    "attainment",
    "goodput_tok_s",
    "output_tok_s",
    "achieved_rate_rps",
    "lag_p99_ms",
    "prefix_hit_rate",
    "saturated",
    "queue_growth_rps",
    "tokens_per_step",
    "accepted_per_draft",
    "tokens_per_verification",
)
"""Columns of a cell that become metrics; the others stand in `cells.parquet`."""


CAPACITY_METRICS = {
    "capacity_tok_s": "goodput_tok_s",
    "capacity_low_tok_s": "goodput_low_tok_s",
    "capacity_high_tok_s": "goodput_high_tok_s",
    "capacity_rps": "rate_rps",
}
"""Metrics of a shape, and what of its capacity they are."""


def summarise(sweep: Sweep, load: Load) -> pl.DataFrame:
    """One row per cell: `summarise_cell`, the increases of the server's counters, and `prefix_hit_rate`."""
    rows = []
    for (shape, level), requests in sweep.requests.group_by("shape", "level", maintain_order=True):
        counted = sweep.counters[shape, level]
        rows.append(
            {
                "shape": shape,
                "level": level,
                "level_size": level_size(level),
                "rate_rps": requests["rate_rps"][0],
                **summarise_cell(requests, load.classes_by_name(), load.duration_s, open_loop=at_one_rate(level)),
                **lengths(requests),
                "prefix_hit_rate": hit_rate(counted["prefix_cache_hits"], counted["prefix_cache_queries"]),
                **speculation(counted),
                **{f"server_{name}": value for name, value in counted.items()},
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def lengths(requests: pl.DataFrame) -> dict[str, float | None]:
    """Mean and percentiles of the tokens that were asked for, in and out: what came of a distribution of lengths."""
    found: dict[str, float | None] = {}
    for name in ("prompt", "output"):
        tokens = requests[f"asked_{name}_tokens"].to_list()
        found[f"asked_{name}_tokens_mean"] = sum(tokens) / len(tokens)
        found |= {f"asked_{name}_tokens_p{percent}": percentile(tokens, percent) for percent in PERCENTILES}
    return found


def hit_rate(hits: float | None, queries: float | None) -> float | None:
    """Cached prompt tokens / prompt tokens looked up; 0 when nothing was looked up, None without the counters."""
    if hits is None or queries is None:
        return None
    return hits / queries if queries else 0.0


def speculation(counted: Mapping[str, float | None]) -> dict[str, float | None]:
    """What a step of the engine gave: None where it counts no steps, and, but for the first, where it does not draft.

    - `tokens_per_step`: output tokens by engine steps (target forward passes) that gave any; a batch counts as one.
    - `accepted_per_draft`: drafted tokens that were accepted, a draft. `tokens_per_verification`: one more, which the
      target model itself gives: tokens of one sequence for one pass over a draft. Steps without a draft are not in it.
    - `accepted_at_1`, `accepted_at_2` ...: share of the drafts whose first, second ... token was accepted.

    Args:
        counted: what the server counted over a cell.
    """
    output, steps, drafts = (counted.get(name) for name in ("output_tokens", "steps", "drafts"))
    accepted = counted.get("accepted_tokens")
    found: dict[str, float | None] = {
        "tokens_per_step": output / steps if output is not None and steps else None,
        "accepted_per_draft": accepted / drafts if accepted is not None and drafts else None,
        "tokens_per_verification": 1 + accepted / drafts if accepted is not None and drafts else None,
    }
    for name, value in sorted(counted.items()):
        if name.startswith("accepted_at_"):
            found[name] = value / drafts if value is not None and drafts else None
    return found


def judge(
    plan: Plan,
    sweep: Sweep,
    cells: pl.DataFrame,
    differences: Sequence[Any],
    bounds: Guards,
    *,
    load: Load,
    lease: Mapping[str, Any] | None,
    tenants: Mapping[str, Any],
    draws: pl.DataFrame,
    cache_block_tokens: int | None = None,
    redraw: str = REDRAW,
) -> list[guards.Guard]:
    """The validity guards of a sweep, in their order.

    Args:
        differences: what the engine runs otherwise than asked (`realised_config`).
        lease: of the device, as provenance records it; None when none was held.
        tenants: who else used the machine (`oneaxis.tenants`).
        draws: the sampled answers of the probe (`oneaxis.load.draws`).
        cache_block_tokens: of the prefix cache, for what declared prefixes should give; None: the engine has no cache.
        redraw: what to do about draws that repeat (`oneaxis.load.draws.redraw`).
    """
    measured = sweep.requests["request_id"].to_list()
    labels = [f"{shape} {level}" for shape, level in cells.select("shape", "level").iter_rows()]
    prompts = [*plan.arrivals["prompt_token_ids"].to_list(), *plan.warmups["prompt_token_ids"].to_list()]
    arrivals = due(plan, sweep.requests)
    planned = arrivals.group_by("shape", "level", maintain_order=True).len()
    scheduled = {f"{shape} {level}": count for shape, level, count in planned.iter_rows()}
    # Where shapes go together, the server's counters stand in each cell for the whole level.
    scope = ["level"] if plan.together else ["shape", "level"]
    counted = cells.unique(scope, keep="first", maintain_order=True)
    expected = expected_hit_rates(arrivals, cache_block_tokens, together=plan.together) if cache_block_tokens else {}
    reused = reused_tokens(arrivals, sweep.requests, cache_block_tokens) if cache_block_tokens else {}
    return [
        guards.unique_prompts(
            prompts,
            dict(zip(labels, cells["prefix_hit_rate"], strict=True)),
            bounds.max_prefix_hit_rate,
            declared=[*declared_prefixes(plan.arrivals), *declared_prefixes(plan.warmups)],
            expected_hit_rates=expected,
        ),
        guards.token_truth(
            sweep.requests,
            _sum(counted["server_prompt_tokens"].to_list()),
            _sum(counted["server_output_tokens"].to_list()),
            bounds.max_token_disagreement,
        ),
        guards.realised_as_asked(differences),
        guards.load_fidelity(
            sweep.requests,
            scheduled,
            bounds.max_send_lag_p99_ms,
            out_of_prompts=out_of_prompts(plan, sweep.requests, load.duration_s),
        ),
        guards.survivors(arrivals["request_id"].to_list(), sweep.requests, cells),
        guards.output_limit(sweep.requests),
        guards.frozen_draws(draws, redraw),
        stalls(sweep.requests, load.model_dump(), bounds.max_stall_shift, reused),
        guards.exclusive_device(lease, tenants, bounds.max_stray_cpu_share),
        guards.warmed_up(sweep.conditions, plan.warmups["request_id"].to_list(), measured),
        guards.server_truth(
            {
                " ".join(map(str, key)): (requests, sweep.counters[requests["shape"][0], requests["level"][0]])
                for key, requests in sweep.requests.group_by(scope, maintain_order=True)
            },
            bounds.max_server_disagreement,
            bounds.max_server_disagreement_ms,
        ),
    ]


def cache_block_tokens(realised: Mapping[str, Any]) -> int | None:
    """Tokens of a block of the engine's prefix cache (`realised_config`); None without one or where it is untold."""
    resolved = realised.get("resolved") or {}
    return resolved.get("block_size") if resolved.get("prefix_caching") else None


def _sum(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) if len(present) == len(values) else None


def summary_document(
    cells: pl.DataFrame,
    verdicts: Sequence[guards.Guard],
    sweep: Sweep,
    load: Load,
    search: Mapping[str, Capacity] | None = None,
) -> dict[str, Any]:
    """`summary.json`: the cells with what their numbers support, capacity per shape, and the verdict.

    Of a search, `capacity` is what it found, and `search` how: probes, endpoints, drift.

    `not_reached` names percentiles that fall on a request that failed; `supported` says whether n is enough to claim
    each percentile with 95% confidence; `judged_on` what the service class asked of the shape.
    """
    asked = sweep.requests.group_by("shape").agg(pl.col("asked_output_tokens").max())
    one_token = {shape for shape, most in asked.iter_rows() if most == 1}
    documents = []
    for row, condition in zip(cells.to_dicts(), sweep.conditions, strict=True):
        defined = [name for name in LATENCIES if row["shape"] not in one_token or name in ("ttft", "e2e")]
        names = [f"{name}_p{percent}_ms" for name in defined for percent in PERCENTILES]
        documents.append(
            {
                **row,
                "not_reached": [name for name in names if row[name] is None],
                "supported": {f"p{percent}": row["n"] >= requests_needed(percent) for percent in PERCENTILES},
                "judged_on": ["ttft"] if row["shape"] in one_token else ["ttft", "tpot"],
                "warmup_ok": condition["warmup_ok"],
                "prefix_cache_reset": condition["prefix_cache_reset"],
            }
        )
    return {
        "valid": all(guard.valid for guard in verdicts),
        "invalid": [f"guard {guard.number} ({guard.name}): {guard.reason}" for guard in verdicts if not guard.valid],
        "headline_percentile": HEADLINE_PERCENTILE,
        "requests_needed": {f"p{percent}": requests_needed(percent) for percent in PERCENTILES},
        "service_class": load.service_class.model_dump(),
        "classes": {name: each.model_dump() for name, each in load.classes.items()},
        "capacity_attainment": CAPACITY_ATTAINMENT,
        "capacity": _capacities(cells, search),
        "search": {shape: found.as_json() for shape, found in search.items()} if search else None,
        "cells": documents,
    }


def _capacities(cells: pl.DataFrame, search: Mapping[str, Capacity] | None) -> dict[str, dict[str, Any] | None]:
    if not search:
        return capacity(cells)
    facts = ("goodput_tok_s", "goodput_low_tok_s", "goodput_high_tok_s", "level", "rate_rps", "rate_low_rps",
             "rate_high_rps", "reason")  # fmt: skip
    return {
        shape: None if found.goodput_tok_s is None else {key: found.as_json()[key] for key in facts}
        for shape, found in search.items()
    }


def flat_metrics(
    cells: pl.DataFrame,
    verdicts: Sequence[guards.Guard],
    search: Mapping[str, Capacity] | None = None,
    load: Load | None = None,
) -> dict[str, float]:
    """Metrics `sweep/...`; what is undefined or not reached is left out.

    Args:
        load: only the cells of its levels have metrics, since those that a search chose differ from run to run; None:
            all cells have.
    """
    named = levels(load) if load else None
    metrics: dict[str, float | None] = {
        "sweep/valid": float(all(guard.valid for guard in verdicts)),
        "sweep/requests": float(cells["n"].sum()),
        "sweep/failed": float(cells["failed"].sum()),
        "sweep/prefix_hit_rate": hit_rate(
            _sum(cells["server_prefix_cache_hits"].to_list()), _sum(cells["server_prefix_cache_queries"].to_list())
        ),
    }
    for cell in cells.iter_rows(named=True):
        if named is not None and cell["level"] not in named:
            continue
        prefix = f"sweep/{cell['shape']}/{cell['level']}"
        metrics.update({f"{prefix}/{name}": cell[name] for name in CELL_METRICS})
        metrics.update({f"{prefix}/{name}": value for name, value in cell.items() if name.startswith("accepted_at_")})
    for shape, best in _capacities(cells, search).items():
        for name, fact in CAPACITY_METRICS.items():
            metrics[f"sweep/{shape}/{name}"] = best.get(fact) if best else None
    return {name: float(value) for name, value in metrics.items() if value is not None}


def report_lines(document: Mapping[str, Any], verdicts: Sequence[guards.Guard]) -> list[str]:
    """What a person reads at the end: a line per cell, then VALID, or INVALID with why and what to do."""
    lines = []
    for cell in document["cells"]:
        supported = "" if cell["supported"][f"p{HEADLINE_PERCENTILE}"] else (
            f" (n too small for a p{HEADLINE_PERCENTILE}: {requests_needed(HEADLINE_PERCENTILE)} needed)"
        )  # fmt: skip
        on = " (on TTFT alone: one output token)" if cell["judged_on"] == ["ttft"] else ""
        lines.append(
            f"{cell['shape']} at {level_name(cell['level'])}: n {cell['n']}, failed {cell['failed']}, "
            f"TTFT p{HEADLINE_PERCENTILE} {_ms(cell, 'ttft')}, TPOT p{HEADLINE_PERCENTILE} {_ms(cell, 'tpot')}, "
            f"goodput {cell['goodput_tok_s']:.1f} tok/s, attainment {cell['attainment']:.0%} "
            f"[{cell['attainment_low']:.0%}, {cell['attainment_high']:.0%}]{on}{supported}{beyond_capacity(cell)}"
        )
    for shape, best in document["capacity"].items():
        searched = (document["search"] or {}).get(shape)
        lines.append(f"{shape}: capacity {said_capacity(best, searched)}")
    if not document["capacity"]:
        lines.append("no capacity: only open-loop levels of one rate can show it, since users who wait never overload")
    failed = [guard for guard in verdicts if not guard.valid]
    lines.append("load: INVALID" if failed else f"load: VALID ({len(verdicts)} guards)")
    lines.extend(
        f"  guard {guard.number}, {guard.name}: {guard.reason}. To do: {guard.recommendation}" for guard in failed
    )
    return lines


def said_capacity(best: Mapping[str, Any] | None, searched: Mapping[str, Any] | None) -> str:
    """A capacity in one line, with its interval and what is to be said of it."""
    reason = searched["reason"] if searched else ""
    if not best:
        return reason or f"none: no level reached an attainment of {CAPACITY_ATTAINMENT:.0%} without a growing queue"
    said = f"{best['goodput_tok_s']:.1f} tok/s at {level_name(best['level'])}"
    if searched:
        rates, goodputs = (
            f"[{'?' if low is None else f'{low:.4g}'}, {'?' if high is None else f'{high:.4g}'}]"
            for low, high in ((best["rate_low_rps"], best["rate_high_rps"]),
                              (best["goodput_low_tok_s"], best["goodput_high_tok_s"]))
        )  # fmt: skip
        said += f" (rate {rates} req/s, goodput {goodputs} tok/s, {len(searched['probes'])} probes)"
    return f"{said}; {reason}" if reason else said


def beyond_capacity(cell: Mapping[str, Any]) -> str:
    """What is said of a cell whose queue grew; nothing of another."""
    if not cell["saturated"]:
        return ""
    low, high = cell["queue_growth_low_rps"], cell["queue_growth_high_rps"]
    return (
        f"; beyond capacity: the queue grew by {cell['queue_growth_rps']:.2g} requests/s [{low:.2g}, {high:.2g}], so "
        "these latencies depend on load.duration_s"
    )


def _ms(cell: Mapping[str, Any], latency: str) -> str:
    name = f"{latency}_p{HEADLINE_PERCENTILE}"
    if cell[f"{name}_ms"] is None:
        return "not reached" if f"{name}_ms" in cell["not_reached"] else "undefined"
    low, high = (f"{end:.0f}" if end is not None else "?" for end in (cell[f"{name}_low_ms"], cell[f"{name}_high_ms"]))
    return f"{cell[f'{name}_ms']:.0f} ms [{low}, {high}]"
