"""A local Ray cluster of two nodes, `a` (the head) and `b`, each with a folder of its own: `python cluster.py FOLDER`.

Prints the address; a line of input kills node b as a power cut would; ends when its input ends.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

ADDRESS = "127.0.0.2"
"""Loopback; Ray takes 127.0.0.1 for the host's outward address when a driver joins."""


def cut_power(node: Any) -> None:
    """Kill all that runs on a node at once: when only its raylet dies, a job may yet hand in its result."""
    own = [psutil.Process(each.process.pid) for kind in node.all_processes.values() for each in kind]
    for process in [*own, *(below for each in own for below in each.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def main(folder: Path) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"include_dashboard": False, "num_cpus": 1, "resources": {"a": 1},
                        "node_ip_address": ADDRESS, "env_vars": {"ONEAXIS_NODE_ROOT": str(folder / "a")}},
    )  # fmt: skip
    node = cluster.add_node(num_cpus=1, resources={"b": 1}, node_ip_address=ADDRESS,
                            env_vars={"ONEAXIS_NODE_ROOT": str(folder / "b")})  # fmt: skip
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cut_power(node)
        cluster.remove_node(node, allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
