"""Shared work of the engine tests: a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.learner.engines.models import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")
