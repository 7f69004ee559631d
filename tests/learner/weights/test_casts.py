"""Dtypes on the wire: what travels is what a cast by torch gives, bit for bit, and the manifest names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import check_manifest
from rollmesh.mesh.weights.tensors import dtype_name, named_tensors

WIRE = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
VERSION = PolicyVersion(1, 0)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("wire", WIRE, ids=dtype_name)
@pytest.mark.parametrize("master", WIRE, ids=dtype_name)
def test_floating_point_is_cast_and_nothing_else(tmp_path: Path, master: torch.dtype, wire: torch.dtype) -> None:
    torch.manual_seed(0)
    # Halfway cases, subnormals and values beyond the narrow dtypes' range are among them.
    values = torch.randn(500) * torch.logspace(-9, 5, 500)
    sent = {
        "weight": values.to(master),
        "transposed": values.reshape(20, 25).to(master).T,
        "steps": torch.arange(7),
        "table": torch.arange(5, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
    }
    publisher = WeightPublisher("run", {}, PublishRules(bucket_bytes=1000), directory=tmp_path)
    try:
        manifest = publisher.publish(VERSION, sent.items(), dtype_name(wire))
        check_manifest(manifest)
        found = dict(named_tensors(manifest, bytearray(publisher.version(VERSION).data.view())))
        named = {entry.name: entry.dtype for entry in manifest.tensors}
        for name, tensor in sent.items():
            expected = (tensor.to(wire) if tensor.is_floating_point() else tensor).contiguous()
            assert named[name] == dtype_name(expected.dtype)
            assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
            assert bits(found[name]) == bits(expected)
    finally:
        publisher.close()


def test_a_dtype_that_cannot_travel_is_refused_by_name(tmp_path: Path) -> None:
    publisher = WeightPublisher("run", {}, directory=tmp_path)
    try:
        with pytest.raises(WeightsError, match="complex64"):
            publisher.publish(VERSION, {"weight": torch.randn(3)}.items(), "complex64")
        with pytest.raises(WeightsError, match="tensor weight has dtype complex64"):
            publisher.publish(VERSION, {"weight": torch.randn(3, dtype=torch.complex64)}.items(), "float32")
        assert publisher.newest is None
    finally:
        publisher.close()
