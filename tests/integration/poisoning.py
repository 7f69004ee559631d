"""A run in whose data is a prompt at which its engine fails: it ends as it would have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from examples.demo.model import build_tokenizer
from rollmesh.learner.data.order import DataOrder
from rollmesh.learner.recovery.consumption_log import read_log
from tests.integration import poisoned
from tests.integration.mesh import MeshRun

_FOLDER = Path(__file__).parent / "poison"
# A run with the engine hf is started with this module in the place of the command.
MODULE = poisoned.__name__
# Whose prompt it is: early, so that its turn comes in a short run.
_ORDINAL = 30


def environment(data: Path) -> Mapping[str, str]:
    """Variables of a run on this data: its engine raises at one prompt, where it has `interpreter` or MODULE."""
    prompt = pq.read_table(data / "train.parquet")["prompt"][_order(data).locate(_ORDINAL)[1]].as_py()
    return {"ROLLMESH_TEST_POISON": json.dumps(build_tokenizer().encode(prompt))}


def interpreter(python: Path, folder: Path) -> Path:
    """A command, written to `folder`, in the place of `python`: that of the generator, or of its engine's server."""
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nPYTHONPATH="{_FOLDER}:$PYTHONPATH" exec "{python}" "$@"\n')
    command.chmod(0o755)
    return command


def audit_poisoned(run: MeshRun, data: Path) -> None:
    """The prompt failed whenever its turn came, with the reason; nothing else did, and nothing was started again."""
    order = _order(data)
    _, row = order.locate(_ORDINAL)
    trained = {group.ordinal for use in read_log(run.folder / "consumption.jsonl") for group in use.groups}
    turns = [ordinal for ordinal in range(1, max(trained) + 1) if order.locate(ordinal)[1] == row]
    assert turns
    assert not trained & set(turns)
    summary = run.summary()
    train = summary["ledger"]["train"]
    # The next turn may have come before the end.
    assert len(turns) <= train["counters"]["failed"] <= len(turns) + 1, (turns, train)
    assert sum(train["causes"].values()) == train["counters"]["failed"], train
    assert all("RuntimeError: illegal instruction" in cause for cause in train["causes"]), train
    assert summary["restarts"] == {}, run.tail()


def _order(data: Path) -> DataOrder:
    return DataOrder(pq.read_metadata(data / "train.parquet").num_rows, seed=0, shuffle=True, epochs=None)
