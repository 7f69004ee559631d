"""A program of the reward service that `forking_workers` starts: it takes its descriptors, and becomes the service's.

Its arguments: the module whose `main` runs, the number of its descriptors, and the path on which its owner finds
modules. The descriptors are the first ones of this process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

if __name__ == "__main__":
    _module, _count, _path = sys.argv[1:]
    sys.path[:] = json.loads(_path)
    _taken = [os.dup(number) for number in range(int(_count))]
    _nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(_nothing, 0)
    os.close(_nothing)
    sys.argv = ["-c", *map(str, _taken)]
    importlib.import_module(_module).main()
