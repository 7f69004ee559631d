"""The gradients of a step in Megatron's buffers, which have memory only until the optimizer has taken it.

Megatron reduces gradients at the end of a call: from then on only a rank's own range of each bucket holds the sum. A
further call for the same step would add to it and have it reduced again. So sums of earlier calls are put aside first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from rollmesh.learner.engines.megatron.computing.data_parallel import bucket_groups


class Gradients:
    """Gradients of one model.

    Args:
        chunks: wrapped.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._chunks = list(chunks)
        self._buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self._sizes = [buffer.grad_data.untyped_storage().nbytes() for buffer in self._buffers]
        self._aside: list[Tensor] = []
        self._present = self._reduced = False
        self.free()

    def prepare(self) -> None:
        """Makes room for another call's micro-batches."""
        if not self._present:
            for buffer, size in zip(self._buffers, self._sizes, strict=True):
                buffer.grad_data.untyped_storage().resize_(size)
            self._present = True
        elif self._reduced:
            if self._aside:
                self._join()
            self._aside = [own.clone() for own in self._own()]
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._reduced = False

    def mark_reduced(self) -> None:
        """Records that a call's gradients have been summed over the ranks."""
        self._reduced = True

    def finish(self) -> None:
        """Brings the sums of all calls together, zeros where there was none."""
        if not self._present:
            self.prepare()
        self._join()

    def free(self, *, broken: bool = False) -> None:
        """Gives the gradients up, and their memory.

        Args:
            broken: a pass has broken off, perhaps with some of them on their way.
        """
        if broken:
            for group in (group for chunk in self._chunks for group in bucket_groups(chunk)):
                if group.grad_reduce_handle is not None:
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None
                group.per_param_grad_ready_counts = {}
        self._aside.clear()
        self._reduced = False
        for buffer in self._buffers:
            # Views of it stay what they are, and are good again with their memory.
            buffer.grad_data.untyped_storage().resize_(0)
        self._present = False

    def tensors(self) -> Iterator[Tensor]:
        """Memory of the gradients that exist."""
        if self._present:
            yield from (buffer.grad_data for buffer in self._buffers)
        yield from self._aside

    def _join(self) -> None:
        for own, before in zip(self._own(), self._aside, strict=False):
            own.add_(before)
        self._aside.clear()

    def _own(self) -> Iterator[Tensor]:
        """This rank's range of every bucket."""
        for buffer in self._buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                yield bucket.grad_data.chunk(group.size())[group.rank()]
