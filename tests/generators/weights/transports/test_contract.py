"""All transports under the contract of transports."""

from __future__ import annotations

import pytest

from tests.generators.weights.transports.cases import CASES
from tests.generators.weights.transports.contract import TransportContract
from tests.generators.weights.transports.world import Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestTransports(TransportContract):
    """Every transport keeps the contract."""

    case: Case
