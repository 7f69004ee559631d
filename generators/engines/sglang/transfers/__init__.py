"""Transfers of weights from the generator's process into the server's."""

from __future__ import annotations

from rollmesh.generators.engines.sglang.transfers.interface import ServerTransfer, StagedWeights

__all__ = ["ServerTransfer", "StagedWeights"]
