from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.generators.openai_server.world import Serving


@pytest.fixture(scope="package")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An endpoint with weights of version 0."""
    torch.set_num_threads(1)
    found = Serving(tmp_path_factory.mktemp("served"), rollout__endpoint__enabled=True)
    found.swap(0)
    yield found
    found.close()
