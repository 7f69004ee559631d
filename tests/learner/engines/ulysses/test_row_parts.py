"""The parts of a row hold each of its tokens once, and give back every trained token's value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.fsdp2.ulysses.row_parts import part_of
from tests.learner.engines.models import make_sequences


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("groups", [1, 4])
def test_parts_make_the_row(parts, groups):
    row = pack(make_sequences(5, groups=groups)).row
    tokens = row.input_ids.shape[1]
    divided = [part_of(row, number, parts) for number in range(parts)]
    lengths = {part.input_ids.shape[1] for part in divided}
    assert lengths == {-(-tokens // parts)}
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in divided], 1)
        assert torch.equal(joined[:, :tokens], getattr(row, name))
    for part in divided:
        # A segment of its own for padding: together they cover all tokens of all parts.
        assert int(part.segments.lengths.sum()) == parts * part.input_ids.shape[1]
        assert np.array_equal(part.segments.lengths[: len(row.segments.lengths)], row.segments.lengths)
    values = [_padded(part.input_ids[0, torch.from_numpy(part.predictors)], part.most) for part in divided]
    labels = [_padded(part.labels, part.most) for part in divided]
    places = divided[0].places
    if parts == 1:
        assert places is None
        places = torch.arange(len(row.labels))
    assert torch.equal(torch.cat(values)[places], row.input_ids[0, torch.from_numpy(row.predictors)])
    assert torch.equal(torch.cat(labels)[places], row.labels)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)))
