"""Whether the artifacts are what they say: from the artifact folder, params.yaml and dvc.lock to a line per problem.

`oneaxis verify`. Three independent records are compared: each payload's manifest (SHA-256 of every file), the settings
in `params.yaml`, and the hashes in `dvc.lock`. DVC itself trusts a file whose time and size have not changed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from oneaxis.artifacts import ARTIFACTS, MANIFEST, verify_artifacts
from oneaxis.config.compose import PARAMS, read_params
from oneaxis.errors import UserError
from oneaxis.recorded import read_manifest, read_rows, shown

LOCK = "dvc.lock"
MOST_SHOWN = 3


def verify(root: Path) -> list[str]:
    """Every problem of the project's artifacts, one line each.

    Raises:
        UserError: for a manifest, a params.yaml or a dvc.lock that cannot be read, and where nothing is to be compared.
    """
    manifests = sorted((root / ARTIFACTS).glob(f"*/{MANIFEST}"))
    for path in manifests:
        recorded = read_manifest(path)
        for name in ("params", "files"):
            if name not in recorded:
                raise UserError(f"{path}: has no {name}; `dvc repro -f -s {path.parent.name}` makes it anew")
    locked = (root / LOCK).is_file() and _locked_outputs(root / LOCK)
    if not manifests and not locked:
        raise UserError(f"{root}: nothing was made yet: there is no {ARTIFACTS}/*/{MANIFEST}, and no output in {LOCK}; "
                        "`oneaxis run` makes them")  # fmt: skip
    if not (root / LOCK).is_file():
        raise UserError(f"{root / LOCK}: missing: nothing says what {ARTIFACTS} should be; restore it (`git checkout "
                        f"{LOCK}`), or let `dvc repro` write it")  # fmt: skip
    return [*verify_artifacts(root), *other_settings(root), *other_than_locked(root)]


def other_settings(root: Path) -> list[str]:
    """The stages whose artifacts were made with other settings than `params.yaml` now holds."""
    if not (root / PARAMS).is_file():
        return []
    now = read_params(root)
    problems = []
    for path in sorted((root / ARTIFACTS).glob(f"*/{MANIFEST}")):
        recorded = read_manifest(path)["params"]
        then = _flat(recorded)
        wanted = _flat({section: now.get(section) for section in recorded})
        differ = [key for key in sorted({*then, *wanted}) if then.get(key) != wanted.get(key)]
        if differ:
            shown = [f"{key}={_said(then, key)} ({PARAMS}: {_said(wanted, key)})" for key in differ[:MOST_SHOWN]]
            more = f" and {len(differ) - MOST_SHOWN} more" if len(differ) > MOST_SHOWN else ""
            problems.append(f"{path.parent}: made with other settings: {', '.join(shown)}{more}; `dvc repro` makes it "
                            "with these")  # fmt: skip
    return problems


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Leaves by dotted key; lists are leaves, and an int differs from a bool or a float of the same value."""
    if isinstance(value, dict) and value:
        return {name: leaf for part, inner in value.items()
                for name, leaf in _flat(inner, f"{key}.{part}" if key else str(part)).items()}  # fmt: skip
    return {key: json.dumps(value, sort_keys=True)}


def _said(values: Mapping[str, str], key: str) -> str:
    return values.get(key, "absent")


def other_than_locked(root: Path) -> list[str]:
    """The outputs that are not those that `dvc.lock` recorded.

    A file is compared by its MD5. A folder is compared by the MD5 of its manifest where the cache has the folder's
    list (the manifest vouches for the rest), else by number and size of its files.

    Raises:
        UserError: when dvc.lock is not one that DVC writes.
    """
    path = root / LOCK
    if not path.is_file():
        return []
    problems = []
    for out in _locked_outputs(path):
        problem = _against_lock(root, out)
        if problem:
            problems.append(f"{root / out['path']}: {problem}; `dvc checkout` restores what {LOCK} recorded")
    return problems


def _locked_outputs(path: Path) -> list[dict[str, Any]]:
    """The outputs of all stages, each with its path and its hash."""
    try:
        held = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from error

    def wrong(where: str, value: Any, allowed: str) -> UserError:
        return UserError(
            f"{path}: {where} {shown(value)}; allowed: {allowed}, as DVC writes it (`git checkout {LOCK}`)"
        )

    if not isinstance(held, dict):
        raise wrong("holds", held, "an object with stages")
    stages = held.get("stages")
    if not isinstance(stages, dict):
        raise wrong("stages is", stages, "an object")
    found = []
    for name, stage in stages.items():
        if not isinstance(stage, dict):
            raise wrong(f"stages.{name} is", stage, "an object")
        outs = stage.get("outs", [])
        for out in outs if isinstance(outs, list) else [outs]:
            if not isinstance(out, dict) or not isinstance(out.get("path"), str):
                raise wrong(f"stages.{name}.outs holds", out, "objects with a path")
            found.append(out)
    return found


def _against_lock(root: Path, out: Mapping[str, Any]) -> str:
    path, recorded = root / out["path"], str(out.get("md5", ""))
    if not path.exists():
        return f"missing, and {LOCK} has it"
    if not recorded.endswith(".dir"):
        return "" if _md5(path) == recorded else f"its content is not that of {LOCK}"
    listed = root / ".dvc" / "cache" / "files" / "md5" / recorded[:2] / recorded[2:]
    if listed.is_file() and (path / MANIFEST).is_file():
        hashes = {entry["relpath"]: entry["md5"] for entry in read_rows(listed, {"relpath": str, "md5": str})}
        return "" if hashes.get(MANIFEST) == _md5(path / MANIFEST) else f"its manifest is not that of {LOCK}"
    files = [file for file in path.rglob("*") if file.is_file()]
    found = {"nfiles": len(files), "size": sum(file.stat().st_size for file in files)}
    differ = [f"{key} {found[key]}, not {out[key]}" for key in found if key in out and out[key] != found[key]]
    return f"not the folder of {LOCK} ({', '.join(differ)})" if differ else ""


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
