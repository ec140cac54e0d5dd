"""Pydantic models: their JSON Schema, and the line of the class or field that each part of it comes from.

A model is imported, which runs its module; that happens in a child process (`oneaxis.lint.imported`). It is named as
`package.module:Model`, or by a .py file or a module: all models that it defines and that are not part of another one
there, or `file.py:Model`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneaxis.errors import UserError

LONGEST_IMPORT_S = 120.0
"""A module that imports torch and vLLM takes half a minute on a busy machine."""
DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Model:
    """A model, and its schema as `model_json_schema()` has it: what a client sends."""

    where: str
    schema: dict[str, Any]
    places: dict[str, tuple[str, int | None]]
    """File and line by the pointer of a class or field; "" is always there."""

    def place(self, pointer: str) -> tuple[str, int | None]:
        """File and line of a part of the schema: of its field if it is known, or else of its class."""
        while pointer not in self.places:
            pointer = pointer.rpartition("/")[0]
        return self.places[pointer]


def is_model_name(path: str) -> bool:
    """Whether a word of the command line names models rather than a schema file or a folder."""
    if path.endswith(".py"):
        return True
    if os.path.exists(path):
        return False
    data = (".json", ".jsonl", ".yaml", ".yml")
    return ":" in path or (DOTTED.fullmatch(path) is not None and "." in path and not path.lower().endswith(data))


def read_models(name: str) -> tuple[list[Model], list[UserError]]:
    """The models that a name stands for; and what is wrong where it cannot be imported, or one has no JSON Schema.

    Raises:
        UserError: no process can be started, or it ended before it answered.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="oneaxis-lint-") as folder:
            answer = Path(folder) / "answer.json"
            code = subprocess.run(
                # -P: nothing of this folder may stand in for a module of Python before the name's own is imported.
                [sys.executable, "-P", "-m", "oneaxis.lint.imported", name, str(answer)],
                stdin=subprocess.DEVNULL,
                # What a module prints as it is imported is not part of our answer.
                stdout=2,
                check=False,
                timeout=LONGEST_IMPORT_S,
            ).returncode
            found = json.loads(answer.read_text()) if code == 0 and answer.exists() else None
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{name}: cannot be imported: not done after {LONGEST_IMPORT_S:g} s; allowed: a module that imports here"
        ) from error
    except OSError as error:
        raise UserError(f"{name}: cannot be imported: {error.strerror}; allowed: a place for a new process") from error
    if found is None:
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        raise UserError(
            f"{name}: cannot be imported: it ended its process ({how}); allowed: a module that imports here"
        )
    models = [
        Model(each["where"], each["schema"], {at: (file, line) for at, (file, line) in each["places"].items()})
        for each in found["models"]
    ]
    return models, [UserError(error) for error in found["errors"]]
