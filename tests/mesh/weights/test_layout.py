"""Layout, manifest and tensors: what is placed is found again, and nothing malformed passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import (
    ALIGNMENT,
    BucketLayout,
    BucketSet,
    bucket_starts,
    check_manifest,
    digest_of,
    manifest_digest,
)
from rollmesh.mesh.weights.layout import DTYPE_BYTES, tensor_bytes
from rollmesh.mesh.weights.tensors import bytes_of, dtype_name, dtype_of, named_tensors, to_wire
from rollmesh.protos import trajectory_pb2, weights_pb2


def build(
    tensors: dict[str, torch.Tensor], bucket_bytes: int, ties: dict[str, str] | None = None
) -> tuple[weights_pb2.Manifest, bytearray]:
    """A manifest and its bytes, made without the publisher."""
    layout = BucketLayout(bucket_bytes)
    manifest = weights_pb2.Manifest(run="r", policy=trajectory_pb2.PolicyVersion(incarnation=1, version=3))
    data = bytearray()
    for name, tensor in tensors.items():
        raw = bytes(bytes_of(tensor.contiguous()))
        place = layout.place(len(raw))
        data.extend(bytes(place.start - len(data)) + raw)
        if place.opens_bucket:
            manifest.buckets.add()
        manifest.buckets[-1].nbytes = place.offset + len(raw)
        manifest.tensors.add(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tensor.shape,
            digest=digest_of(raw),
            bucket=place.bucket,
            offset=place.offset,
            nbytes=len(raw),
        )
    for name, twin in (ties or {}).items():
        entry = next(t for t in manifest.tensors if t.name == twin)
        manifest.tensors.add(name=name, dtype=entry.dtype, shape=entry.shape, tied_to=twin)
    data.extend(bytes(layout.total_bytes - len(data)))
    for start, bucket in zip(bucket_starts(manifest.buckets), manifest.buckets, strict=False):
        bucket.digest = digest_of(data[start : start + bucket.nbytes])
    manifest.digest = manifest_digest(manifest.tensors)
    return manifest, data


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.integers(64, 8192))
def test_places_do_not_overlap_and_are_aligned(sizes: list[int], bucket_bytes: int) -> None:
    layout = BucketLayout(bucket_bytes)
    end, bucket, starts = 0, -1, {}
    for size in sizes:
        place = layout.place(size)
        assert place.start >= end
        assert place.start % ALIGNMENT == 0
        assert place.offset % ALIGNMENT == 0
        assert place.opens_bucket == (place.bucket == bucket + 1)
        bucket = place.bucket
        starts.setdefault(bucket, place.start)
        assert place.offset == place.start - starts[bucket]
        assert place.offset + size <= bucket_bytes or place.opens_bucket
        end = place.start + size
    assert layout.total_bytes >= end
    assert layout.total_bytes % ALIGNMENT == 0


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])


@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=12), st.sampled_from([64, 200, 1 << 20]))
def test_tensors_survive_the_way_through_buckets(specs: list[tuple[tuple[int, ...], torch.dtype]], size: int) -> None:
    tensors = {f"t{i}": (torch.randn(shape) * 5).to(dtype) for i, (shape, dtype) in enumerate(specs)}
    manifest, data = build(tensors, size)
    check_manifest(manifest)
    assert BucketSet.full(manifest).nbytes == len(data)
    back = dict(named_tensors(manifest, data))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_ties_are_the_same_memory() -> None:
    manifest, data = build({"embed": torch.randn(3, 4)}, 1024, {"head": "embed"})
    check_manifest(manifest)
    back = dict(named_tensors(manifest, data))
    assert back["head"].data_ptr() == back["embed"].data_ptr()


def test_wire_dtype_leaves_integers_alone() -> None:
    assert to_wire(torch.randn(2), torch.bfloat16).dtype == torch.bfloat16
    assert to_wire(torch.arange(3), torch.bfloat16).dtype == torch.int64
    same = torch.randn(4)
    assert to_wire(same, torch.float32).data_ptr() == same.data_ptr()
    assert dtype_of("bfloat16") is torch.bfloat16


def test_a_flipped_bit_is_found(caplog: pytest.LogCaptureFixture) -> None:
    manifest, data = build({"a": torch.randn(10), "b": torch.randn(10)}, 1024)
    BucketSet.full(manifest).verify(0, data[: manifest.buckets[0].nbytes])
    data[7] ^= 1
    found = digest_of(data[: manifest.buckets[0].nbytes])
    with pytest.raises(WeightsError, match="bucket 0 of version 1:3 is damaged") as error:
        BucketSet.full(manifest).verify(0, data[: manifest.buckets[0].nbytes])
    # The announcer might have chosen what is read: a file of this host.
    assert found in caplog.text
    assert found not in str(error.value)


def _shape(m: weights_pb2.Manifest) -> None:
    m.tensors[0].shape[0] += 1


def _dtype(m: weights_pb2.Manifest) -> None:
    m.tensors[0].dtype = "complex64"


def _outside(m: weights_pb2.Manifest) -> None:
    m.tensors[0].offset = 1 << 40


def _bucket(m: weights_pb2.Manifest) -> None:
    m.tensors[0].bucket = 9


def _twice(m: weights_pb2.Manifest) -> None:
    m.tensors[1].name = m.tensors[0].name


def _dangling_tie(m: weights_pb2.Manifest) -> None:
    m.tensors[1].tied_to = "nowhere"


def _digest(m: weights_pb2.Manifest) -> None:
    m.digest = "0" * 32


def _empty(m: weights_pb2.Manifest) -> None:
    del m.tensors[:]


@pytest.mark.parametrize("damage", [_shape, _dtype, _outside, _bucket, _twice, _dangling_tie, _digest, _empty])
def test_malformed_manifests_are_refused(damage: object) -> None:
    manifest, _ = build({"a": torch.randn(4), "b": torch.randn(4)}, 1024)
    damage(manifest)  # type: ignore[operator]  # parametrized functions
    with pytest.raises(WeightsError, match=r"1:3|dtype"):
        check_manifest(manifest)


def test_digest_names_contents_not_places() -> None:
    tensors = {"a": torch.randn(40), "b": torch.randn(40)}
    assert build(tensors, 64)[0].digest == build(tensors, 1 << 20)[0].digest
    tensors["a"][0] += 1
    assert build(tensors, 64)[0].digest != build({"a": torch.zeros(40), "b": tensors["b"]}, 64)[0].digest


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_the_bytes_of_a_tensor_are_torch_s(dtype: str) -> None:
    tensor = torch.empty(3, 2, dtype=dtype_of(dtype))
    assert tensor_bytes(dtype, (3, 2)) == tensor.nbytes


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(WeightsError, match="complex64"):
        tensor_bytes("complex64", (2,))
    with pytest.raises(WeightsError, match="Tensor"):
        dtype_of("Tensor")
