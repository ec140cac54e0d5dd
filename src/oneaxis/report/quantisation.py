"""Quantisation on the page: what was changed in the checkpoint, and what that did to what the model says.

Every change stands with its interval, of the same text or the same strings before and after; nothing is a bare ratio.
Pure functions of `Results`; each gives None, or no rows, where its file is missing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from oneaxis.report import text
from oneaxis.report.results import Results
from oneaxis.report.tables import Table

KIND_TITLES = {"identifiers": "long identifiers", "json_keys": "JSON keys", "base64": "base64", "digits": "digits",
               "retrieval": "retrieval from a long text"}  # fmt: skip


def changed(results: Results) -> Table | None:
    """What was changed in the checkpoint, from the settings and what the stage counted."""
    settings, m = results.section("quantize"), results.metrics
    if not settings or (settings["kind"], settings.get("kv", "none")) == ("none", "none"):
        return None
    rows = [["Weights and activations", scheme_words(settings)]]
    if settings["kind"] != "none":
        rows += [["Smoothing", smoothing_words(settings)], ["Rounding", rounding_words(settings)],
                 ["Left in high precision", ", ".join(settings["ignore"])]]  # fmt: skip
        if "quantize/num_quantized_linears" in m:
            rows.append(["Linear layers quantised", text.count(m["quantize/num_quantized_linears"])])
    rows.append(["KV cache", kv_words(settings)])
    if "quantize/checkpoint_bytes" in m:
        before = f", from {_megabytes(m['fetch_model/bytes'])}" if "fetch_model/bytes" in m else ""
        rows.append(["Weights on disk", f"{_megabytes(m['quantize/checkpoint_bytes'])}{before}"])
    return Table(("Part", "is now"), rows, "lw", caption="What was changed")


def _megabytes(size: float) -> str:
    return f"{text.number(size / 1e6)} MB"


def scheme_words(settings: Mapping[str, Any]) -> str:
    """The scheme of weights and activations in a few words."""
    match settings["kind"]:
        case "none":
            return "as they are"
        case "w8a8_int8_dynamic":
            return "W8A8 INT8, activations per token at run time"
        case "w8a8_int8_static":
            return "W8A8 INT8, one static activation scale a tensor"
        case "w8a8_fp8":
            return "W8A8 FP8 (E4M3), activations per token at run time"
        case _:
            zero = "symmetric" if settings["symmetric"] else "with zero points"
            return f"W4A16, groups of {settings['group_size']}, {zero}; activations as they are"


def smoothing_words(settings: Mapping[str, Any]) -> str:
    """SmoothQuant's alpha and sites."""
    smooth = settings["smooth"]
    if not smooth["sites"]:
        return "none"
    alpha = smooth["alpha"]
    said = "α chosen per tensor" if alpha == "auto" else f"α = {alpha:g}"
    own = {site: value for site, value in (smooth.get("site_alpha") or {}).items() if value is not None}
    sites = [f"{site} ({own[site]:g})" if site in own else site for site in smooth["sites"]]
    return f"SmoothQuant {said} at {', '.join(sites)}"


def rounding_words(settings: Mapping[str, Any]) -> str:
    """How weights are rounded."""
    how = "GPTQ" if settings.get("rounding") == "gptq" else "to nearest"
    return f"{how}, range by least squared error" if settings.get("weight_range") == "mse" else how


def kv_words(settings: Mapping[str, Any]) -> str:
    """The precision of the KV cache that the checkpoint asks for."""
    return "FP8 (E4M3), calibrated scales" if settings.get("kv", "none") == "fp8" else "as the engine has it"


def line(settings: Mapping[str, Any]) -> str:
    """All of it in one line, for the summary."""
    kv = "; KV cache FP8" if settings.get("kv", "none") == "fp8" else ""
    if settings["kind"] == "none":
        return f"none: BF16 weights are served{kv}"
    smoothing = "no smoothing" if not settings["smooth"]["sites"] else smoothing_words(settings)
    gptq = ", GPTQ" if settings.get("rounding") == "gptq" else ""
    return f"{scheme_words(settings)}{gptq}; {smoothing}{kv}"


def short(settings: Mapping[str, Any]) -> str:
    """What was done, inside a question; nothing for a policy served as it is."""
    kinds = {"none": "", "w4a16": "W4A16 quantisation", "w8a8_fp8": "W8A8 FP8 quantisation"}
    done = [kinds.get(settings.get("kind", "none"), "W8A8 INT8 quantisation"),
            "an FP8 KV cache" if settings.get("kv", "none") == "fp8" else ""]  # fmt: skip
    return " and ".join(filter(None, done))


# --- what it did ---------------------------------------------------------------------------------------------


def measures(results: Results) -> Table | None:
    """Perplexity of all and by source, KL and top-1 agreement, each with its paired interval."""
    report = results.document("quantize", "quality.json")
    if not report:
        return None
    whole = report["perplexity"]
    rows = [_perplexity_row("Perplexity", whole)]
    if len(report["sources"]) > 1:
        rows += [_perplexity_row(f"Perplexity, {source}", found) for source, found in report["sources"].items()]
    kl, same = report["kl"], report["top1_agreement"]
    rows.append(["KL from the policy, nats a token", "0", text.number(kl["effect"]), text.signed(kl["effect"]),
                 _between(kl, text.number), text.count(whole["n"])])  # fmt: skip
    lost = {end: None if value is None else value - 1 for end, value in same.items()}
    rows.append(["Same most likely token", "100%", text.percent(same["effect"]), text.points(lost["effect"]),
                 _between(lost, text.points), text.count(whole["n"])])  # fmt: skip
    return Table(
        ("Measure", "before", "after", "change", "95% interval", "sequences"), rows, "lrrrrr",
        caption="What the model says otherwise",
        note=f"Before: the policy in float32, on the same {text.count(whole['num_tokens'])} tokens. Intervals count "
        f"sequences, not tokens. KL of a token: median {text.number(kl['p50'])}, 99th percentile "
        f"{text.number(kl['p99'])}.",
    )  # fmt: skip


def _perplexity_row(title: str, found: Mapping[str, Any]) -> list[str]:
    delta = {end: None if value is None else math.expm1(value) for end, value in found["delta_nll"].items()}
    return [title, text.number(found["before"], 4), text.number(found["after"], 4),
            text.signed_percent(delta["effect"]), _between(delta, text.signed_percent),
            text.count(found["n"])]  # fmt: skip


def copies(results: Results) -> Table | None:
    """The exact-copy suite by kind, and whether it can tell a weak model apart."""
    report = results.document("quantize", "quality.json") or {}
    found = report.get("copies")
    if not found:
        return None
    parts = {"all kinds": found["all"]}
    parts |= {title: found["kinds"][kind] for kind, title in KIND_TITLES.items() if kind in found["kinds"]}
    rows = [
        [title, text.percent(part["exact_base"], 0), text.percent(part["exact_other"], 0),
         text.points(part["exact"]["effect"]), _between(part["exact"], text.points), text.count(part["lost"]),
         text.count(part["gained"]), text.count(part["num_tasks"]), text.count(part["num_sequences"])]
        for title, part in parts.items()
    ]  # fmt: skip
    said = ["A string is exact when greedy decoding would write all of it.", _context(results),
            (report.get("suite") or {}).get("why", "")]  # fmt: skip
    return Table(
        ("Strings", "exact before", "after", "change", "95% interval", "lost", "gained", "n", "in sequences"),
        rows, "lrrrrrrrr", caption="Exact copies",
        note=" ".join(filter(None, said)),
    )  # fmt: skip


def _context(results: Results) -> str:
    """From how long a text facts are retrieved, where it is not what was asked for."""
    tokens = results.table("calibrate", "copy_tokens.parquet")
    asked = results.section("calibrate").get("copying", {}).get("context_tokens")
    if tokens is None or asked is None:
        return ""
    length = int(tokens["position"].max()) + 1  # type: ignore[arg-type]
    if length >= asked:
        return ""
    return f"Texts are cut to {text.count(length)} of {text.count(asked)} tokens, the model's positions."


def copies_finding(results: Results) -> str | None:
    """The exact copies in one sentence, and a word of warning where the suite proves nothing."""
    report = results.document("quantize", "quality.json") or {}
    if not report.get("copies"):
        return None
    found = report["copies"]["all"]
    blind = "" if (report.get("suite") or {}).get("discriminates") else (
        "; the suite cannot tell a known-weak model apart here, so this is no proof"
    )  # fmt: skip
    return (f"Exact copies: {text.percent(found['exact_base'])} to {text.percent(found['exact_other'])} of "
            f"{text.count(found['num_tasks'])} strings ({text.points(found['exact']['effect'])}, "
            f"{_interval_words(found['exact'], text.points)}{blind}).")  # fmt: skip


def copies_row(results: Results) -> list[str] | None:
    """The exact copies as a row of the headline."""
    report = results.document("quantize", "quality.json") or {}
    if not report.get("copies"):
        return None
    found = report["copies"]["all"]
    return ["Exact copies, by quantisation", text.percent(found["exact_base"]), text.percent(found["exact_other"]),
            text.points(found["exact"]["effect"]), _between(found["exact"], text.points),
            f"{text.count(found['num_tasks'])} strings"]  # fmt: skip


def _between(effect: Mapping[str, float | None], show: Callable[[float | None], str]) -> str:
    low, high = effect["ci_low"], effect["ci_high"]
    if low is None or high is None:
        return text.NONE
    return f"{show(low).removesuffix(' points')} to {show(high)}"


def _interval_words(effect: Mapping[str, float | None], show: Callable[[float | None], str]) -> str:
    around = _between(effect, show)
    return "no interval" if around == text.NONE else f"95% interval {around}"
