"""The requests to both contenders of a comparison, and the rate that is computed from the answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import Mode, Workload
from rollmesh.generators.engines.types import EngineSettings, KvPolicy
from rollmesh.mesh.config.rollout import EngineName, SglangSection, VllmSection

# Responses never end by themselves: their lengths are what the plan says.
MODELS = {
    "small": Workload("engines-0.5m", 128, 2, 256, (Mode(1.0, None),)),
    "large": Workload("engines-3.9m", 256, 4, 256, (Mode(1.0, None),)),
}
_PROMPT_ROOM = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of one pass, and the engine that answers them.

    Attributes:
        engine: its name.
        model: folder, with weights.
        prompts: token ids of the prompts that groups take in turn.
        groups, n: prompts of a pass, and responses to each.
        shortest, longest: response lengths are spread evenly between them, one length per group.
        slots: sequences decoded together.
        kv: what becomes of running sequences at a swap.
        python: interpreter of the SGLang server.
        address: of the SGLang server that all contenders share.
    """

    engine: EngineName
    model: Path
    prompts: tuple[tuple[int, ...], ...]
    groups: int
    n: int = 8
    shortest: int = 64
    longest: int = 256
    slots: int = 64
    kv: KvPolicy = "keep"
    python: Path | None = None
    address: str | None = None

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return _PROMPT_ROOM + self.longest

    @property
    def rollout(self) -> dict[str, Any]:
        """The run's configuration of generators."""
        return {
            "engine": self.engine,
            "n": self.n,
            "device": "cpu",
            "slots": self.slots,
            "max_prompt_tokens": _PROMPT_ROOM,
            "max_response_tokens": self.longest,
            "vllm": {"kv_cache_gib": 0.5},
            "sglang": {"address": self.address},
        }

    def settings(self) -> EngineSettings:
        """The same for an engine alone: one compute thread."""
        return EngineSettings(
            slots=self.slots,
            context=self.context,
            kv=self.kv,
            threads=1,
            vllm=VllmSection(**self.rollout["vllm"]),
            sglang=SglangSection(python=self.python, address=self.address),
        )

    def group(self, index: int) -> tuple[tuple[int, ...], int]:
        """Prompt and response length of a group of a pass: the same in each pass and for each contender."""
        lengths = list(range(self.groups))
        random.Random(0).shuffle(lengths)
        share = lengths[index] / max(1, self.groups - 1)
        return self.prompts[index % len(self.prompts)], self.shortest + round(share * (self.longest - self.shortest))

    @property
    def tokens(self) -> int:
        """Response tokens of a pass."""
        return self.n * sum(self.group(index)[1] for index in range(self.groups))


@dataclass(frozen=True, slots=True)
class Arrival:
    """Responses that were there at once: when (seconds of a clock), how many, and their tokens."""

    at: float
    responses: int
    tokens: int


def steady_rate(arrivals: Sequence[Arrival], slots: int) -> float:
    """Tokens per second while all slots have work.

    The time runs from when as many responses as there are slots have come to when the last of them begin. Counted are
    tokens of responses that came after the first moment, up to and with the last one.

    Raises:
        ValueError: too few responses for that.
    """
    ordered = sorted(arrivals, key=lambda arrival: arrival.at)
    total, came, tokens = sum(arrival.responses for arrival in ordered), 0, 0
    began = ended = math.nan
    for arrival in ordered:
        came += arrival.responses
        if math.isnan(began):
            if came >= slots:
                began = arrival.at
        elif came <= total - slots:
            tokens += arrival.tokens
            ended = arrival.at
    if not ended > began:
        raise ValueError(f"{total} responses are too few for {slots} slots to be in use between the first and the last")
    return tokens / (ended - began)
