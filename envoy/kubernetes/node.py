"""Takes the engine's pod out of traffic before it stops (`drain`), and puts it back at its start (`restore`).

Runs in the engine's container, with Python alone. It never fails: pods start and stop without Inferact, too.
"""

import json
import os
import sys
import time
import urllib.request

URL = os.environ["INFERACT_URL"]
NODE = os.environ["NODE"]
KEY = os.environ["INFERACT_ADMIN_KEY"]


def asked(path: str, method: str = "GET") -> dict:
    """What Inferact answers."""
    request = urllib.request.Request(URL + path, method=method, headers={"X-Inferact-Admin-Key": KEY})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)


def running() -> int:
    """Requests on this node, whoever sent them."""
    (node,) = (node for node in asked("/status")["nodes"] if node["id"] == NODE)
    return max(node["requests_in_flight"], (node["engine_running"] or 0) + (node["queue_depth"] or 0))


def main(action: str) -> None:
    """Drain or restore; after a drain, wait until nothing runs: the pod's grace period is the limit."""
    try:
        asked(f"/admin/nodes/{NODE}/{action}", "POST")
        if action == "drain":
            time.sleep(2)  # a report of the engine's from after the drain
            while running():
                time.sleep(1)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{NODE}: could not {action}: {error}\n")


main(sys.argv[1])
