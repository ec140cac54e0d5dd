"""From `conf/` and overrides to a validated configuration, and from `params.yaml` back to a stage's part of it.

Hydra composes, pydantic validates, ruamel.yaml (the loader that DVC uses) writes and reads `params.yaml`. Every
mistake becomes one `UserError` line with the key, the value and what is allowed.
"""

import copy
import io
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from oneaxis.config.schema import (
    ARRIVAL_SETTINGS,
    NO_STAGE,
    STAGE_SECTIONS,
    Config,
    Shape,
    derived_paths,
    without_secret,
)
from oneaxis.errors import UserError

PARAMS = "params.yaml"


def compose(conf_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """Compose `conf_dir/config.yaml` with Hydra overrides and validate it.

    Raises:
        UserError: for an unknown group choice or key, a wrong type or value, or a broken file under `conf_dir`.
    """
    return validate(compose_raw(conf_dir, overrides), origin="settings")


@dataclass(frozen=True)
class Composed:
    """One composition, with what is needed to tell a group's choice from a key."""

    config: Config
    choices: Mapping[str, str | None]
    """Group -> the choice made, by the command, a profile, an experiment or the defaults list."""
    overrides: tuple[str, ...]
    unresolved: dict[str, Any]
    """As composed: references (`${key}`) still in place, nothing validated."""


def compose_all(conf_dir: Path, overrides: Sequence[str] = ()) -> Composed:
    """`compose`, with the choice of every group, from one composition.

    Raises:
        UserError: as `compose`.
    """
    values, unresolved, choices = _compose(conf_dir, overrides)
    return Composed(validate(values, origin="settings"), choices, tuple(overrides), unresolved)


def compose_unresolved(conf_dir: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, str | None]]:
    """What `conf/` says before references are resolved and values validated, and the choice of every group.

    A mandatory value that is not given is `???`.
    """
    _, unresolved, choices = _compose(conf_dir, overrides, resolve=False)
    return unresolved, choices


def compose_raw(conf_dir: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose without validating: plain dicts, lists and scalars, interpolations resolved."""
    return _compose(conf_dir, overrides)[0]


def _compose(
    conf_dir: Path, overrides: Sequence[str], *, resolve: bool = True
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str | None]]:
    """Values, the same with references in place, and choices.

    What was composed before, from files that have not changed since, is not composed again: it takes Hydra a fifth of
    a second, and a plan asks for the same many times.
    """
    return copy.deepcopy(_composed(conf_dir, _state(conf_dir.resolve()), tuple(overrides), resolve))


def _state(conf_dir: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of every YAML file below, in order."""
    found = []
    for path in conf_dir.rglob("*.yaml"):
        # A link to nothing is the reader's to complain about.
        with suppress(OSError):
            seen = path.stat()
            found.append((str(path), seen.st_size, seen.st_mtime_ns))
    return tuple(sorted(found))


@lru_cache(maxsize=512)
def _composed(
    conf_dir: Path, state: tuple[tuple[str, int, int], ...], overrides: tuple[str, ...], resolve: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str | None]]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not (conf_dir / "config.yaml").is_file():
        raise UserError(f"{conf_dir}: holds no config.yaml; run oneaxis from the root of an oneaxis project")
    for override in overrides:
        if re.search(r"\$\{(hydra|now|oc\.env|oc\.create|oc\.decode)[:}.]", override):
            raise UserError(f"{override}: ${{hydra:}}, ${{now:}} and ${{oc.*}} would be frozen into {PARAMS}; "
                            "allowed: plain values and references to other keys")  # fmt: skip
        group, _, choice = override.lstrip("+").partition("=")
        if (conf_dir / group).is_dir() and re.fullmatch(NO_CHOICE, choice.strip()):
            raise UserError(f"{override}: {group} is a group; allowed: {_options(conf_dir / group)}")
    # A profile sets rates and shapes without knowing how requests arrive: they are [] where they would do nothing.
    OmegaConf.register_new_resolver(
        "with_rates",
        lambda rates, *, _root_: rates if "rates_rps" in ARRIVAL_SETTINGS.get(_root_.load.arrival, ()) else [],
        replace=True,
    )
    OmegaConf.register_new_resolver(
        "with_shapes", lambda shapes, *, _root_: [] if _root_.load.arrival == "trace" else shapes, replace=True
    )
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir.resolve())):
            composed = hydra_compose("config", overrides=[*map(_merged, overrides)], return_hydra_config=True)
        choices = {
            str(group): choice
            for group, choice in OmegaConf.to_container(composed.hydra.runtime.choices).items()
            if not str(group).startswith("hydra/")
        }
        ours = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        unresolved = OmegaConf.to_container(ours, resolve=False)
        values = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True) if resolve else {}
        if choices.get("pairs") == "on_policy" and choices.get("sample") == "none":
            raise UserError("pairs=on_policy, sample=none: there would be no pairs of the model's own; allowed: "
                            "sample=on_policy (which pairs=on_policy chooses), or pairs=all")  # fmt: skip
    except TypeError as error:
        # OmegaConf's own, for a name where a list has places.
        named = re.match(r"Index '(.*)' \(str\) is not an int", str(error))
        if not named:
            raise
        given = next((each for each in overrides if f".{named.group(1)}" in each), named.group(1))
        raise UserError(
            f"{without_secret(given)}: {named.group(1)} is no place of a list; allowed: 0, 1, ..."
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        unmerged = _no_mapping(conf_dir, overrides) if "raised while composing config" in str(error) else ""
        raise UserError(without_secret(unmerged or _explain_hydra(error, overrides, conf_dir))) from error
    except Exception as error:
        # Broken YAML reaches us as the parser's own exception; anything else is a bug and keeps its traceback.
        if type(error).__module__.startswith(("yaml", "antlr4")):
            raise UserError(f"conf: {_one_line(error)}") from error
        # So does a file whose content is no mapping, or no text, in words that do not name it.
        if isinstance(error, OSError | ValueError) and (said := _no_mapping(conf_dir, overrides)):
            raise UserError(said) from error
        raise
    return values, unresolved, choices


NO_CHOICE = r"(?i)null|true|false|nan|[-+]?inf|[-+]?[\d_]+(\.\d*)?(e[-+]?\d+)?"
"""Values of an override that name no choice of a group: Hydra reads them as numbers and the like."""


def _merged(override: str) -> str:
    """An override whose value is a mapping, as one that may bring keys: the schema says which keys there are.

    Hydra takes `load.classes={batch: ...}` for a change of keys that are there, and there are none.
    """
    key, _, value = override.partition("=")
    return f"+{override}" if re.fullmatch(r"[\w.]+", key) and value.lstrip().startswith("{") else override


def _no_mapping(conf_dir: Path, overrides: Sequence[str]) -> str:
    """The first file under `conf/` that holds no mapping, those of the chosen groups first; empty: there is none."""
    chosen = {override.partition("=")[2] for override in overrides}
    for path in sorted(conf_dir.rglob("*.yaml"), key=lambda path: (path.stem not in chosen, path)):
        where = f"{conf_dir.name}/{path.relative_to(conf_dir)}"
        try:
            content = _yaml().load(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        except UnicodeDecodeError as error:
            return f"{where}: not text: {_one_line(error)}; allowed: a mapping of settings in YAML"
        except YAMLError as error:
            return f"{where}: not YAML: {_one_line(error)}"
        if not isinstance(content, dict | str | None):
            return f"{where}: holds {type(content).__name__}; allowed: a mapping of settings"
    return ""


def _options(group: Path) -> str:
    return ", ".join(sorted(path.stem for path in group.glob("*.yaml")))


FREE_MAPPINGS = ("load.classes", "sample.engine.engine_args", "score.premises", "serve.engine_args",
                 "train.dpo_args", "train.probes.texts")  # fmt: skip
"""Settings whose keys are the user's: one that is not there yet is added by `+`."""


def _choices_with(key: str, conf_dir: Path) -> list[str]:
    """The choices of the key's group whose own file sets it, such as load=capacity for load.search.probes."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    group, _, inside = key.partition(".")
    found = []
    for path in sorted((conf_dir / group).glob("*.yaml")) if inside else []:
        with suppress(OSError, OmegaConfBaseException, YAMLError, ValueError):
            if OmegaConf.select(OmegaConf.load(path), inside) is not None:
                found.append(f"{group}={path.stem}")
    return found


def _explain_hydra(error: Exception, overrides: Sequence[str], conf_dir: Path) -> str:
    text = str(error)
    choice = re.search(r"Could not find '([\w./-]+)'.*?Available options in '([\w/]+)':((?:\n\s+[\w.-]+)+)", text, re.S)
    if choice:
        wrong, group = choice.group(1), choice.group(2)
        options = ", ".join(sorted(choice.group(3).split()))
        return f"{group}={wrong.removeprefix(group + '/')}: no such choice; allowed: {options}"
    missing = re.search(r"Missing mandatory value: ([\w.]+)", text)
    if missing:
        key = re.search(r"full_key: ([\w.]+)", text)
        name = key.group(1) if key else missing.group(1)
        return f"{name}: needs a value; give {name}=..."
    group_missing = re.search(r"Could not override '(\w[\w/.]*)'\.?\s*\n?\s*No match in the defaults list", text)
    if group_missing:
        return f"{group_missing.group(1)}: no such group; allowed: {', '.join(sorted(Config.model_fields))} and profile"
    unknown = re.search(r"Could not override '([\w.\[\]-]+)'", text)
    if unknown:
        given = next((o for o in overrides if o.lstrip("+~").startswith(unknown.group(1))), unknown.group(1))
        of_a_shape = re.fullmatch(r"load\.shapes\.\d+\.(\w+)", unknown.group(1))
        optional = of_a_shape is not None and of_a_shape.group(1) in Shape.model_fields
        if optional or unknown.group(1).startswith(tuple(f"{key}." for key in FREE_MAPPINGS)):
            return f"{given}: no such key yet; allowed: +{given.lstrip('+')}, which adds it"
        parent, _, _ = unknown.group(1).rpartition(".")
        hint = f"a key of `{parent}` as `oneaxis run --cfg job` shows it" if parent else ", ".join(Config.model_fields)
        if having := _choices_with(unknown.group(1), conf_dir):
            hint += f"; {' and '.join(having)} would have it"
        return f"{given}: no such key; allowed: {hint}"
    if merged := re.match(r"Error merging override \+?(.*)", text, re.S):
        held = re.search(r"object_type=(dict|list)", str(error.__cause__))
        name = merged.group(1).partition("=")[0]
        kinds = {"dict": f"a mapping, {name}={{name: value}}", "list": f"a list, {name}=[value, ...]"}
        allowed = kinds[held.group(1)] if held else "a value of the kind that `oneaxis run --cfg job` shows"
        return f"{merged.group(1)}: cannot be set to this; allowed: {allowed}"
    if "Error parsing override" in text or "overrides/grammar" in text or "override_grammar" in text:
        unread = re.search(r"Error parsing override '([^']*)'", text)
        said = unread.group(1) if unread else " ".join(overrides)
        return f"{said}: not an override; allowed: key=value, +key=value, ~key"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:500]


def validate(values: dict[str, Any], *, origin: str, sections: Sequence[str] | None = None) -> Config:
    """Check `values` against the schema; with `sections`, only these are read and present in the result.

    Raises:
        UserError: naming `origin`, the key, the value and what is allowed.
    """
    if sections is None:
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            raise UserError(_explain_validation(error, origin, "")) from error
    parts: dict[str, Any] = {}
    for section in sections:
        if section not in values:
            raise UserError(f"{origin}: {section} is missing; `oneaxis reset` restores the committed file")
        field = Config.model_fields[section]
        annotated: Any = field.annotation
        for extra in field.metadata:
            annotated = _annotate(annotated, extra)
        if field.discriminator:
            from pydantic import Field

            annotated = _annotate(annotated, Field(discriminator=field.discriminator))
        try:
            parts[section] = TypeAdapter(annotated).validate_python(values[section], strict=True)
        except ValidationError as error:
            raise UserError(_explain_validation(error, origin, section)) from error
    return Config.model_construct(**parts)


def _annotate(annotation: Any, extra: Any) -> Any:
    from typing import Annotated

    return Annotated[annotation, extra]


def _explain_validation(error: ValidationError, origin: str, prefix: str) -> str:
    lines: list[str] = []
    problems = error.errors(include_url=False)
    keys = [_key([prefix] if prefix else [], problem["loc"]) for problem in problems]
    for index, (key, problem) in enumerate(zip(keys, problems, strict=True)):
        if keys.index(key) < index and problem["type"] == "literal_error":
            # The other branch of a union: a number, or a word.
            lines[-1] += f", or {problem['msg'].removeprefix('Input should be ')}"
            continue
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"{key}={problem['input']!r}: no such key here; allowed: the keys that `oneaxis run --cfg job` shows"
            )
        elif problem["type"].startswith("union_tag_"):
            # The choice of a group, by the key that says which: its value, not the whole group, is what was wrong.
            said = problem.get("ctx", {})
            tag = f"{key}.{str(said.get('discriminator', 'kind')).strip(chr(39))}"
            allowed = str(said.get("expected_tags", "")).replace("'", "")
            given = f"{tag}={said['tag']}" if "tag" in said else f"{tag}: missing"
            lines.append(f"{given}; allowed: {allowed}" if allowed else f"{given}; allowed: one of the group's choices")
        elif problem["type"] == "value_error":
            # A check of several sections has no key of its own.
            lines.append(f"{key}: {message}" if key else message)
        elif problem["type"] == "missing":
            lines.append(f"{key}: missing; allowed: the keys that `oneaxis run --cfg job` shows")
        else:
            allowed = message.replace("Input should be ", "").replace("String should", "a string that should")
            lines.append(f"{key}={problem['input']!r}: allowed: {allowed}")
    return without_secret(f"{origin}: " + "; ".join(lines))


UNIONS = frozenset(name for name, field in Config.model_fields.items() if field.discriminator)
"""Sections that are told apart by their kind, which pydantic puts into the location of what is wrong in them."""

SCALARS = {"bool", "constrained-float", "constrained-int", "constrained-str", "float", "int", "str"}
"""Names of the branches of a union of plain values."""


def _key(prefix: list[str], location: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic location, without the tags of unions (`train.dpo.beta` -> `train.beta`)."""
    parts: list[str] = []
    for index, part in enumerate(places := [*prefix, *location]):
        if index == 1 and places[0] in UNIONS:
            continue
        if part in ("number", "uniform", "lognormal") and parts[-1:] in (["prompt_tokens"], ["output_tokens"]):
            continue
        if isinstance(part, str) and (part.endswith("]") and "[" in part):
            continue
        if index == len(places) - 1 and part in SCALARS:
            continue
        parts.append(str(part))
    return ".".join(parts)


# --- params.yaml ---------------------------------------------------------------------------------------------


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 100
    return yaml


def render_params(config: Config) -> str:
    """The text of `params.yaml`: sorted keys, resolved values, and the paths that follow from them."""
    values = config.model_dump(mode="json", exclude=set(NO_STAGE))
    values["paths"] = derived_paths(values)
    buffer = io.StringIO()
    buffer.write("# Composed from conf/ by `oneaxis run`; `oneaxis reset` restores the committed defaults.\n")
    _yaml().dump(_sorted(values), buffer)
    return buffer.getvalue()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def write_params(config: Config, root: Path) -> bool:
    """Write `params.yaml` atomically; False when it already held exactly this (its mtime then stays)."""
    text, target = render_params(config), root / PARAMS
    if target.is_file() and target.read_text(encoding="utf-8") == text:
        return False
    handle, name = tempfile.mkstemp(dir=root, prefix=".params-", suffix=".yaml")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, target)
    return True


def read_params(root: Path) -> dict[str, Any]:
    """`params.yaml` as plain values.

    Raises:
        UserError: when it is missing or not YAML.
    """
    path = root / PARAMS
    try:
        values = _yaml().load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; `oneaxis run` writes it") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {_one_line(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds {type(values).__name__}; allowed: a mapping of sections")
    return cast(dict[str, Any], values)


def load_stage_config(root: Path, stage: str) -> tuple[Config, dict[str, str], dict[str, Any]]:
    """What `stage` may read of `params.yaml`: its sections (typed), `paths`, and the same sections as plain values.

    Raises:
        UserError: when a section is wrong, or `paths` does not follow from the kinds (a hand-edited file).
    """
    values = read_params(root)
    sections = STAGE_SECTIONS[stage]
    config = validate(values, origin=PARAMS, sections=sections)
    try:
        expected = derived_paths(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{PARAMS}: a section or its kind is missing; `oneaxis reset` restores the file") from error
    for key, want in expected.items():
        found = (values.get("paths") or {}).get(key)
        if found != want:
            raise UserError(f"{PARAMS}: paths.{key}={found!r}: allowed: {want!r}, which the other settings imply")
    return config, expected, {section: values[section] for section in sections}
