"""The contract of every inference engine, whatever runs inside: a suite to inherit from.

A subclass provides the fixture `harness`; see `harness.py`. Parts of the suite may be inherited alone where a second
setting of an engine (another KV policy) changes nothing for the rest.
"""

from __future__ import annotations

from tests.generators.engines.contract_grammars import GrammarContract
from tests.generators.engines.contract_life import LifeContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_refusals import RefusalContract
from tests.generators.engines.contract_results import ResultContract
from tests.generators.engines.contract_streams import StreamContract
from tests.generators.engines.contract_swaps import SwapContract


class EngineContract(
    ResultContract,
    RefusalContract,
    SwapContract,
    PrefixContract,
    StreamContract,
    GrammarContract,
    LifeContract,
    PauseContract,
):
    """All of it."""
