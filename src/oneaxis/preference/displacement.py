"""Did DPO displace probability? From changes of log-probability on held-out pairs to a verdict with its reasons.

DPO constrains only the margin between chosen and rejected, so both may fall while the loss improves (likelihood
displacement; Razin et al., 2024). The verdict therefore reads the absolute changes, each the mean over held-out pairs
of (after - before) of the summed log-probability of a response, in nats per response, with a paired t interval.

A change is, with `slight` and `steep` from the settings (0 < slight < steep):

    unclear   its interval contains 0, and reaches beyond -slight or +slight
    flat      its interval contains 0 and stays within [-slight, +slight]; or it excludes 0, and |effect| < slight
    up        its interval excludes 0, and effect >= slight
    down      its interval excludes 0, and -steep < effect <= -slight
    steep     its interval excludes 0, and effect <= -steep

Rows: the chosen responses; columns: the rejected ones.

                up          flat              unclear           down            steep
    up          mismatch    healthy           no clear change   healthy         healthy
    flat        mismatch    no clear change   no clear change   healthy         healthy
    unclear     no clear change throughout
    down        mismatch    displacement      displacement      displacement    displacement
    steep       severe throughout

Mismatch: the rejected responses gained, as they do when the reference does not fit the pairs (one epoch of SFT on the
chosen responses comes first then). The escape probe, a canned refusal on benign prompts, does not decide: where it
rises by `slight` or more, the reasons say so, for that is where displaced probability is known to go.
"""

from typing import Any

from oneaxis.judge.paired import Effect

HEALTHY, DISPLACEMENT, SEVERE = "healthy", "displacement", "severe"
MISMATCH, NO_CLEAR_CHANGE = "mismatch", "no clear change"


def direction(change: Effect, *, slight_nats: float, steep_nats: float) -> str:
    """up, flat, unclear, down or steep, as the module defines them."""
    if change.ci_low <= 0 <= change.ci_high:
        return "flat" if -slight_nats <= change.ci_low and change.ci_high <= slight_nats else "unclear"
    if abs(change.effect) < slight_nats:
        return "flat"
    if change.effect > 0:
        return "up"
    return "down" if change.effect > -steep_nats else "steep"


def verdict(
    chosen: Effect, rejected: Effect, escape: Effect, margin: Effect, *, slight_nats: float, steep_nats: float
) -> tuple[str, list[str]]:
    """The verdict of the module's table, and the reasons for it, one sentence each, with their numbers."""
    limits = {"slight_nats": slight_nats, "steep_nats": steep_nats}
    first, second = direction(chosen, **limits), direction(rejected, **limits)
    if first == "steep":
        name = SEVERE
    elif first == "unclear":
        name = NO_CLEAR_CHANGE
    elif second == "up":
        name = MISMATCH
    elif first == "down":
        name = DISPLACEMENT
    elif second in ("down", "steep") or (first == "up" and second == "flat"):
        name = HEALTHY
    else:
        name = NO_CLEAR_CHANGE
    words = {
        "up": "rose",
        "flat": f"changed by less than {slight_nats:g} nats",
        "unclear": "changed, but the interval does not say which way",
        "down": "fell",
        "steep": f"fell steeply (by {steep_nats:g} nats or more)",
    }
    hint = ""
    if name == MISMATCH and first == "up":
        hint = "; the reference does not fit these responses yet, so training taught their common form"
    elif name == MISMATCH:
        hint = "; the policy moved against the preference"
    reasons = [f"chosen responses {words[first]}: {_numbers(chosen)}",
               f"rejected responses {words[second]}: {_numbers(rejected)}{hint}",
               f"margin: {_numbers(margin)}"]  # fmt: skip
    probe = direction(escape, **limits)
    gained = "; probability went to the escape text" if probe == "up" else ""
    reasons.append(f"escape text {words[probe]}: {_numbers(escape)}{gained}")
    return name, reasons


def _numbers(change: Effect) -> str:
    return f"{change.effect:+.2f} nats [{change.ci_low:+.2f}, {change.ci_high:+.2f}], n = {change.n}"


def interval(change: Effect) -> dict[str, Any]:
    """An effect as it stands in `displacement.json`."""
    return {"effect": change.effect, "ci_low": change.ci_low, "ci_high": change.ci_high, "n": change.n}
