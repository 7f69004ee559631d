"""The quickstart: the configuration that it shows is what `rollmesh init` writes, and its commands are whole.

`python -m examples.quickstart` runs all of them; here what takes time is left out.
"""

from __future__ import annotations

from examples.quickstart.page import commands, configuration, reward
from rollmesh.initialization.inputs import DataLook, MachineLook, ModelLook
from rollmesh.initialization.proposal import Wishes, propose
from rollmesh.initialization.writing import to_yaml


def test_the_page_shows_what_init_writes() -> None:
    data = DataLook("quickstart/train.parquet", "prompt", None, True, False, ("demo/arithmetic",), 6, 500)
    model = ModelLook("quickstart/model", 128, 153_024, False)
    wishes = Wishes("first", "quickstart/eval.parquet", ["rewards.py:score"])
    settings = propose(model, data, MachineLook(2, 0), wishes, lambda _name: True)
    written = to_yaml(settings, ["Written by `rollmesh init`."])
    assert sorted(written.splitlines()) == sorted(configuration().splitlines())


def test_the_commands_go_from_a_model_to_a_trained_one() -> None:
    done = [command.split()[1] for command in commands() if command.startswith("rollmesh ")]
    assert done == ["init", "run", "run", "status", "evals", "samples", "report", "export", "eval"]
    assert commands()[0].startswith("python -m examples.demo.prepare")
    assert reward().startswith("# rewards.py\n")
