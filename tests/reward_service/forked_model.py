"""The program of a model's process that `forking_workers` starts: it takes its socket, and becomes the service's.

Its arguments are the module that serves, and the path on which its owner finds modules.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

if __name__ == "__main__":
    _module, _path = sys.argv[1:]
    sys.path[:] = json.loads(_path)
    _taken, _nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(_nothing, 0)
    os.close(_nothing)
    sys.argv = ["-c", str(_taken)]
    importlib.import_module(_module).main()
