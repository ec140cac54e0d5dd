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
chosen responses comes first then).

What became of benign prompts stands above the table. Where the share of them that the model answers, greedily, by a
refusal (or not at all) rises by `refusal_share` or more, and its interval excludes 0, the verdict is **severe**,
whatever the log-probabilities say: users meet this first, and a model that learnt to refuse must not pass as healthy.
That share's interval is Tango's score interval of a paired difference of proportions, on the same prompts.
The escape texts, scored on benign prompts, do not decide: those that rise by `slight` or more are named in the reasons,
for that is where displaced probability is known to go. A run that its threshold stopped early says so in the reasons.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from oneaxis.judge.paired import Effect
from oneaxis.judge.statistics import paired_share_interval

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
    chosen: Effect,
    rejected: Effect,
    margin: Effect,
    escapes: Mapping[str, Effect],
    shares: Mapping[str, Effect],
    *,
    slight_nats: float,
    steep_nats: float,
    refusal_share: float,
) -> tuple[str, list[str]]:
    """The verdict of the module's table, and the reasons for it, one sentence each, with their numbers.

    Args:
        chosen, rejected, margin: changes on held-out pairs, nats per response.
        escapes: change of each escape text's log-probability on benign prompts, nats.
        shares: change of the share of benign prompts answered by `refusals` or by `empty answers`; may be empty.
    """
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
    reasons += _escaped(escapes, slight_nats)
    said, refuses = _answered(shares, refusal_share)
    return SEVERE if refuses else name, [*said, *reasons] if refuses else [*reasons, *said]


def _escaped(escapes: Mapping[str, Effect], slight_nats: float) -> list[str]:
    """The escape texts that rose; of the others, the one that did most, in one sentence."""
    rose = [
        f"escape text {name!r} rose on benign prompts: {_numbers(change)}"
        for name, change in escapes.items()
        if direction(change, slight_nats=slight_nats, steep_nats=float("inf")) == "up"
    ]
    if rose or not escapes:
        return rose
    name, change = max(escapes.items(), key=lambda item: item[1].effect)
    return [f"no escape text rose by {slight_nats:g} nats; most did {name!r}: {_numbers(change)}"]


def _answered(shares: Mapping[str, Effect], refusal_share: float) -> tuple[list[str], bool]:
    """What became of the greedy answers to benign prompts, and whether it decides."""
    said, decides = [], False
    for name, change in shares.items():
        grew = change.ci_low > 0 and change.effect >= refusal_share
        decides = decides or grew
        word = (
            f"rose by {100 * refusal_share:g} points or more" if grew
            else "rose" if change.ci_low > 0 else "fell" if change.ci_high < 0 else "did not measurably change"
        )  # fmt: skip
        said.append(
            f"{name} of benign prompts, answered greedily, {word}: {100 * change.effect:+.1f} points "
            f"[{100 * change.ci_low:+.1f}, {100 * change.ci_high:+.1f}], n = {change.n}"
        )
    return said, decides


def share_change(before: Sequence[bool], after: Sequence[bool], confidence: float) -> Effect:
    """The change of a share on the same prompts, with Tango's score interval."""
    gained = sum(late and not early for early, late in zip(before, after, strict=True))
    lost = sum(early and not late for early, late in zip(before, after, strict=True))
    low, high = paired_share_interval(gained, lost, len(before), confidence)
    return Effect((gained - lost) / len(before), low, high, len(before))


def _numbers(change: Effect) -> str:
    return f"{change.effect:+.2f} nats [{change.ci_low:+.2f}, {change.ci_high:+.2f}], n = {change.n}"


def interval(change: Effect) -> dict[str, Any]:
    """An effect as it stands in `displacement.json`."""
    return {"effect": change.effect, "ci_low": change.ci_low, "ci_high": change.ci_high, "n": change.n}
