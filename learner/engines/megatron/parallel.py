"""The place of a process in each of Megatron's divisions; pure arithmetic, Megatron-Core is not needed for it.

Megatron numbers processes in the order tensor, context, data, pipeline: neighbours share a tensor-parallel group. The
layers of experts divide the same processes in another way: expert tensor, expert, expert data, pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.learner.engines.layout import Layout


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """The sizes of the divisions.

    Attributes:
        processes: of the learner; a multiple of `tp * pp * cp` and of `etp * ep * pp`.
        tp: processes among which each matrix is divided.
        pp: stages, each with a part of the layers.
        vpp: parts of the layers that each stage has (interleaved stages).
        cp: processes among which the tokens of each sequence are divided.
        ep: processes among which the experts of a layer are divided.
        etp: processes among which each expert's matrices are divided.
        sequence_parallel: processes of a tensor-parallel group divide the tokens outside of its matrices.
        layers: layers of each part of the model, in the order in which tokens pass them: `pp * vpp` numbers.
    """

    processes: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    layers: tuple[int, ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.processes // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.processes // (self.etp * self.ep * self.pp)

    @property
    def sources(self) -> tuple[int, ...]:
        """Sources of results by data-parallel rank: see `Layout.sources`."""
        last = self.tp * self.cp * self.dp * (self.pp - 1)
        return tuple(last + self.tp * self.cp * rank for rank in range(self.dp))

    def layout_of(self, process: int) -> Layout:
        """The layout as the engine's users see it, from one process."""
        return Layout(self.place_of(process).dp, self.sources, process, self.processes)

    def place_of(self, process: int) -> ParallelPlace:
        """The place of a process."""
        rest, tp = divmod(process, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(process, self.etp)
        rest, ep = divmod(rest, self.ep)
        return ParallelPlace(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=rest % self.edp)

    def layers_of(self, stage: int, part: int) -> range:
        """Numbers of the layers in a part of a stage, counted over the whole model.

        Args:
            stage: pipeline rank.
            part: 0 .. vpp - 1.
        """
        index = part * self.pp + stage
        start = sum(self.layers[:index])
        return range(start, start + self.layers[index])


@dataclass(frozen=True, slots=True)
class ParallelPlace:
    """Ranks of a process, each within its group: see `ParallelSizes`."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0
    etp: int = 0
    ep: int = 0
    edp: int = 0
