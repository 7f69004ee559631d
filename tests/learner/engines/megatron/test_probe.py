"""Fingerprints of gradients do not depend on how a tensor is divided, or multiplied in parts."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.engines.megatron import probe
from rollmesh.learner.engines.megatron.probe import Fingerprints
from rollmesh.learner.engines.tensors.boxes import full_box


@pytest.mark.parametrize("shape", [(3, 40), (90,), (1, 2, 33)])
def test_large_boxes_are_multiplied_in_parts(monkeypatch, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sums = []
    for at_once in (1 << 22, 7, 1):
        monkeypatch.setattr(probe, "_AT_ONCE", at_once)
        prints = Fingerprints(["other", "one"])
        prints.add("one", full_box(shape), values)
        sums.append(prints._sums)
    assert float(sums[0][1, 1]) == pytest.approx(float(values.double().square().sum()))
    for found in sums[1:]:
        torch.testing.assert_close(found, sums[0])
