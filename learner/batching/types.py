"""Sequences on their way into the model: one prompt with its response, and the packed micro-batch of many.

Layout of a packed micro-batch: N tokens in one row, made of segments. A prompt is one segment and appears once for all
neighbouring sequences that share it. A response is a segment that continues its prompt's. Positions count from 0 in a
prompt and continue in its responses. Attention sees a token's own segment and the one that it continues. No token is
padding, none sees another sequence, and a group's prompt is computed once. The log-prob of a token is read from the
hidden state of the token before it. The places of these, for the R trained tokens in order, are `predictors`. A token
at the end of a response that predicts nothing trained is left out. So is a sequence that trains nothing. A sequence is
never divided between micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts, TokenBatch


class Packing(Enum):
    """Layouts in which a model can compute the sequences of a micro-batch, the densest first."""

    SHARED = "shared"
    """All in one row, each prompt once: only attention passes anything from token to token, and it sees segments."""

    REPEATED = "repeated"
    """The same, but layers that carry a state from token to token compute every sequence with its prompt."""

    ROWS = "rows"
    """Each in a row of its own with its prompt, padded on the right: right for every model that only looks back."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt, as the vision part of a model takes them; on the host.

    Attributes:
        inputs: `pixel_values` and the like, by their names in transformers, images along the first dimension.
        places: int64 [F], tokens of the prompt that features of images stand for, one feature after another.
        positions: int64 [3, P], of the prompt's tokens in time, height and width; None: they count from 0.
    """

    inputs: Mapping[str, Tensor]
    places: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None

    @property
    def shift(self) -> int:
        """Positions of a response's tokens count from the prompt's length plus this."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """A prompt with one response, ready to train.

    Attributes:
        prompt_ids: int32 [P], P >= 1, with the tokens of images. Members of a group share one array (or equal ones).
        response_ids: int32 [T], T >= 1.
        response_mask: uint8 [T], 1 = trained.
        behaviour_log_probs: float32 [T], under the policy that sampled (masked entries are not read).
        advantages: float32 [T], or a float for all tokens.
        staleness: int32 [T], or an int for all tokens: versions between sampling and training.
        temperature: softmax temperature of the sampling; log-probs are computed at it (0 counts as 1).
        reward: of the whole response.
        prompt_experts: int16 [P, layers, K], to which the generator has routed the prompt's tokens; None: not known.
        response_experts: int16 [T - 1, layers, K], the same of the response but its last token; None: not known.
        images: of the prompt; members of a group share one object. None: text alone.
        token_rewards: float32 [T], in addition to the reward of the whole response; None: there are none.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.uint8]
    behaviour_log_probs: NDArray[np.float32]
    advantages: NDArray[np.float32] | float = 0.0
    staleness: NDArray[np.int32] | int = 0
    temperature: float = 1.0
    reward: float = 0.0
    prompt_experts: NDArray[np.int16] | None = None
    response_experts: NDArray[np.int16] | None = None
    images: PromptImages | None = None
    token_rewards: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Runs of tokens that follow one another in a sequence; S segments.

    Attributes:
        starts: int64 [S], first place in the row of N tokens.
        lengths: int64 [S], >= 1.
        prefix_starts: int64 [S], first place of the segment it continues.
        prefix_lengths: int64 [S], length of the segment it continues; 0 where it continues none.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prefix_starts: NDArray[np.int64]
    prefix_lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """The images of a micro-batch.

    Attributes:
        inputs: of every prompt with images, see `PromptImages`. They are on the host until the model is computed:
            nothing of a batch takes more memory.
        features: of the images of every such prompt.
        places: int64 [F], places in the row of N tokens that their features stand for; on the device.
    """

    inputs: Sequence[Mapping[str, Tensor]]
    features: Sequence[int]
    places: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """The model's input of a micro-batch, without the values that a loss sees; tensors on the micro-batch's device.

    Attributes:
        input_ids: int64 [1, N].
        position_ids: int64 [1, N]; or [3, 1, N], in time, height and width, where images need that.
        segments: how the N tokens hang together.
        predictors: int64 [R], place of the hidden state that predicts each trained token; on the host, as segments.
        labels: int64 [R], ids of the trained tokens.
        temperatures: float32 [R], or one float where all agree (0 became 1).
        sequence_ids: int64 [R], the sequence of every trained token.
        sequence_lengths: int64 [S], trained tokens per sequence.
        responses: int64 [segments], trained responses that each segment belongs to: all that share a prompt.
        routed_experts: int16 [N, layers, K], to which the generators have routed each token, -1 where it is not known;
            None: of no token.
        images: None: text alone.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    predictors: NDArray[np.int64]
    labels: Tensor
    temperatures: Tensor | float
    sequence_ids: Tensor
    sequence_lengths: Tensor
    responses: NDArray[np.int64]
    routed_experts: Tensor | None = None
    images: PackedImages | None = None


@dataclass(slots=True, eq=False)
class PackedBatch:
    """A micro-batch as the engine takes it; tensors on the device it was packed for.

    Attributes:
        row: the model's input.
        tokens: what algorithms see of the trained tokens.
        counts: this micro-batch's share of the global counts, sequences left out for their advantage included.
    """

    row: PackedRow
    tokens: TokenBatch
    counts: GlobalCounts

    @property
    def num_tokens(self) -> int:
        """N: tokens that the model computes, prompts included."""
        return self.row.input_ids.shape[1]
