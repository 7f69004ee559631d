"""The floor that arithmetic sets: how long the matrix products of a workload's step take by themselves.

Counted are the products with weights (projections, feed-forward, output layer), in the shapes in which they occur.
Decoding has batches of the sequences that run together. Training is over the packed tokens of the batch, forward once
and backward twice. Left out are attention, normalization, sampling, the optimizer and everything that is no arithmetic.
So a system's share of the floor is below one, and says how much of its time is arithmetic.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.workloads import Workload

_VOCABULARY = 32


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one thread for one step's products; `gflops` is the rate reached in training shapes."""

    generation_s: float
    training_s: float
    gflops: float

    def step_s(self, threads: int) -> float:
        """Seconds per step where `threads` threads divide all products perfectly."""
        return (self.generation_s + self.training_s) / threads


def weight_shapes(workload: Workload) -> list[tuple[int, int]]:
    """(inputs, outputs) of every weight matrix that a token passes."""
    hidden = workload.hidden
    attention = [(hidden, hidden), (hidden, hidden // 2), (hidden, hidden // 2), (hidden, hidden)]
    feed_forward = [(hidden, 4 * hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    return (attention + feed_forward) * workload.layers + [(hidden, _VOCABULARY)]


def measure_floor(workload: Workload, mean_tokens: float) -> Floor:
    """Measures the products on one thread.

    Args:
        mean_tokens: mean response length in tokens.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokens = max(1, round(workload.samples * mean_tokens))
        shapes = weight_shapes(workload)
        decode_s = _pass_seconds(shapes, workload.samples)
        train_s = 3 * _pass_seconds(shapes, tokens)
    finally:
        torch.set_num_threads(threads)
    flops = 3 * 2 * tokens * sum(inputs * outputs for inputs, outputs in shapes)
    # Slots are refilled at once, so that the passes needed are the tokens over the slots, not the longest response.
    return Floor(decode_s * mean_tokens, train_s, flops / train_s / 1e9)


def _pass_seconds(shapes: list[tuple[int, int]], rows: int) -> float:
    """Best time of one pass over all matrices with `rows` rows: a floor is what the machine can do undisturbed."""
    import torch

    operands = [(torch.ones(rows, inputs), torch.ones(inputs, outputs)) for inputs, outputs in shapes]
    best, deadline = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        for left, right in operands:
            torch.mm(left, right)
        best = min(best, time.perf_counter() - began)
    return best
