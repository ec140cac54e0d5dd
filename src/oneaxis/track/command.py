"""`oneaxis track` and `oneaxis ui`."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from oneaxis.artifacts import ARTIFACTS
from oneaxis.errors import RunError, UserError
from oneaxis.live import first_line, store_uri, where
from oneaxis.multirun.record import MULTIRUN, PLAN, multirun_folder, read_plan
from oneaxis.pipeline import work_tree
from oneaxis.track.multirun import track_multiruns
from oneaxis.track.pages import multirun_page, runs_page
from oneaxis.track.run import track


def track_all(root: Path) -> int:
    """Complete the run of the work tree's present state and those of all multiruns whose records say more than MLflow.

    Raises:
        UserError: when another run is at work here. RunError: when MLflow's store cannot be used.
    """
    with work_tree(root):
        if any((root / ARTIFACTS).glob("*.metrics.json")):
            print(f"MLflow run {track(root)}")
    try:
        completed = track_multiruns(root)
    except Exception as error:
        raise RunError(f"MLflow ({where(root)}): {first_line(error)}; the records are kept, `oneaxis track` tries "
                       "again") from error  # fmt: skip
    held = len(list((root / MULTIRUN).glob(f"*/{PLAN}")))
    print(f"multiruns: {completed} completed, {held - completed} were complete")
    return 0


def show_pages(root: Path, multirun: str | None, port: int) -> int:
    """Print the addresses of the pages and serve them on 127.0.0.1 until interrupted.

    Raises:
        UserError: when there is no store yet, the port is taken, or there is no such multirun.
    """
    store = store_uri(root)
    served = store.startswith(("http://", "https://"))
    if store == f"sqlite:///{root.resolve() / 'mlflow.db'}" and not (root / "mlflow.db").is_file():
        raise UserError(f"{root / 'mlflow.db'}: missing; `oneaxis run` makes it")
    if not 0 < port < 65536:
        raise UserError(f"--port={port}: allowed: 1 to 65535")
    if not served:
        _check_free(port)
    newest = sorted(path.parent.name for path in (root / MULTIRUN).glob(f"*/{PLAN}"))[-1:]
    server = f"http://127.0.0.1:{port}"
    for name in [multirun] if multirun else newest:
        print(f"multirun {name}:\n  {multirun_page(root, server, read_plan(multirun_folder(root, name)))}")
    print(f"all runs:\n  {runs_page(root, server)}", flush=True)
    if served:
        return 0
    print("(Ctrl-C stops it)", flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    # The store by environment: a password in it would stand in the list of processes. MLflow starts children of its
    # own: they get a group, and the whole group is stopped.
    environment = {**os.environ, "MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=20)


def _check_free(port: int) -> None:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"--port={port}: {error.strerror}; allowed: a free port") from error
