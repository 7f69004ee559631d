"""How weights go from the generator's process into the server's."""

from __future__ import annotations

from rollmesh.generators.engines.sglang.transfers.base import Staged, Transfer

__all__ = ["Staged", "Transfer"]
