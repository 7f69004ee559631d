"""The micro-batches in flight on a stage: those whose forward pass is done and whose backward pass is not.

Stages take turns as Megatron-Core 0.16.1 has them do it (`pipeline_parallel/schedules.py`), one forward pass and one
backward pass (arXiv:2104.04473). Stage s of p begins with p - s - 1 forward passes, so that it has p - s micro-batches
in flight. Interleaved, with v parts of the layers on each stage, it begins with 2 (p - s - 1) + (v - 1) p passes
through a part. So the first stage keeps 1 + (p - 1) / (p v) times what all L layers keep of one micro-batch
(arXiv:2205.05198, sec. 4.2.3); without interleaving it keeps what all of them do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from rollmesh.learner.engines.megatron.parallel import ParallelSizes


def parts_in_flight(sizes: ParallelSizes, stage: int, micro_batches: int) -> int:
    """Passes through a part of the stage's layers that are in flight, at most.

    Args:
        sizes: of the divisions.
        stage: pipeline rank.
        micro_batches: of an optimizer step.
    """
    later = sizes.pp - stage - 1
    begun = later if sizes.vpp == 1 else 2 * later + (sizes.vpp - 1) * sizes.pp
    return min(begun + 1, scheduled(sizes, micro_batches) * sizes.vpp)


def scheduled(sizes: ParallelSizes, micro_batches: int) -> int:
    """Micro-batches that run: interleaved stages take turns in groups of them, which are filled up."""
    return -(-micro_batches // sizes.pp) * sizes.pp if sizes.vpp > 1 else micro_batches


def waiting(sizes: ParallelSizes, micro_batches: int) -> float:
    """The time that stages wait, as a share of the time that they compute (arXiv:2104.04473, sec. 2.2)."""
    return (sizes.pp - 1) / (scheduled(sizes, micro_batches) * sizes.vpp)


def most_in_flight(sizes: ParallelSizes, stage: int, micro_batches: int, parts: Sequence[int]) -> int:
    """The largest sum, over time, of what the parts in flight keep.

    Args:
        sizes: of the divisions.
        stage: pipeline rank.
        micro_batches: of an optimizer step.
        parts: bytes that one micro-batch keeps in each of the stage's `vpp` parts.
    """
    begun = parts_in_flight(sizes, stage, micro_batches)
    # After a few rounds the same parts come again.
    count = min(scheduled(sizes, micro_batches), 4 * sizes.pp)
    forward = list(_order(sizes, count))
    held = list(accumulate(parts[part] for part in forward))
    done = [0, *accumulate(parts[sizes.vpp - 1 - part] for part in forward)]
    return max(held[number] - done[number - begun + 1] for number in range(begun - 1, len(forward)))


def _order(sizes: ParallelSizes, micro_batches: int) -> Iterator[int]:
    """The part that each forward pass goes through; backward passes have the parts in reverse."""
    for start in range(0, micro_batches, sizes.pp):
        for part in range(sizes.vpp):
            yield from [part] * min(sizes.pp, micro_batches - start)
