"""Digests computed again from an engine's tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.generators.weights.served_digest import inspect
from rollmesh.learner.weights import WeightPublisher
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2


def published(tmp_path: Path, dtype: str) -> tuple[weights_pb2.Manifest, dict[str, torch.Tensor]]:
    shared = torch.nn.Parameter(torch.randn(6, 8), requires_grad=False)
    tensors = {"embed": shared, "norm": torch.randn(8), "count": torch.arange(4), "head": shared}
    publisher = WeightPublisher("run", {"config.json": b"{}"}, directory=tmp_path)
    manifest = publisher.publish(PolicyVersion(1, 0), tensors.items(), dtype)
    publisher.close()
    wire = getattr(torch, dtype)
    return manifest, {
        name: tensor.detach().to(wire) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }


def test_what_was_announced_is_found(tmp_path: Path) -> None:
    manifest, tensors = published(tmp_path, "float32")
    found = inspect(AnnouncedWeights(manifest), tensors)
    assert (found.digest, found.not_comparable, found.differing) == (manifest.digest, "", [])


@pytest.mark.parametrize(
    ("wire", "engine", "comparable"),
    [
        ("bfloat16", "float32", True),
        ("float16", "float32", True),
        ("float16", "bfloat16", False),
        ("bfloat16", "float16", False),
        ("float8_e4m3fn", "float32", True),
        ("float8_e4m3fn", "bfloat16", True),
        ("float8_e5m2", "float16", True),
        ("float8_e5m2", "float8_e4m3fn", False),
        ("float8_e4m3fn", "float8_e5m2", False),
    ],
)
def test_an_engine_of_a_wider_dtype_holds_the_same_weights(
    tmp_path: Path, wire: str, engine: str, comparable: bool
) -> None:
    manifest, tensors = published(tmp_path, wire)
    dtype = getattr(torch, engine)
    held = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    found = inspect(AnnouncedWeights(manifest), held)
    assert found.digest == (manifest.digest if comparable else "")
    assert bool(found.not_comparable) != comparable


def test_a_single_bit_is_found_by_name(tmp_path: Path) -> None:
    manifest, tensors = published(tmp_path, "float32")
    for name in ("norm", "head"):
        wrong = dict(tensors)
        wrong[name] = tensors[name].clone()
        wrong[name].view(torch.int32).view(-1)[3] ^= 1
        found = inspect(AnnouncedWeights(manifest), wrong)
        assert found.differing == [name]
        assert found.digest not in ("", manifest.digest)


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    manifest, tensors = published(tmp_path, "float32")
    assert "a form of its own" in inspect(AnnouncedWeights(manifest), None).not_comparable
    rounded = {**tensors, "norm": tensors["norm"].to(torch.bfloat16)}
    assert "holds norm as torch.bfloat16" in inspect(AnnouncedWeights(manifest), rounded).not_comparable
    del rounded["embed"]
    assert "no tensor embed" in inspect(AnnouncedWeights(manifest), rounded).not_comparable
