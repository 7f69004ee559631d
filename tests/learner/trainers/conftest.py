"""Shared by the tests of trainers: a model and its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.learner.trainers.tiny import write_chat_model, write_rows


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def row_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_rows(tmp_path_factory.mktemp("rows"))
