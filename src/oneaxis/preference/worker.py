"""One process of a training with `train.processes` above 1, as `accelerate launch` starts it.

    python -m oneaxis.preference.worker FOLDER

Reads `training.json` and `watched.json` of the folder; the first process writes `rows.jsonl`, a line per logging step
for the live curves, and what `fit` writes. An error that all processes come to (a refused setting, a loss that is no
number) is left in `error.json`, and the exit code is 0, so that the launcher adds no report of its own.
"""

import json
import os
import sys
from pathlib import Path

import torch

from oneaxis.artifacts import write_json
from oneaxis.errors import RunError, UserError
from oneaxis.preference.trainer import Training, fit
from oneaxis.preference.watch import Watched


def main(folder: Path) -> None:
    """Take part in the training of `folder`."""
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    training = Training.read(folder / "training.json")
    watched = Watched.read(folder / "watched.json")

    def tell(values: dict[str, float], step: int) -> None:
        with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "values": values}) + "\n")

    try:
        fit(training, watched, folder, tell if rank == 0 else None)
    except (UserError, RunError) as error:
        if rank == 0:
            write_json(folder / "error.json", {"kind": type(error).__name__, "message": str(error)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
