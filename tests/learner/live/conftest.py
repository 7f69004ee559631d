"""Generators of these runs are in the process of the test, and sample a few tokens each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_is_recorded() -> Iterator[None]:
    """Engines call the model directly: recording its forward pass takes longer than all tokens of a run."""
    from rollmesh.generators.engines.hf import decoder
    from rollmesh.generators.engines.hf.model.traced_forward import DirectForward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "record", lambda loaded, *_: DirectForward(loaded.model))
        yield
