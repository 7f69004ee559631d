"""Ends what `tests.devices_watched` has begun. `python -m tests.devices_unwatched` tells what was loaded until then."""

from __future__ import annotations

import json
import sys

import torch

from tests.devices_watched import CALLED, REAL

for _owner, _name, _real in REAL:
    setattr(_owner, _name, _real)
LOADED = [*sys.modules, "tests.devices_unwatched"]
"""All modules, in the order in which their imports ended."""

if __name__ == "__main__":
    from tests import devices_unwatched

    print(json.dumps({
        "loaded": devices_unwatched.LOADED,
        "called": CALLED,
        "poisoned": torch.cuda._is_in_bad_fork(),
    }))  # fmt: skip
