"""How an engine is told to guess: the `draft` section as vLLM's `speculative_config`."""

from pathlib import Path
from typing import Any

from oneaxis.config.schema import Draft, DraftLayers, ServeSection
from oneaxis.errors import UserError

ARGUMENT = "speculative_config"


def check_num_layers(settings: DraftLayers, policy_layers: int) -> None:
    """Whether the policy has layers to leave out.

    Raises:
        UserError: the draft would have as many, or more.
    """
    if settings.num_layers >= policy_layers:
        raise UserError(f"draft.num_layers={settings.num_layers}: allowed: fewer than the policy has ({policy_layers})")


def speculating(serve: ServeSection, draft: Draft, checkpoint: Path) -> ServeSection:
    """The `serve` section with the engine argument that `draft` stands for.

    Args:
        checkpoint: of the draft model; read with `draft.kind=layers` alone.

    Raises:
        UserError: the engine is also told by `serve.engine_args` how to guess.
    """
    if draft.kind == "none" or serve.kind == "attach":
        return serve
    if ARGUMENT in serve.engine_args:
        raise UserError(f"serve.engine_args.{ARGUMENT}: draft={draft.kind} sets this; allowed: one of them")
    config: dict[str, Any] = {"num_speculative_tokens": draft.num_tokens}
    if draft.kind == "ngram":
        config |= {"method": "ngram", "prompt_lookup_min": draft.lookup_min, "prompt_lookup_max": draft.lookup_max}
    else:
        config |= {"method": "draft_model", "model": str(checkpoint.resolve())}
    return serve.model_copy(update={"engine_args": {**serve.engine_args, ARGUMENT: config}})
