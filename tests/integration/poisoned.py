"""`python -m tests.integration.poisoned ARGUMENT...`: `rollmesh` whose engine hf raises at one prompt of the data.

All its services can be forked. A variable for the start of an interpreter would have each of them executed.
ROLLMESH_TEST_POISON holds the prompt's tokens, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

_NAME = "tests.integration.poisoned"


def _poison() -> None:
    from rollmesh.generators.engines.hf.model.prefill import Prefiller

    poison = json.loads(os.environ["ROLLMESH_TEST_POISON"])
    forward = Prefiller._forward

    def failing(self: Any, sequences: Any, images: Any) -> Any:
        if any(list(ids[: len(poison)]) == poison for ids in sequences):
            raise RuntimeError("illegal instruction")
        return forward(self, sequences, images)

    Prefiller._forward = failing  # type: ignore[method-assign]


def _hand_on() -> None:
    """Starts services with this module, too."""
    from rollmesh.launcher import services

    services.command_of = partial(services.command_of, module=_NAME)  # type: ignore[assignment]


if __name__ == "__main__":
    from rollmesh.cli.app import main

    if sys.argv[1] == "generator":
        _poison()
    elif sys.argv[1] == "run":
        _hand_on()
    sys.orig_argv = [os.fspath(sys.executable), "-m", "rollmesh.cli", *sys.argv[1:]]
    main()
