"""`python -m tests.integration.brief_trials ARGUMENT...`: `rollmesh` that tries each placement for a moment."""

from __future__ import annotations

import os
import sys

from rollmesh.launcher.trials import trials

# Whichever is found faster, the record says so. A second of measuring costs as much as its batches.
_LEAST_S = 0.3

if __name__ == "__main__":
    from rollmesh.cli.app import main

    trials._LEAST_S = _LEAST_S
    sys.orig_argv = [os.fspath(sys.executable), "-m", "rollmesh.cli", *sys.argv[1:]]
    main()
