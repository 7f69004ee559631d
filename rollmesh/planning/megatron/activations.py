"""Activations of a layer under Megatron-Core, in bytes: kept for the backward pass, and needed while it computes.

The method is that of arXiv:2205.05198, table 2, for the layers that the engine builds. On CUDA these are Transformer
Engine's norms and products, with fused rotary positions and SwiGLU. Attention keeps no scores, and there is no dropout.
Kept are there, in elements of a token, and divided by:

    inputs and outputs of both norms           4 H                            tp with sequence parallelism
    projections, rotated ones, and output      (q + 2 k) + (q + k) + q        tp
    of an MLP: both halves, their product      3 F                            tp
    of experts: input, both halves, product    C (H + 3 E / etp) etp          tp

H is the width, q and k those of queries and keys, F that of an MLP. A token has C experts of width E. Norms of heads
keep q + k more. Attention keeps a float32 for each head in addition, and a router two of each expert. On a CPU the same
layers consist of single operations, which keep more: see `PLAIN`.

`selective` recomputes an MLP from its input, and of experts the product of the halves alone. Full recomputation keeps a
layer's input. It is assumed that experts get equal numbers of tokens. Their rows do not change with ep: each rank sends
as many as it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.planning.megatron.model_sizes import Widths
from rollmesh.planning.role_memory import MASTER

Recompute = bool | Literal["selective"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Tensors that operations keep, as multiples of widths.

    Attributes:
        norm: hidden states for a norm.
        queries, keys: widths of queries (attention's output is one), and of keys or values.
        angles: widths of a head, of positions.
        head_norms: queries and keys for the norms of heads.
        mlp, expert: widths of an MLP and of an expert.
    """

    norm: int
    queries: int
    keys: int
    angles: int
    head_norms: int
    mlp: int
    expert: int


FUSED = Kernels(norm=2, queries=3, keys=3, angles=0, head_norms=1, mlp=3, expert=3)
"""Those of CUDA."""
PLAIN = Kernels(norm=3, queries=2, keys=2, angles=4, head_norms=3, mlp=5, expert=6)
"""Those of a CPU: norms keep their normalized input, and each operation of SwiGLU its own.

Attention copies its input, so that projections need not stay, except for the norms of heads.
"""


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of a micro-batch on one process, and its part of each width.

    Attributes:
        tokens: that a tensor-parallel group computes.
        sizes: of the divisions.
        compute_bytes: of an element.
        kernels: of the layers.
    """

    tokens: int
    sizes: ParallelSizes
    compute_bytes: int
    kernels: Kernels = FUSED

    def outside(self, width: float) -> int:
        """Bytes outside of matrices, where sequence parallelism divides tokens."""
        tokens = self.own_tokens if self.sizes.sequence_parallel else self.tokens
        return round(self.compute_bytes * tokens * width)

    def inside(self, width: float) -> int:
        """Bytes within divided matrices."""
        return round(self.compute_bytes * self.tokens * width / self.sizes.tp)

    def whole(self, width: float) -> int:
        """Bytes of all tokens in full width, as a divided matrix takes or gives them."""
        return round(self.compute_bytes * self.tokens * width)

    def routed(self, widths: Widths, width: float) -> int:
        """Bytes of the rows that experts of this process get; processes of one expert get the same rows."""
        return round(self.compute_bytes * self.own_tokens * widths.chosen * self.sizes.etp * width)

    @property
    def own_tokens(self) -> int:
        """Tokens where the group divides them, rounded up."""
        return -(-self.tokens // self.sizes.tp)


def kept(share: Share, widths: Widths, recompute: Recompute) -> int:
    """Bytes that a layer keeps of a micro-batch until its backward pass.

    Args:
        share: of this process.
        widths: of the layer.
        recompute: as `learner.activation_checkpointing`.
    """
    if recompute is True:
        return share.outside(widths.hidden)
    kernels = share.kernels
    attention = _attention(share, widths)
    if not widths.experts:
        if not recompute:
            return (
                share.outside(2 * kernels.norm * widths.hidden)
                + attention
                + share.inside(kernels.mlp * widths.feed_forward)
            )
        # On CUDA the second norm is computed with the MLP.
        norms = kernels.norm + (1 if kernels is FUSED else kernels.norm)
        return share.outside(norms * widths.hidden) + attention
    # Recomputing all of a mixture would send its tokens again.
    inner = kernels.expert - 1 if recompute else kernels.expert
    rows = share.routed(widths, widths.hidden + inner * widths.expert / share.sizes.etp)
    return share.outside(2 * kernels.norm * widths.hidden) + attention + rows + _router(share, widths)


def working(share: Share, widths: Widths, recompute: Recompute) -> int:
    """Bytes in a layer's backward pass, in addition to what all layers keep.

    They are what the layer computes again, and its largest gradients: those of the MLP or of attention. Sequence
    parallelism gathers the hidden states of all tokens before a product, and their gradients after it.

    Args:
        share: of this process.
        widths: of the layer.
        recompute: as `learner.activation_checkpointing`.
    """
    again = kept(share, widths, False) - kept(share, widths, recompute)
    hidden = share.whole(2 * widths.hidden)
    # Keys and values of other processes come while those of one are used, and leave with their gradients.
    exchanged = share.inside(8 * widths.keys) if share.sizes.cp > 1 else 0
    attention = share.inside(3 * widths.queries + 4 * widths.keys) + exchanged + hidden
    inner = (
        share.routed(widths, 2 * widths.hidden + share.kernels.expert * widths.expert / share.sizes.etp)
        if widths.experts
        else share.inside(share.kernels.mlp * widths.feed_forward) + hidden
    )
    return again + share.outside(2 * widths.hidden) + max(attention, inner)


def passing(share: Share, widths: Widths) -> int:
    """Bytes in a layer's forward pass that keeps nothing: its input and output, and its largest part."""
    attention = share.inside(3 * widths.queries + 3 * widths.keys) + share.whole(widths.hidden)
    inner = (
        share.routed(widths, 2 * widths.hidden + share.kernels.expert * widths.expert / share.sizes.etp)
        if widths.experts
        else share.inside(share.kernels.mlp * widths.feed_forward) + share.whole(widths.hidden)
    )
    return share.outside(2 * widths.hidden) + max(attention, inner)


def _attention(share: Share, widths: Widths) -> int:
    """Projections and what is made of them, output, angles of positions, and sums over keys of each head."""
    kernels = share.kernels
    width = kernels.queries * widths.queries + kernels.keys * widths.keys
    if widths.head_norms:
        width += kernels.head_norms * (widths.queries + widths.keys)
    angles = share.whole(kernels.angles * widths.queries / widths.heads)
    return share.inside(width) + angles + MASTER * share.tokens * widths.heads // share.sizes.tp


def _router(share: Share, widths: Widths) -> int:
    """Scores and probabilities of all experts, and which are chosen."""
    return share.own_tokens * ((2 * MASTER + 1) * widths.experts + 8 * widths.chosen)
