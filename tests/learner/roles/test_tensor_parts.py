"""Tensors in parts: exactly what was sent, or an error that names the tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollmesh.learner.roles import tensor_parts
from rollmesh.learner.roles.tensor_parts import TensorAssembly, to_parts
from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import role_pb2

DTYPES = st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_])
ARRAYS = DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0)))


@given(st.dictionaries(st.text("abc.", min_size=1), ARRAYS), st.integers(1, 40))
def test_tensors_come_as_they_were_sent_whatever_the_parts(
    sent: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]], size: int
) -> None:
    assembly = TensorAssembly(1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parts, "PART_BYTES", size)
        for part in to_parts(sent):
            assembly.add(role_pb2.TensorPart.FromString(part.SerializeToString()))
    found = assembly.finish()
    assert found.keys() == sent.keys()
    for name, array in sent.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def part(**changes: object) -> role_pb2.TensorPart:
    """A part of a tensor of four bytes."""
    fields = {"name": "t", "dtype": "|u1", "shape": [4], "offset": 0, "data": b"abcd"}
    return role_pb2.TensorPart(**(fields | changes))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part(data=b"ab")], "2 of 4 bytes have come"),
        ([part(data=b"ab"), part(offset=3, data=b"d")], "does not follow"),
        ([part(data=b"ab"), part(offset=2, shape=[5], data=b"cd")], "does not follow"),
        ([part(data=b"abcde")], "more bytes"),
        ([part(dtype="|O8")], "unknown dtype"),
        ([part(shape=[1 << 40])], "more are allowed"),
        ([part(dtype="<f8", shape=[0, 1 << 62], data=b"")], "no array has the shape"),
        ([part(shape=[1] * 70, data=b"a")], "70 dimensions, and 8 are allowed"),
        ([part(shape=[0, 1 << 63], data=b"")], "no array has the shape"),
        ([part(), part(name="u", shape=[7], data=b"")], "more are allowed"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(parts: list[role_pb2.TensorPart], words: str) -> None:
    assembly = TensorAssembly(10)
    with pytest.raises(PayloadError, match=f"tensor .*{words}"):
        for each in parts:
            assembly.add(each)
        assembly.finish()
