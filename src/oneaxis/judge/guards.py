"""Validity guards: pure functions of what was recorded to VALID or INVALID, with evidence, reason and what to do.

Each guard stands for one way in which a load measurement was seen to lie. A run with a guard that fails is INVALID:
its numbers are kept, and stand for nothing. The numbers are those of the methods: 1 unique prompts, 2 token truth,
3 realised config, 5 load fidelity, 6 survivors, 7 output limit, 8 frozen draws, 10 exclusive device (stray tenants),
13 warm-up, 15 server truth; 9 is in `stalls`, and what takes two arms (4, 11, 12, 14) in `conditions`. `docs/guards.md`
has all of them.

`requests` is the request table: one row per request with `request_id`, `status`, `sent_s`, `intended_s`,
`asked_prompt_tokens`, `asked_output_tokens`, `prompt_tokens`, `output_tokens`, `token_times`, `finish_reason`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import polars as pl

from oneaxis.load.draws import REDRAW, repeats

MAX_SHARED_TOKENS = 3
"""Two prompts may begin with this many equal tokens: fewer than any prefix cache's block, which is reused whole."""


@dataclass(frozen=True)
class Guard:
    """One guard's verdict."""

    number: int
    name: str
    valid: bool
    evidence: dict[str, Any]
    reason: str = ""
    """Why it is INVALID; empty when valid."""
    recommendation: str = ""
    """What to do about it; empty when valid."""

    def as_json(self) -> dict[str, Any]:
        """As `guards.json` holds it."""
        return {
            "guard": self.number,
            "name": self.name,
            "valid": self.valid,
            "evidence": self.evidence,
            "reason": self.reason,
            "recommendation": self.recommendation,
        }


def judged(number: int, name: str, evidence: dict[str, Any], problems: Sequence[str], recommendation: str) -> Guard:
    """A guard that is valid unless there are problems; the recommendation stands only beside a reason."""
    reason = "; ".join(problems)
    return Guard(number, name, not problems, evidence, reason, recommendation if problems else "")


def unique_prompts(
    prompts: Sequence[Sequence[int]],
    hit_rates: Mapping[str, float | None],
    max_hit_rate: float,
    *,
    declared: Sequence[tuple[str, int] | None] = (),
    expected_hit_rates: Mapping[str, float] = {},
) -> Guard:
    """Guard 1: no prompt twice, none sharing a start with another, and the server's own prefix-cache counters agree.

    Where prompts were declared to share a prefix, they share that and nothing else, and the counters show what it
    gives, no more and no less.

    Args:
        prompts: token ids of every prompt sent to the engine, warm-up included.
        hit_rates: by cell, cached prompt tokens / prompt tokens from the server's counters; None where it has none.
        max_hit_rate: largest hit rate allowed in any cell, above or below the one that is expected.
        declared: for each prompt the group whose prefix it begins with and the prefix's tokens, or None; empty: no
            prompt has one.
        expected_hit_rates: by cell, what the declared prefixes give; 0 for a cell that is not named.
    """
    ordered = sorted(tuple(prompt) for prompt in prompts)
    repeated = sum(count - 1 for count in Counter(ordered).values())
    prefixes: dict[str, set[tuple[int, ...]]] = {}
    # What has to be unlike all else of its kind: whole prompts and prefixes, and what follows one prefix.
    kinds: dict[str, list[tuple[int, ...]]] = {"": []}
    for prompt, group in zip(prompts, declared or [None] * len(prompts), strict=True):
        if group is None:
            kinds[""].append(tuple(prompt))
        else:
            name, tokens = group
            prefixes.setdefault(name, set()).add(tuple(prompt[:tokens]))
            kinds.setdefault(f"after {name}", []).append(tuple(prompt[tokens:]))
    kinds[""] += [prefix for own in prefixes.values() for prefix in own]
    # In sorted order the longest common start of any two is that of two neighbours.
    shared = max((_common_start(a, b) for kind in kinds.values() for a, b in pairwise(sorted(kind))), default=0)
    rates = {cell: rate for cell, rate in hit_rates.items() if rate is not None}
    off = {cell: rate - expected_hit_rates.get(cell, 0.0) for cell, rate in rates.items()}
    over = {cell: rates[cell] for cell, distance in off.items() if abs(distance) > max_hit_rate}
    problems = [
        f"prompts of {name} were declared to share a prefix and begin in {len(own)} ways"
        for name, own in prefixes.items()
        if len(own) > 1
    ]
    if repeated:
        problems.append(f"{repeated} of {len(ordered)} prompts repeat another")
    elif shared > MAX_SHARED_TOKENS:
        problems.append(f"two prompts share their first {shared} tokens (at most {MAX_SHARED_TOKENS})")
    if over:
        worst = max(over, key=lambda cell: abs(off[cell]))
        meant = expected_hit_rates.get(worst, 0.0)
        declaration = f", where the declared prefixes give {meant:.1%}" if meant else ""
        problems.append(
            f"the server took {over[worst]:.1%} of the prompt tokens of {worst} from its prefix cache{declaration} "
            f"(guards.max_prefix_hit_rate {max_hit_rate:.1%})"
        )
    if len(rates) < len(hit_rates):
        problems.append("the server has no prefix-cache counters, so that reuse cannot be excluded")
    evidence: dict[str, Any] = {
        "prompts": len(ordered),
        "repeated": repeated,
        "longest_shared_start_tokens": shared,
        "hit_rate_max": max(rates.values(), default=None),
        "hit_rate_allowed": max_hit_rate,
    }
    if expected_hit_rates:
        evidence["hit_rates_expected"] = dict(expected_hit_rates)
    return judged(
        1, "unique prompts", evidence, problems,
        "give every request a prompt of its own from its first token, or declare what they share (shared_prefix)",
    )  # fmt: skip


def _common_start(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def token_truth(
    requests: pl.DataFrame,
    server_prompt_tokens: float | None,
    server_output_tokens: float | None,
    max_disagreement: float,
) -> Guard:
    """Guard 2: the usage records say what was asked, and three independent counts of the output tokens agree.

    The counts are the sum of the final usage records, the server's own counter over the same cells, and the tokens
    seen to arrive. For a request that failed only what arrived is known, and the server may have made more, up to what
    was asked: its counter then has a range to lie in.

    Args:
        server_prompt_tokens: increase of the server's counter over the measured cells; None where it has none.
        server_output_tokens: the same for generated tokens.
        max_disagreement: largest relative difference of two counts.
    """
    ok = requests.filter(pl.col("status") == "ok")
    failed = requests.filter(pl.col("status") != "ok").with_columns(arrived=pl.col("token_times").list.len())
    wrong_prompt = ok.filter(pl.col("prompt_tokens").ne_missing(pl.col("asked_prompt_tokens"))).height
    wrong_output = ok.filter(pl.col("output_tokens").ne_missing(pl.col("asked_output_tokens"))).height
    usage = int(ok["output_tokens"].sum())
    streamed = int(ok["token_times"].list.len().sum())
    low = usage + int(failed["arrived"].sum())
    high = usage + int(failed["asked_output_tokens"].sum())
    prompt_low = int(ok["prompt_tokens"].sum())
    prompt_high = prompt_low + int(failed["asked_prompt_tokens"].sum())
    problems = []
    if wrong_prompt:
        problems.append(f"{wrong_prompt} of {ok.height} requests were read as another number of prompt tokens")
    if wrong_output:
        problems.append(f"{wrong_output} of {ok.height} answers have another number of tokens than asked")
    differences = {"tokens seen to arrive": _outside(streamed, usage, usage)}
    for name, value, bounds in (
        ("the server's counter of output tokens", server_output_tokens, (low, high)),
        ("the server's counter of prompt tokens", server_prompt_tokens, (prompt_low, prompt_high)),
    ):
        if value is None:
            problems.append(f"{name} is missing")
        else:
            differences[name] = _outside(value, *bounds)
    problems.extend(
        f"{name} differ{'' if name.startswith('tokens') else 's'} from the usage records by {difference:.1%} "
        f"(guards.max_token_disagreement {max_disagreement:.1%})"
        for name, difference in differences.items()
        if difference > max_disagreement
    )
    evidence = {
        "usage_output_tokens": usage,
        "streamed_output_tokens": streamed,
        "server_output_tokens": server_output_tokens,
        "usage_prompt_tokens": prompt_low,
        "server_prompt_tokens": server_prompt_tokens,
        "largest_disagreement": max(differences.values()),
        "disagreement_allowed": max_disagreement,
    }
    return judged(
        2, "token truth", evidence, problems,
        "no other client may use the engine; count tokens from the final usage record",
    )  # fmt: skip


def _outside(value: float, low: float, high: float) -> float:
    """How far `value` lies outside [low, high], relative to the nearer bound."""
    distance = max(low - value, value - high, 0.0)
    bound = low if value < low else high
    return distance / bound if bound else (math.inf if distance else 0.0)


def realised_as_asked(differences: Sequence[Any]) -> Guard:
    """Guard 3: the engine runs what was asked for.

    Args:
        differences: what the realised configuration has otherwise, each naming its setting.
    """
    problems = [f"the engine runs otherwise than asked: {_difference(item)}" for item in differences]
    return judged(
        3, "realised config", {"differences": len(differences)}, problems,
        "ask for what the engine really runs, or correct the checkpoint's config.json (artifacts/serve/realised.json)",
    )  # fmt: skip


def _difference(item: Any) -> str:
    if isinstance(item, Mapping) and {"key", "asked", "resolved"} <= item.keys():
        return f"{item['key']}: asked {item['asked']}, resolved {item['resolved']}"
    return str(item)


def load_fidelity(
    requests: pl.DataFrame,
    scheduled: Mapping[str, int],
    max_lag_p99_ms: float,
    *,
    out_of_prompts: Sequence[str] = (),
) -> Guard:
    """Guard 5: every request was sent, and at its moment: the load generator must not shape the load.

    Args:
        requests: also with `shape` and `level`.
        scheduled: number of requests drawn for each cell, by `SHAPE LEVEL`.
        max_lag_p99_ms: largest p99 of actual - intended send time, over all requests and in each cell of 100 or more.
        out_of_prompts: users of a closed loop who had nothing left to send.
    """
    sent = requests.filter(pl.col("sent_s").is_not_null()).with_columns(
        lag_ms=1000 * (pl.col("sent_s") - pl.col("intended_s")), cell=_cell_name()
    )
    counts = Counter(sent["cell"].to_list())
    problems = [
        f"{cell}: {counts[cell]} of {number} scheduled requests were sent"
        for cell, number in scheduled.items()
        if counts[cell] != number
    ]
    lag = _nearest_rank(sent["lag_ms"].to_list(), 99)
    if lag is not None and lag > max_lag_p99_ms:
        problems.append(f"sent late: p99 {lag:.1f} ms (guards.max_send_lag_p99_ms {max_lag_p99_ms:g})")
    for (cell,), rows in sent.group_by("cell", maintain_order=True):
        of_cell = _nearest_rank(rows["lag_ms"].to_list(), 99)
        if rows.height >= 100 and of_cell is not None and of_cell > max_lag_p99_ms:
            problems.append(f"{cell}: sent late: p99 {of_cell:.1f} ms (guards.max_send_lag_p99_ms {max_lag_p99_ms:g})")
    if out_of_prompts:
        problems.append(f"{len(out_of_prompts)} users had used all their prompts before the cell was over, such as "
                        f"{out_of_prompts[0]}: raise load.requests_per_user")  # fmt: skip
    early = sent.filter(pl.col("lag_ms") < -1).height
    if early:
        problems.append(f"{early} requests were sent before their moment")
    evidence = {
        "scheduled": sum(scheduled.values()),
        "sent": sent.height,
        "lag_p99_ms": lag,
        "lag_max_ms": max(sent["lag_ms"].to_list(), default=None),
        "lag_allowed_ms": max_lag_p99_ms,
    }
    return judged(
        5, "load fidelity", evidence, problems,
        "leave the client a core of its own (serve.threads), lower load.rates_rps, or stop what else runs here",
    )  # fmt: skip


def _cell_name() -> pl.Expr:
    return pl.concat_str("shape", "level", separator=" ")


def _nearest_rank(values: Sequence[float], percent: int) -> float | None:
    return sorted(values)[-(-percent * len(values) // 100) - 1] if values else None


def survivors(scheduled_ids: Sequence[str], requests: pl.DataFrame, cells: pl.DataFrame) -> Guard:
    """Guard 6: no scheduled request is left out of the tails, and one that failed counts as a miss.

    Failures alone do not make a run INVALID: they are part of the result. Leaving them out does.

    Args:
        scheduled_ids: every request that was drawn.
        cells: the summary, one row per cell: shape, level, n, ok, attainment, `ttft_p50_ms` and the like.
    """
    recorded = Counter(requests["request_id"].to_list())
    missing = [name for name in scheduled_ids if not recorded[name]]
    twice = [name for name, count in recorded.items() if count > 1]
    unknown = list(set(recorded) - set(scheduled_ids))
    problems = []
    for names, said in ((missing, "have no row"), (twice, "have more than one row"), (unknown, "were never scheduled")):
        if names:
            problems.append(f"{len(names)} requests {said}, such as {min(names)}")
    for cell in cells.iter_rows(named=True):
        rows = requests.filter((pl.col("shape") == cell["shape"]) & (pl.col("level") == cell["level"]))
        label = f"{cell['shape']} {cell['level']}"
        ok = rows.filter(pl.col("status") == "ok").height
        if (cell["n"], cell["ok"]) != (rows.height, ok):
            problems.append(
                f"{label}: summed up over {cell['n']} requests ({cell['ok']} ok) of {rows.height} ({ok} ok)"
            )
        if cell["attainment"] * rows.height > ok + 1e-9:
            problems.append(f"{label}: an attainment of {cell['attainment']:.1%} with {ok} of {rows.height} answered")
        for latency in ("ttft", "e2e"):
            for percent in (50, 90, 99):
                if cell[f"{latency}_p{percent}_ms"] is not None and ok < -(-percent * rows.height // 100):
                    problems.append(f"{label}: a {latency} p{percent} with only {ok} of {rows.height} answered")
    failures = Counter(status for status in requests["status"].to_list() if status != "ok")
    evidence = {
        "scheduled": len(scheduled_ids),
        "recorded": requests.height,
        "failed": sum(failures.values()),
        "failures": dict(sorted(failures.items())),
    }
    return judged(6, "survivors", evidence, problems, "compute tails over every scheduled request, failures included")


def output_limit(requests: pl.DataFrame) -> Guard:
    """Guard 7: every answer ran to the length that was asked for, and says that this is why it ended."""
    ok = requests.filter(pl.col("status") == "ok")
    other = Counter(str(reason) for reason in ok["finish_reason"].to_list() if reason != "length")
    wrong = ok.filter(pl.col("output_tokens").ne_missing(pl.col("asked_output_tokens")))
    problems = []
    if other:
        listed = ", ".join(f"{reason} {count}" for reason, count in sorted(other.items()))
        problems.append(f"{sum(other.values())} of {ok.height} answers ended for another reason than length ({listed})")
    if wrong.height:
        row = wrong.row(0, named=True)
        problems.append(
            f"{wrong.height} of {ok.height} answers have another length than asked, such as {row['request_id']}: "
            f"{row['output_tokens']} for {row['asked_output_tokens']}"
        )
    evidence = {"answers": ok.height, "ended_otherwise": sum(other.values()), "wrong_length": wrong.height}
    return judged(7, "output limit honoured", evidence, problems,
                  "the engine must honour ignore_eos, min_tokens and max_tokens")  # fmt: skip


def frozen_draws(draws: pl.DataFrame, recommendation: str = REDRAW) -> Guard:
    """Guard 8: answers that were sampled with different seeds are different, but for what chance explains.

    Args:
        draws: one row per call with `seed` (all different), `token_ids`, `logprob` (null: the engine does not tell).
        recommendation: where the cause is known (`oneaxis.load.draws.redraw`).
    """
    found = repeats(draws)
    problems = [repeat.said(draws.height) for repeat in found if not repeat.by_chance]
    if draws.height < 2:
        problems.append(f"{draws.height} answers were sampled: two at least are needed to compare")
    evidence = {
        "calls": draws.height,
        "distinct": draws["token_ids"].n_unique(),
        "chance_of_the_repeats": min((each.chance for each in found if each.chance is not None), default=None),
    }
    return judged(8, "frozen draws", evidence, problems, recommendation)


def exclusive_device(
    lease: Mapping[str, Any] | None, tenants: Mapping[str, Any] | None = None, max_cpu_share: float = 1.0
) -> Guard:
    """Guard 10: while the times were taken, no other run of this host could use the device, and no other program did.

    Args:
        lease: as provenance records it (`oneaxis.lease.Lease.as_json`); None when no lease was held.
        tenants: what other processes did (`oneaxis.tenants`): `cpus`, `other_cpus`, `busiest`, `gpu_processes` before
            the engine started; None where only the lease is judged.
        max_cpu_share: largest share of `cpus` that others may have kept busy.
    """
    problems = []
    if not lease:
        problems.append("the device was not held: another run may have used it")
    elif lease["exclusive"] is None:
        problems.append(f"{lease['device']} is on another machine: that nobody else used it is unproven")
    elif not lease["exclusive"]:
        problems.append(f"{lease['device']} was shared with other runs")
    evidence = {"device": lease["device"] if lease else None, "exclusive": bool(lease and lease["exclusive"])}
    if tenants is not None:
        share = tenants["other_cpus"] / tenants["cpus"]
        if share > max_cpu_share:
            names = ", ".join(tenants["busiest"]) or "processes that have ended"
            problems.append(
                f"other processes kept {tenants['other_cpus']:.2f} of {tenants['cpus']} CPUs busy: {names} "
                f"(guards.max_stray_cpu_share {max_cpu_share:.0%})"
            )
        if tenants["gpu_processes"]:
            problems.append(f"on the GPU before the engine: {', '.join(tenants['gpu_processes'])}")
        evidence |= {"other_cpu_share": share, "other_cpu_share_allowed": max_cpu_share}
    return judged(
        10, "exclusive device", evidence, problems,
        "measure by `oneaxis run` or `dvc repro`, whose timing stages take an exclusive lease, and stop what else runs",
    )  # fmt: skip


def warmed_up(conditions: Sequence[Mapping[str, Any]], warmup_ids: Sequence[str], measured_ids: Sequence[str]) -> Guard:
    """Guard 13: every cell had a warm-up, of requests that are not measured, all of which succeeded.

    Args:
        conditions: one a cell: `shape`, `level`, `warmup_requests`, `warmup_ok`, `prefix_cache_reset`.
        warmup_ids: of every request that was sent to warm up.
        measured_ids: of every request in the request table.
    """
    problems = []
    both = sorted(set(warmup_ids) & set(measured_ids))
    if both:
        problems.append(f"{len(both)} requests of the warm-up are measured too, such as {both[0]}")
    without = [cell for cell in conditions if not cell["warmup_requests"]]
    if without:
        problems.append(f"{len(without)} of {len(conditions)} cells had no warm-up: their first requests are one")
    for cell in conditions:
        if cell["warmup_ok"] < cell["warmup_requests"]:
            problems.append(f"{cell['shape']} {cell['level']}: {cell['warmup_ok']} of {cell['warmup_requests']} "
                            "requests of the warm-up succeeded")  # fmt: skip
    sent = sorted({cell["warmup_requests"] for cell in conditions})
    if len(sent) > 1:
        problems.append(f"the cells were warmed up by {sent[0]} to {sent[-1]} requests")
    evidence = {
        "cells": len(conditions),
        "warmup_requests": sum(cell["warmup_requests"] for cell in conditions),
        "succeeded": sum(cell["warmup_ok"] for cell in conditions),
        "caches_reset": sum(bool(cell["prefix_cache_reset"]) for cell in conditions),
    }
    return judged(13, "warm-up", evidence, problems,
                  "set load.warmup_requests to 1 or more, and see why one failed")  # fmt: skip


def server_truth(
    cells: Mapping[str, tuple[pl.DataFrame, Mapping[str, float | None]]], max_share: float, max_ms: float
) -> Guard:
    """Guard 15: the client and the server tell the same of each cell: mean TTFT, mean ITL, tokens and requests.

    Times may differ by `max_share` of the server's or by `max_ms`, whichever is larger; counts by `max_share`. TTFT is
    counted from the actual sending here, since a server knows of no request before. The mean gap of a token is the time
    between first and last tokens over the tokens between, on both sides, so that it is the same for chunks of several.
    Where requests failed the server may have seen more of them than the client: counts then have a range to lie in, and
    a mean over other requests is not compared.

    Args:
        cells: by name the requests, and what the server counted over them (`oneaxis.load.server.Account.counters`).
    """
    problems, worst, compared = [], {"ttft_ms": 0.0, "itl_ms": 0.0}, 0
    for cell, (requests, counted) in cells.items():
        names = ("ttft_sum_s", "ttft_count", "itl_sum_s", "prompt_tokens", "output_tokens")
        if lacking := [name for name in names if counted.get(name) is None]:
            problems.append(f"{cell}: the server has no {', '.join(lacking)} to hold the client against")
            continue
        server = {name: float(counted[name] or 0.0) for name in names}
        begun = requests.filter(pl.col("first_token_s").is_not_null() & pl.col("sent_s").is_not_null())
        ok, failed = requests.filter(pl.col("status") == "ok"), requests.filter(pl.col("status") != "ok")
        arrived = int(requests["token_times"].list.len().sum())
        counts = {
            "first tokens": (server["ttft_count"], begun.height, begun.height + failed.height),
            "output tokens": (server["output_tokens"], arrived,
                              int(ok["output_tokens"].sum()) + int(failed["asked_output_tokens"].sum())),
            "prompt tokens": (server["prompt_tokens"], int(ok["prompt_tokens"].sum()),
                              int(ok["prompt_tokens"].sum()) + int(failed["asked_prompt_tokens"].sum())),
        }  # fmt: skip
        for name, (theirs, low, high) in counts.items():
            if _outside(theirs, low, max(low, high)) > max_share:
                mine = f"{low}" if low >= high else f"{low} to {high}"
                problems.append(f"{cell}: {theirs:.0f} {name} by the server, {mine} by the client")
        if begun.height == 0 or server["ttft_count"] != begun.height:
            continue
        compared += 1
        means = {"ttft_ms": (server["ttft_sum_s"] / begun.height, (begun["first_token_s"] - begun["sent_s"]).mean())}
        between = arrived - begun.height
        if between > 0 and not failed.height:
            last, first = begun["token_times"].list.last(), begun["token_times"].list.first()
            means["itl_ms"] = (server["itl_sum_s"] / between, (last - first).sum() / between)
        for name, (theirs, mean) in means.items():
            assert isinstance(mean, float)
            difference = 1000 * (mean - theirs)
            worst[name] = max(worst[name], difference, key=abs)
            if abs(difference) > max(max_share * 1000 * theirs, max_ms):
                problems.append(
                    f"{cell}: mean {name.removesuffix('_ms').upper()} {1000 * mean:.1f} ms by the client, "
                    f"{1000 * theirs:.1f} ms by the server (guards.max_server_disagreement {max_share:.0%}, "
                    f"guards.max_server_disagreement_ms {max_ms:g})"
                )
    evidence = {
        "cells": len(cells),
        "means_compared": compared,
        "ttft_difference_ms": worst["ttft_ms"],
        "itl_difference_ms": worst["itl_ms"],
    }
    return judged(
        15, "server truth", evidence, problems,
        "leave the client and the server's own process a core each (serve.threads), and no other client on the engine",
    )  # fmt: skip
