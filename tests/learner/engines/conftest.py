"""Shared work of the engine tests: a model, and which tests of a suite run in which tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.learner.engines.models import make_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves to `make test-all` those tests of a class that its attribute `FIRST_TIER` does not name.

    It holds names of tests, each alone or with a part of its parameters: "test_name experts".
    """
    unused: dict[type, set[str]] = {}
    for item in items:
        suite = getattr(item, "cls", None)
        if suite is None or not hasattr(suite, "FIRST_TIER"):
            continue
        test, _, parameters = item.name.partition("[")
        named = {
            entry
            for entry in suite.FIRST_TIER
            for name, _, part in [entry.partition(" ")]
            if name == test and part in parameters
        }
        if not named:
            item.add_marker(pytest.mark.exhaustive)
        unused[suite] = unused.get(suite, set(suite.FIRST_TIER)) - named
    # Not where single tests were asked for.
    if any(unused.values()) and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"FIRST_TIER names tests that do not exist: {unused}")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_hidden_layers=1)
