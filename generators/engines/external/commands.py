"""What is asked of a driven engine as a whole, the swaps of weights among it."""

from __future__ import annotations

from typing import Any

from rollmesh.generators.engines import commands
from rollmesh.generators.engines.commands import Pause, Probe, Resume, Sleep, Wake

# What a backend made of the tensors is its own.
Update = commands.Update[Any]
Control = Pause | Resume | Sleep | Wake
Order = Control | Probe | Update
