"""Aggregation of per-token losses to the batch's loss.

Every mode divides by counts of the whole optimizer batch (all micro-batches, all ranks). So a micro-batch's result is
its share: shares add up to the same loss whatever the split. L_it is the loss of token t of sequence i, |y_i| its
trained tokens. With N all trained tokens and G all sequences that have any:

==========================  =================================================================
token_mean                  sum_it L_it / N                       (DAPO, arXiv:2503.14476, eq. 12)
seq_mean_token_mean         sum_i (sum_t L_it / |y_i|) / G        (GRPO, arXiv:2402.03300, eq. 3)
seq_mean_token_sum          sum_i (sum_t L_it) / G
seq_mean_token_sum_norm     sum_i (sum_t L_it) / (G * horizon)    (Dr. GRPO, arXiv:2503.20783, sec. 3.2)
token_sum                   sum_it L_it
==========================  =================================================================

verl's names are the same with hyphens. TRL names the modes by the loss types that use them, and divides by counts that
differ in parts from the ones here:

==========  =======================  ========================================================
TRL         here                     TRL's own count
==========  =======================  ========================================================
grpo        seq_mean_token_mean      sequences of the micro-batch, empty ones too
bnpo        token_mean               tokens of the local micro-batch: depends on the split
dapo        token_mean               the same, over all micro-batches and ranks
dr_grpo     seq_mean_token_sum_norm  sequences of the micro-batch; horizon = longest completion
luspo       seq_mean_token_sum       sequences of the micro-batch; meant for a sequence's ratio (`gspo`)
==========  =======================  ========================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import GlobalCounts, TokenBatch

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]
AGGREGATIONS: tuple[Aggregation, ...] = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "token_sum",
)

# TRL's loss types.
ALIASES: Mapping[str, Aggregation] = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "luspo": "seq_mean_token_sum",
}


def read_aggregation(name: str) -> Aggregation:
    """Understands the names above, also with hyphens (verl's spelling), and TRL's.

    Raises:
        SettingsError: unknown name.
    """
    wanted = name.replace("-", "_")
    for known in AGGREGATIONS:
        if wanted == known:
            return known
    if wanted in ALIASES:
        return ALIASES[wanted]
    raise SettingsError("aggregation", f"unknown mode {name!r}", hint=f"known: {', '.join((*AGGREGATIONS, *ALIASES))}")


def aggregate(
    token_loss: Tensor, tokens: TokenBatch, counts: GlobalCounts, mode: Aggregation, horizon: float = 1.0
) -> Tensor:
    """A micro-batch's share of the loss.

    Args:
        token_loss: float [R].
        tokens: the tokens of the micro-batch, with their sequences.
        counts: sizes of the whole optimizer batch.
        mode: see the module.
        horizon: constant length of `seq_mean_token_sum_norm`, in tokens.

    Returns:
        0-d; zero for a micro-batch without trained tokens.
    """
    if mode == "token_sum":
        return token_loss.sum()
    if mode == "token_mean":
        return token_loss.sum() / max(counts.tokens, 1)
    sequences = max(counts.sequences, 1)
    if mode == "seq_mean_token_sum":
        return token_loss.sum() / sequences
    if mode == "seq_mean_token_sum_norm":
        return token_loss.sum() / (sequences * horizon)
    lengths = tokens.sequence_lengths[tokens.sequence_ids].to(token_loss.dtype)
    return (token_loss / lengths).sum() / sequences
