"""Answers whose scores are known: one JSONL file for each kind of data, named as the scorer.

A row has a prompt, a response, a ground truth, and the range in which its total has to be. The rows are unambiguous:
every careful scorer of such data agrees on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rollmesh.mesh.errors import ConfigError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.samples import item


@dataclass(frozen=True, slots=True)
class Known:
    """A response with its known score: from `low` to `high`."""

    number: int
    data_source: str
    prompt: str
    response: str
    truth: Any
    extra_info: dict[str, Any]
    low: float
    high: float

    def as_item(self, prefix: str) -> reward_pb2.ScoreItem:
        """The item, alone in its group."""
        return item(
            f"{prefix}/{self.number}",
            self.response,
            json.dumps(self.truth),
            group_id=f"{prefix}/{self.number}",
            data_source=self.data_source,
            prompt=self.prompt,
            extra_info_json=json.dumps(self.extra_info),
        )

    def allows(self, total: float | None) -> bool:
        """True if a total is within the range; None: it was not scored."""
        return total is not None and self.low <= total <= self.high


def names() -> list[str]:
    """All packs."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".jsonl") for file in files if file.name.endswith(".jsonl"))


def pack(name: str) -> Sequence[Known]:
    """The rows of a pack.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in names():
        raise ConfigError(f"no golden pack {name!r}", hint=f"there are {', '.join(names())}")
    lines = (resources.files(__name__) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [
        Known(
            number,
            row["data_source"],
            row.get("prompt", ""),
            row["response"],
            row["ground_truth"],
            row.get("extra_info", {}),
            row["low"],
            row["high"],
        )
        for number, row in enumerate(rows)
    ]
