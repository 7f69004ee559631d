"""A micro-batch that is padded to the length of a longer one."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.sequences import whole_sequences
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from tests.learner.engines.models import make_sequences

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("more", [0, 4, 400])
def test_padding_is_in_sequences_that_are_no_longer_than_the_real_ones(cp, tp, more):
    # Megatron-Core is not imported where tests are merely collected.
    from rollmesh.learner.engines.megatron.computing.inputs import padded_tokens, prepare_inputs

    sizes = ParallelSizes(2 * cp * tp, tp=tp, cp=cp, pp=2, vpp=2, layers=(1, 1, 1, 1))
    batch = pack(make_sequences(3))
    wanted = padded_tokens(batch, sizes)
    inputs = [
        prepare_inputs(batch, sizes, sizes.place_of(process), torch.device("cpu"), wanted + more)
        for process in range(0, sizes.processes, tp)
    ]
    lengths = inputs[0].sequences.cu_seqlens_q.diff()
    assert int(lengths.sum()) == wanted + more
    plain = prepare_inputs(batch, sizes, sizes.place_of(0), torch.device("cpu"))
    assert inputs[0].sequences.max_seqlen_q == plain.sequences.max_seqlen_q == int(lengths.max())
    assert {each.input_ids.shape[1] for each in inputs} == {(wanted + more) // cp}
    real = int(whole_sequences(batch.row.segments).lengths.sum())
    assert sum(int((each.responses > 0).sum()) for each in inputs[:cp]) == real
