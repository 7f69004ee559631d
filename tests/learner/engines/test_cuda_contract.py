"""The contract of engines by FSDP2's on a CUDA device, in float32; its truth is transformers' eager code on a CPU."""

from __future__ import annotations

import pytest

from rollmesh.testing.contract import EngineContract
from rollmesh.testing.worlds import EngineLayout

pytestmark = pytest.mark.gpu


class TestOnCuda(EngineContract):
    """One device."""

    layouts = (EngineLayout("cuda", 1, "fsdp2", {"device": "cuda"}),)
    also_continued_in = (EngineLayout("fsdp2"),)
