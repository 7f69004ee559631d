"""The base of the contract's parts: every test runs in each layout of its class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from rollmesh.testing.worlds import EngineLayout


class Suite:
    """A part of the contract.

    Attributes:
        layouts: in which it is run.
    """

    layouts: ClassVar[Sequence[EngineLayout]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Runs every test in each layout."""
        if "world" in metafunc.fixturenames:
            names = [layout.name for layout in self.layouts]
            metafunc.parametrize("world", self.layouts, ids=names, indirect=True)
