"""Where a process runs, as workers and ranks tell the coordinator: in which node and zone.

Packs go to workers near the ranks that get them. That is all that hangs on it: it proves nothing,
and a wrong name only costs time.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

NODE = "DATASERVICE_NODE"
"""Variable with the node's name; Kubernetes has it as `spec.nodeName`."""
ZONE = "DATASERVICE_ZONE"
"""Variable with the zone's name, or any part of the network with quick links inside."""
NAME_CHARACTERS = 253
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_and_zone(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The node and the zone of this process; empty where they are not known.

    Without a name, a node is told by its kernel's boot, which all its containers see alike; the
    digest says nothing else of it.
    """
    node = environment.get(NODE, "") or _by_boot()
    return node[:NAME_CHARACTERS], environment.get(ZONE, "")[:NAME_CHARACTERS]


def _by_boot() -> str:
    try:
        boot = BOOT_ID.read_bytes()
    except OSError:
        return ""
    return f"boot-{hashlib.sha256(b'dataservice node' + boot).hexdigest()[:16]}"
