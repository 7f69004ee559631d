"""Tests of vLLM drive it in this process; SGLang's server has an interpreter of its own.

Torch is imported where a test needs it: the process that only hands tests out reads this file, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import engines_here

if TYPE_CHECKING:
    from tests.generators.engines.tiny import ContractModel


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> ContractModel:
    """The model of the contract's tests."""
    import torch

    from tests.generators.engines.tiny import ContractModel

    torch.set_num_threads(1)
    return ContractModel(tmp_path_factory.mktemp("contract-model"))


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_read_once() -> Iterator[None]:
    """Most engines of the `hf` kind here read the same small files, and take longer for the tokenizer than for the
    model."""
    from rollmesh.generators.engines.hf.model import loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_optional_tokenizer", functools.cache(loading.load_optional_tokenizer))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_recorded() -> Iterator[None]:
    """Engines of the `hf` kind call the model directly: to record its forward pass takes longer than most tests."""
    from rollmesh.generators.engines.hf import decoder
    from rollmesh.generators.engines.hf.model.traced_forward import DirectForward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "record", lambda loaded, *_: DirectForward(loaded.model))
        yield


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the `hf` kind record the forward pass, as they do for users."""
    from rollmesh.generators.engines.hf import decoder
    from rollmesh.generators.engines.hf.model.traced_forward import record

    monkeypatch.setattr(decoder, "record", record)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips, or fails, what needs vLLM in this very environment."""
    engine = item.get_closest_marker("engine")
    if engine is not None and engine.args[0] == "vllm":
        engines_here.require_inside("vllm")
