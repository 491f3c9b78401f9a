"""A Ray cluster of two boxes on this machine with the app of `homeserve.integrations.ray`, for test_slow_ray.py.

argv: the arguments of the app as JSON, a port. Prints one line of JSON when it serves, and one
for each line that it reads: {url, replicas: {id: {pid, node, alive}}}. Takes everything down when its input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve
from ray._private import state
from ray.cluster_utils import Cluster

from homeserve.integrations.ray import app

OBJECT_STORE_BYTES = 80 << 20
_NAME = "SERVE_REPLICA::default#replica#"


def facts(url: str) -> dict[str, Any]:
    """Every replica that there was, by the id that answers carry."""
    found = {}
    for actor in state.actors().values():
        if actor["Name"].startswith(_NAME):
            address = actor["Address"]
            alive = actor["State"] == "ALIVE"
            found[actor["Name"].removeprefix(_NAME)] = {"pid": actor["Pid"], "node": address["NodeID"], "alive": alive}
    return {"url": url, "replicas": found}


def main(args: dict[str, Any], port: int) -> None:
    own: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "resources": {"box": 1}}
    head = {**own, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**own)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        try:
            serve.run(app(args))
        except RuntimeError:
            print(serve.status(), file=sys.stderr)
            raise
        print(json.dumps(facts(f"http://127.0.0.1:{port}")), flush=True)
        for _ in sys.stdin:
            print(json.dumps(facts(f"http://127.0.0.1:{port}")), flush=True)
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
