"""Sequences on their way into the model: one prompt with its response, and the packed micro-batch of many.

Layout of a packed micro-batch: the sequences stand one behind the other in a single row of N tokens, positions
restart at 0, and `cu_seqlens` holds their borders, so that no token is padding and none sees another sequence. The
log-prob of the token at place p is read from the hidden state at p - 1; `predictors` holds these places for the
R trained tokens, in order. A sequence is never divided between micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithms.types import GlobalCounts, TokenBatch


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One prompt with one response, ready to train.

    Attributes:
        prompt_ids: int32 [P], P >= 1.
        response_ids: int32 [T], T >= 1.
        response_mask: uint8 [T], 1 = trained.
        behaviour_log_probs: float32 [T], under the policy that sampled (masked entries are not read).
        advantages: float32 [T], or a float for all tokens.
        staleness: int32 [T], or an int for all tokens: versions between sampling and training.
        temperature: softmax temperature of the sampling; log-probs are computed at it (0 counts as 1).
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.uint8]
    behaviour_log_probs: NDArray[np.float32]
    advantages: NDArray[np.float32] | float = 0.0
    staleness: NDArray[np.int32] | int = 0
    temperature: float = 1.0

    def __len__(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(slots=True, eq=False)
class PackedBatch:
    """A micro-batch as the model takes it.

    Attributes:
        input_ids: int64 [1, N].
        position_ids: int64 [1, N], restarting at 0 with each sequence.
        cu_seqlens: int32 [S + 1], borders of the sequences; cu_seqlens[0] = 0, cu_seqlens[S] = N.
        max_seqlen: longest sequence in tokens.
        predictors: int64 [R], place of the hidden state that predicts each trained token.
        labels: int64 [R], ids of the trained tokens.
        temperatures: float32 [R], or one float where all agree (0 became 1).
        tokens: what algorithms see of the trained tokens.
        source: index of each sequence in the list it was packed from, [S].
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    predictors: Tensor
    labels: Tensor
    temperatures: Tensor | float
    tokens: TokenBatch
    source: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """N, prompts included."""
        return self.input_ids.shape[1]

    @property
    def counts(self) -> GlobalCounts:
        """This micro-batch's share of the global counts."""
        lengths = self.tokens.sequence_lengths
        return GlobalCounts(self.tokens.num_tokens, int((lengths > 0).sum()))
