"""Torch is imported where a test needs it: the process that only hands tests out reads this file, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.generators.pacing import Pace


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    """The pace of generators in this process, without a bound at first."""
    from tests.generators.pacing import Pace

    pace = Pace()
    pace.install(monkeypatch.setattr)
    return pace
