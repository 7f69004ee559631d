"""Checksums by which ranks compare what they hold; the comparison itself is in `test_worker`, on two ranks."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.distributed.batch_agreement import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool])
def test_a_checksum_sees_every_element_and_its_place(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 0, 0, 1, 1]).to(dtype)
    others = [values.roll(1), values[:-1], torch.cat((values, torch.zeros(1, dtype=dtype))), ~values.bool()]
    sums = [int(checksum(x.to(dtype))) for x in (values, *others)]
    assert len(set(sums)) == len(sums)
    assert int(checksum(values.clone())) == sums[0]
    assert int(checksum(values.repeat_interleave(2)[::2])) == sums[0]


def test_a_long_batch_is_summed_up_in_parts() -> None:
    values = torch.rand((1 << 20) + 3)
    for place in (0, 1 << 20, -1):
        changed = values.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(2.0))
        assert int(checksum(changed)) != int(checksum(values))
    assert int(checksum(torch.zeros(0))) == 0
