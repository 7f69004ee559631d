"""`rollmesh`, prepared for a test: python -m tests.generators.generator_process PREPARATION ARGUMENTS...

The preparation is an object of JSON. `folder` is where it works, and `temporary` is for temporary files. `pace` is a
file with the bound of responses, or empty. `first` holds statements that are executed before.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

from rollmesh.cli.app import main
from tests.generators.pacing import PaceOfFile

if __name__ == "__main__":
    preparation = json.loads(sys.argv.pop(1))
    os.chdir(preparation["folder"])
    # A variable that is read late; a process that is forked has those of the others.
    os.environ["TMPDIR"], tempfile.tempdir = preparation["temporary"], None
    if preparation["pace"]:
        PaceOfFile(preparation["pace"]).install()
    exec(preparation["first"])
    main()
