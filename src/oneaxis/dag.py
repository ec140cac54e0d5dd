"""The code that a stage depends on, found by following its imports: what `dvc.yaml` declares, no more and no less.

`python -m oneaxis.dag` rewrites the code dependencies in `dvc.yaml`; a test fails when they differ. Imports inside
functions count: they are how stages keep their start cheap.
"""

import ast
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from oneaxis.config.schema import STAGE_SECTIONS

PACKAGE = "oneaxis"


def import_closure(script: Path, source: Path) -> list[str]:
    """Every module of oneaxis that `script` imports, directly or not.

    Args:
        script: a Python file. source: the folder that holds the package (`src`).

    Returns:
        Paths relative to the folder above `source`, sorted; `script` itself is the first.
    """
    root = source.parent
    found: set[Path] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        waiting.extend(_imported(path, source))
    rest = sorted(str(path.relative_to(root)) for path in found - {script})
    return [str(script.relative_to(root)), *rest]


def _imported(path: Path, source: Path) -> list[Path]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or not node.module, f"{path}: relative imports hide what a stage depends on"
            if node.module:
                modules.add(node.module)
                modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    files: list[Path] = []
    for module in modules:
        parts = module.split(".")
        if parts[0] != PACKAGE:
            continue
        # Importing a.b.c runs a/__init__, a/b/__init__ and a/b/c.
        for length in range(1, len(parts) + 1):
            base = source.joinpath(*parts[:length])
            for candidate in (base / "__init__.py", base.with_suffix(".py")):
                if candidate.is_file():
                    files.append(candidate)
    return files


def stage_code(root: Path, stage: str) -> list[str]:
    """The code dependencies of a stage, as `dvc.yaml` should declare them."""
    return import_closure(root / "stages" / f"{stage}.py", root / "src")


def rewrite(root: Path) -> None:
    """Rewrite the code dependencies of every stage in `dvc.yaml`, keeping all else (comments too)."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    path = root / "dvc.yaml"
    document: Any = yaml.load(path.read_text(encoding="utf-8"))
    for stage in STAGE_SECTIONS:
        data = [entry for entry in document["stages"][stage]["deps"] if not str(entry).endswith(".py")]
        document["stages"][stage]["deps"] = data + stage_code(root, stage)
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(document, file)


if __name__ == "__main__":
    rewrite(Path.cwd())
    sys.exit(0)
