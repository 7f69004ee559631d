"""The page on tracking: its tables and its example are those of the code."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

from rollmesh.learner import callbacks
from rollmesh.learner.callbacks import Callback, EvaluationEnd
from rollmesh.run_handle import Run
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tracking.md").read_text()


def test_the_table_has_every_event() -> None:
    rows = dict(re.findall(r"^\| `(on_\w+)` \| [^|]* \| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert set(rows) == {name for name in vars(Callback) if name.startswith("on_")}
    for name, attributes in rows.items():
        event = getattr(callbacks, Callback.__dict__[name].__annotations__[_parameter(name)])
        assert re.findall(r"`(\w+)`", attributes) == [field.name for field in dataclasses.fields(event)]


def _parameter(method: str) -> str:
    return next(name for name in Callback.__dict__[method].__annotations__ if name not in ("run", "return"))


def test_the_example_stops_after_three_evaluations_without_progress() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    stopped: list[int] = []
    example, run = names["StopEarly"](), SimpleNamespace(stop=lambda: stopped.append(1))
    for version, reward in enumerate([0.1, 0.2, 0.2, 0.1]):
        example.on_evaluation_end(run, EvaluationEnd(1, version, reward, {}))
    assert not stopped
    example.on_evaluation_end(run, EvaluationEnd(1, 4, 0.0, {}))
    assert stopped == [1]


def test_the_table_of_the_handle_names_its_methods() -> None:
    rows = re.findall(r"^\| `(\w+)\(.*?\)` \|", PAGE, re.MULTILINE)
    assert set(rows) == {name for name, value in vars(Run).items() if callable(value) and not name.startswith("_")}
