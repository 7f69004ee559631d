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
from rollmesh.generators.engines.hf import decoder
from rollmesh.generators.engines.hf.model.traced_forward import DirectForward
from tests.generators.pacing import PaceOfFile

if __name__ == "__main__":
    preparation = json.loads(sys.argv.pop(1))
    os.chdir(preparation["folder"])
    # A variable that is read late; a process that is forked has those of the others.
    os.environ["TMPDIR"], tempfile.tempdir = preparation["temporary"], None
    if preparation["pace"]:
        PaceOfFile(preparation["pace"]).install()
        # To record the forward pass takes longer than the few tokens do.
        decoder.record = lambda loaded, *_: DirectForward(loaded.model)
    exec(preparation["first"])
    main()
