"""Adapters as versions: names, digests, checks, and the one rule by which they are merged."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.learner.weights.version_layout import VersionLayout
from rollmesh.learner.weights.version_part import copy_part, digest_part
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import check_manifest
from rollmesh.mesh.weights.adapter import FROZEN_BASE, adapted_weight, attach_base, check_factors, factor_names
from rollmesh.mesh.weights.merging import effective_tensors
from rollmesh.protos import weights_pb2

WEIGHT = "model.layers.0.mlp.up_proj.weight"
A, B = factor_names(WEIGHT)


def version(policy: PolicyVersion, tensors: dict[str, torch.Tensor]) -> tuple[weights_pb2.Manifest, memoryview]:
    """A version of this process alone, and its bytes."""
    layout = VersionLayout([ExportedTensor(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], 1 << 20)
    data = memoryview(bytearray(layout.nbytes))
    copy_part(layout.part(0), tensors.items(), data)
    return layout.manifest("run", policy, {0: digest_part(layout.part(0), data)}), data


def adapted(
    dtype: torch.dtype = torch.float32, scale: float = 0.5, rank: int = 2
) -> tuple[weights_pb2.Manifest, memoryview, memoryview, dict[str, torch.Tensor]]:
    """A version that is an adapter: its manifest, its bytes, those of its base, and all tensors."""
    torch.manual_seed(0)
    base = {"model.norm.weight": torch.randn(6).to(dtype), WEIGHT: torch.randn(8, 6).to(dtype)}
    factors = {A: torch.randn(rank, 6).to(dtype), B: torch.randn(8, rank).to(dtype)}
    of_base, base_data = version(FROZEN_BASE, base)
    manifest, data = version(PolicyVersion(1, 4), factors)
    attach_base(manifest, of_base, scale)
    return manifest, data, base_data, base | factors


def test_names_are_those_of_peft() -> None:
    assert A == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    assert [adapted_weight(name) for name in (A, B, WEIGHT)] == [WEIGHT, WEIGHT, None]


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float32, 1)])
def test_an_adapter_is_merged_in_float32_and_rounded_once(dtype: torch.dtype, rank: int) -> None:
    manifest, data, base, tensors = adapted(dtype, rank=rank)
    check_manifest(manifest)
    found = dict(effective_tensors(manifest, data, base))
    product = tensors[B].double() @ tensors[A].double()
    expected = (tensors[WEIGHT].double() + 0.5 * product).to(dtype)
    assert found.keys() == {"model.norm.weight", WEIGHT}
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"])
    torch.testing.assert_close(found[WEIGHT], expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert dict(effective_tensors(manifest.base, base, None)).keys() == found.keys()


def test_the_digest_counts_base_and_scale() -> None:
    digests = {adapted()[0].digest, adapted(scale=0.25)[0].digest}
    other = adapted()[0]
    assert other.digest in digests
    changed, _ = version(FROZEN_BASE, {"model.norm.weight": torch.ones(6), WEIGHT: torch.ones(8, 6)})
    plain, _ = version(PolicyVersion(1, 4), {A: torch.ones(2, 6), B: torch.ones(8, 2)})
    digests.add(plain.digest)
    attach_base(plain, changed, 0.5)
    digests.add(plain.digest)
    assert len(digests) == 4


def _without_b(manifest: weights_pb2.Manifest) -> None:
    del manifest.tensors[1]


def _of_no_weight(manifest: weights_pb2.Manifest) -> None:
    manifest.base.tensors[1].name = "model.other.weight"


def _of_another_shape(manifest: weights_pb2.Manifest) -> None:
    manifest.tensors[0].shape[:] = [6, 2]


def _scaled(manifest: weights_pb2.Manifest) -> None:
    manifest.scale = 1.0


def _damaged(manifest: weights_pb2.Manifest) -> None:
    manifest.base.tensors[0].digest = "0" * 32


def _nested(manifest: weights_pb2.Manifest) -> None:
    manifest.base.base.CopyFrom(weights_pb2.Manifest.FromString(manifest.base.SerializeToString()))


def _another_version(manifest: weights_pb2.Manifest) -> None:
    manifest.base.policy.version = 3


@pytest.mark.parametrize(
    "change", [_without_b, _of_no_weight, _of_another_shape, _scaled, _damaged, _nested, _another_version]
)
def test_an_adapter_that_does_not_fit_is_refused(change: Callable[[weights_pb2.Manifest], None]) -> None:
    manifest = adapted()[0]
    change(manifest)
    with pytest.raises(WeightsError):
        check_manifest(manifest)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([3, 6], [8, 2]),
        ([2, 5], [8, 2]),
        ([2, 6], [7, 2]),
        ([0, 6], [8, 0]),
        ([6], [8, 2]),
        ([2, 6, 1], [8, 2]),
    ],
)
def test_factors_without_a_product_of_the_weights_shape_are_refused(a: list[int], b: list[int]) -> None:
    manifest = adapted()[0]
    manifest.tensors[0].shape[:], manifest.tensors[1].shape[:] = a, b
    with pytest.raises(WeightsError, match=re.escape(f"are {b} and {a}")):
        check_factors(manifest)
