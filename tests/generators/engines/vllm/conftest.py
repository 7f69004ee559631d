"""The session's vLLM; started where the first test asks for it, and again where a test has killed it.

All engine cores are forked from one process that has imported vLLM. Each would spend ten seconds of processor time on
that. In whole runs (tests/integration) they start as they do for users.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rollmesh.generators.engines.types import EngineSettings
    from tests.generators.engines.tiny import ContractModel
    from tests.generators.engines.vllm.shared import SharedVllm


@pytest.fixture(scope="session", autouse=True)
def forked_cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of vLLM are forked, from the first engine on, with a gate before the steps of engine cores."""
    from rollmesh.generators.engines.vllm import environment, fork_server, logs
    from tests.generators.engines.vllm import step_gate

    prepare, gate = environment.prepare, tmp_path_factory.mktemp("vllm") / "gate"
    step_gate.create(gate)
    with pytest.MonkeyPatch.context() as patch:

        def prepare_and_fork(settings: EngineSettings) -> None:
            prepare(settings)
            logs.kept_log().install()
            fork_server.start()
            fork_server.use()
            # Lest it touches a device, vLLM looks at the class of each model in a process that imports all of vLLM.
            registry = importlib.import_module("vllm.model_executor.models.registry")
            patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())

        patch.setenv(step_gate.FILE, str(gate))
        imported = [*fork_server._IMPORTED_ONCE, "tests.generators.engines.vllm.gated_cores"]
        patch.setattr(fork_server, "_IMPORTED_ONCE", imported)
        patch.setattr(environment, "prepare", prepare_and_fork)
        patch.setattr(logs, "EngineLog", logs.kept_log)
        yield


@pytest.fixture(scope="session")
def vllms(contract_model: ContractModel) -> Iterator[Callable[[], SharedVllm]]:
    """Gives one that lives."""
    from tests.generators.engines.vllm.shared import SharedVllm, VllmHarness, settings

    started: list[SharedVllm] = []

    def living() -> SharedVllm:
        if not started or started[-1].cause is not None:
            started.append(SharedVllm(contract_model.folder, settings(VllmHarness.slots)))
        return started[-1]

    yield living
    for shared in started:
        shared.close()


@pytest.fixture
def vllm(vllms: Callable[[], SharedVllm]) -> SharedVllm:
    """The session's vLLM."""
    return vllms()
