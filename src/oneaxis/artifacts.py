"""Artifact folders: written whole or not at all, each with a manifest of what it holds.

A *payload* (`artifacts/<stage>/`) holds only what the inputs decide: same inputs, same bytes. What a run adds
(times, machine, versions, commit) goes to its *provenance* (`artifacts/<stage>.provenance.json`), and flat numbers
with stable names to its *metrics* (`artifacts/<stage>.metrics.json`).
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from oneaxis.errors import UserError

ARTIFACTS = "artifacts"
MANIFEST = "manifest.json"


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with sorted keys. NaN and infinity are our bug, not a value."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read a JSON artifact.

    Raises:
        UserError: when it is missing or broken, naming the file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; `dvc repro` makes it") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target` when the block succeeds and vanishes when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        if target.is_symlink() or target.is_file():
            target.unlink()
        elif target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary folders of processes that were killed."""
    for path in folder.glob(".tmp-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def write_manifest(folder: Path, *, stage: str, params: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Write `manifest.json`: the stage, its parameters, what it wants to say, and every file with size and hash."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    write_json(folder / MANIFEST, {"stage": stage, "params": params, "notes": notes, "files": files})


def check_metrics(metrics: Mapping[str, float], stage: str) -> dict[str, float]:
    """Metrics as plain finite floats whose names start with the stage's prefix; anything else is our bug."""
    checked = {}
    for name, value in metrics.items():
        number = float(value)
        assert name.startswith(f"{stage}/"), f"metric {name} does not belong to {stage}"
        assert math.isfinite(number), f"metric {name} is {number}"
        checked[name] = number
    return checked


def verify_artifacts(root: Path) -> list[str]:
    """Re-hash every payload against its manifest: one line per file that is missing, changed or unknown."""
    problems = []
    for manifest in sorted((root / ARTIFACTS).glob(f"*/{MANIFEST}")):
        folder = manifest.parent
        recorded = read_json(manifest)["files"]
        found = {
            str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST
        }
        for name, facts in sorted(recorded.items()):
            path = folder / name
            if not path.is_file():
                problems.append(f"{path}: missing; `dvc checkout` restores it")
            elif sha256_file(path) != facts["sha256"]:
                problems.append(f"{path}: its content is not what {MANIFEST} recorded; `dvc repro -f -s` makes it anew")
        problems.extend(f"{folder / name}: not in {MANIFEST}" for name in sorted(found - set(recorded)))
    return problems
