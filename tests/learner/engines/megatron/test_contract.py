"""The contract of engines, by Megatron-Core's."""

from __future__ import annotations

from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.testing.contract import EngineContract
from rollmesh.testing.worlds import EngineLayout

LAYOUTS = (
    EngineLayout("one_process", 1, "megatron"),
    EngineLayout("tp2", 2, "megatron", {"parallel": ParallelSection(tp=2)}),
    EngineLayout("pp2", 2, "megatron", {"parallel": ParallelSection(pp=2)}),
    EngineLayout("dp2", 2, "megatron"),
)


class TestMegatron(EngineContract):
    layouts = LAYOUTS
    also_continued_in = (EngineLayout("fsdp2"), EngineLayout("fsdp2_two_ranks", 2))
