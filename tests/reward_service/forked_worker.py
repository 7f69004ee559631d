"""The program of a reward worker that `forking_workers` starts: it takes its descriptors, and becomes the service's.

The last argument is the path on which the owner finds modules.
"""

from __future__ import annotations

import json
import os
import sys

from rollmesh.reward_service.workers import program

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[-1])
    taken = [os.dup(0), os.dup(1)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = ["-c", *map(str, taken)]
    program.main()
