"""The process of a model, with an engine that needs no model and breaks as its texts say."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence as Listed

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.served_model import program
from rollmesh.reward_service.served_model.engine import AwayError, RefusedError
from rollmesh.reward_service.served_model.messages import ModelOptions, Text
from rollmesh.reward_service.served_model.texts import Sequence

POISON, HANG, REFUSED, AWAY = (ord(character) for character in "phra")


class Letters:
    """Characters as tokens; the value is their number, and with `alone` that of the batch's sequences."""

    longest: int | None = 100
    lanes = 1

    def read(self, text: Text) -> Sequence:
        if text[1].startswith("x"):  # type: ignore[union-attr]
            threading.Event().wait()
        return Sequence([ord(character) for character in text[1]], [0])

    def values(self, batch: Listed[Sequence]) -> list[list[float]]:
        ids = {token for sequence in batch for token in sequence.ids}
        if POISON in ids:
            os._exit(7)
        if HANG in ids:
            threading.Event().wait()
        if REFUSED in ids:
            raise RefusedError("not this one")
        if AWAY in ids:
            raise AwayError("it is away")
        return [[float(len(sequence.ids)), float(len(batch))] for sequence in batch]


def _load(options: ModelOptions) -> tuple[Letters, Letters]:
    if options.folder == "bad":
        raise RewardError("no model", hint="another folder")
    return Letters(), Letters()


def main() -> None:
    program.load = _load  # type: ignore[assignment]
    program.main()
