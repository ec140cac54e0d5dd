"""A local Ray cluster of two nodes, each with a folder of its own: `python cluster.py FOLDER`.

Prints the address, then obeys lines: `kill a` kills node a as a power cut would. Ends when its input ends.
"""

import sys
from pathlib import Path

from ray.cluster_utils import Cluster


def main(folder: Path) -> None:
    ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False,
                                                        "node_ip_address": "127.0.0.1"})  # fmt: skip
    nodes = {
        name: ray.add_node(num_cpus=1, resources={name: 1}, node_ip_address="127.0.0.1",
                           env_vars={"ONEAXIS_NODE_ROOT": str(folder / name)})
        for name in ("a", "b")
    }  # fmt: skip
    print(ray.address, flush=True)
    for line in sys.stdin:
        ray.remove_node(nodes[line.split()[1]], allow_graceful=False)
        print("killed", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
