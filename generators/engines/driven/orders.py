"""What is asked of a driven engine as a whole, the swaps of weights among it."""

from __future__ import annotations

from typing import Any

from rollmesh.generators.engines import orders
from rollmesh.generators.engines.orders import Pause, Probe, Resume, Sleep, Wake

# What a backend made of the tensors is its own.
Update = orders.Update[Any]
Control = Pause | Resume | Sleep | Wake
Order = Control | Probe | Update
