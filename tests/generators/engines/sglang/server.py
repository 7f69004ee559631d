"""One SGLang server for all tests of a session, and engines that drive it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.adapters import AdapterShape
from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.sglang import server_args, streamed_job
from rollmesh.generators.engines.sglang.engine import SglangEngine
from rollmesh.generators.engines.sglang.server_args import KEY_FILE, STREAM_INTERVAL
from rollmesh.generators.engines.sglang.server_process import ServerProcess
from rollmesh.generators.engines.types import EngineSettings, KvPolicy
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.private_files import read_secret
from tests import engines_here
from tests.generators.engines.collector import Collector
from tests.generators.engines.harness import ModelHarness
from tests.generators.engines.sglang import step_gate
from tests.generators.engines.tiny import ContractModel
from tests.secrets_here import write_secret

START_S = 300.0
# One for the prompt, and those whose tokens are told of together with the ones that are waited for.
_MORE_STEPS = 1 + STREAM_INTERVAL
_CALL_S = 60.0
# More than come together, as the product's number is; responses need not be longer than those of other engines.
_REVEAL_TOKENS = 12
_SHARED = "/dev/shm/"  # where the kernel has it


def settings(device: str = "cpu", rank: int = 0, **section: Any) -> EngineSettings:
    """The settings of an engine that starts its own server, for adapters of a rank where one is given."""
    sglang = SglangSection(python=engines_here.python("sglang"), start_timeout_s=START_S, **section)
    return EngineSettings(slots=5, threads=1, device=device, kv="keep", adapters=_shape(rank), sglang=sglang)


def _shape(rank: int) -> AdapterShape | None:
    return AdapterShape(rank) if rank else None


@dataclass(frozen=True, slots=True)
class Traces:
    """The resources of a server that an engine has started.

    Attributes:
        processes: the watchdog, its children, theirs, and so on.
        shared: files in /dev/shm that these have open or mapped.
        scratch: folder of the server's temporary files.
    """

    processes: list[psutil.Process]
    shared: set[Path]
    scratch: Path

    @classmethod
    def of(cls, server: ServerProcess) -> Traces:
        """The resources of a server that is up."""
        assert server._watchdog is not None
        watchdog = psutil.Process(server._watchdog.pid)
        processes = [watchdog, *watchdog.children(recursive=True)]
        shared = set()
        for process in processes:
            names = {place.path for place in process.memory_maps()} | {file.path for file in process.open_files()}
            shared |= {Path(name) for name in names if name.startswith(_SHARED) and not name.endswith("(deleted)")}
        return cls(processes, shared, server.scratch)


class SharedServer:
    """A server of an engine that does nothing else; started when it is first asked for.

    Args:
        folder: of the model.
        device: that it computes on.
        rank: of adapters; 0: it gets whole weights.
        section: of its settings.
    """

    def __init__(self, folder: Path, device: str = "cpu", rank: int = 0, **section: Any) -> None:
        self._folder, self._settings = folder, settings(device, rank, **section)
        self._owner: SglangEngine | None = None
        # Each makes a TLS context of its own, which takes longer than all calls of a test.
        self._http = httpx.Client(timeout=_CALL_S)
        self.key_file = Path()

    @property
    def address(self) -> str:
        """Its URL; afterwards `key_file` has the key that it asks for."""
        if self._owner is None:
            self._owner = SglangEngine.from_folder(self._folder, self._settings, Collector(START_S))
            with _gated():
                self._owner.start()
                self._owner._inflight.wait_until_up()
            scratch = self._process.scratch
            secrets = json.loads((scratch / KEY_FILE).read_text())
            self.key_file = write_secret(scratch / "key", secrets["api-key"])
        address: str = self._backend._client.address
        return address

    def is_at(self, address: str) -> bool:
        """Whether it has started, at this URL."""
        return self.key_file.name != "" and address == self.address

    def adapters(self) -> set[str]:
        """Names of the adapters that it has."""
        answer = self._call("GET", "/v1/models")
        return {model["id"] for model in answer.json()["data"] if model["parent"]}

    def take_steps(self, number: int) -> None:
        """Lets it take so many steps, and one for each further request; 0: all of them (see `step_gate`)."""
        self._call("POST", "/slow_down", json={"forward_sleep_time": number})

    def traces(self) -> Traces:
        """Its resources."""
        assert self.address
        return Traces.of(self._process)

    def scheduler(self) -> psutil.Process:
        """Its process that computes."""
        [found] = [process for process in self.traces().processes if "scheduler" in " ".join(process.cmdline())]
        return found

    def ping(self) -> None:
        """Asks its front and its scheduler."""
        assert self._owner is not None
        self._owner.ping().result(_CALL_S)

    def abandon(self) -> None:
        """Leaves it as the kernel does when it ends the process of its owner: the watchdog's input ends."""
        watchdog = self._process._watchdog
        assert watchdog is not None
        assert watchdog.stdin is not None
        watchdog._loop.call_soon_threadsafe(watchdog.stdin.transport.abort)

    def close(self) -> None:
        """Ends it."""
        self._http.close()
        if self._owner is not None:
            self._owner.stop()

    def _call(self, method: str, path: str, **content: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {read_secret(self.key_file, 'key')}"}
        return self._http.request(method, f"{self.address}{path}", headers=headers, **content).raise_for_status()

    @property
    def _backend(self) -> Any:
        assert self._owner is not None
        return self._owner._backend

    @property
    def _process(self) -> ServerProcess:
        process: ServerProcess = self._backend._server.process
        return process


@contextmanager
def _gated() -> Iterator[None]:
    """Servers that start in this block have a gate before their steps."""
    environment = server_args.environment
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:

        def with_gate(settings: EngineSettings) -> dict[str, str]:
            variables = environment(settings)
            return variables | {"PYTHONPATH": step_gate.add_to(variables["PYTHONPATH"], Path(folder))}

        patch.setattr(server_args, "environment", with_gate)
        yield


class SglangHarness(ModelHarness):
    """A new engine on the session's server."""

    seeded = False
    # Tokens that it has not sent at a pause, and those sampled before it hears of the pause.
    tells_late = 24
    reveals = _REVEAL_TOKENS
    joint_filters = True
    sleep_frees = False
    deadline_s = 120.0

    def __init__(
        self,
        model: ContractModel,
        server: SharedServer,
        kv: KvPolicy,
        transfer: str = "auto",
        device: str = "cpu",
        rank: int = 0,
    ) -> None:
        section = SglangSection(
            address=server.address,
            key_file=server.key_file,
            transfer=transfer,  # type: ignore[arg-type] # a literal
        )
        self._settings = EngineSettings(slots=self.slots, kv=kv, device=device, adapters=_shape(rank), sglang=section)
        self._server, self._patch = server, pytest.MonkeyPatch()
        self._patch.setattr(streamed_job, "REVEAL_TOKENS", _REVEAL_TOKENS)
        super().__init__(model)

    @contextmanager
    def slowly(self, tokens: int) -> Iterator[None]:
        """See `EngineHarness.slowly`."""
        self._server.take_steps(tokens + _MORE_STEPS)
        try:
            yield
        finally:
            self._server.take_steps(0)

    def close(self) -> None:
        super().close()
        self._patch.undo()

    def fail_at(self, token: int) -> None:
        streams: Any = self.engine._backend._requests  # type: ignore[attr-defined] # of a driven engine
        body = streams._body

        def spoilt(streamed: Any) -> dict[str, Any]:
            made: dict[str, Any] = body(streamed)
            if token in streamed.job.token_ids:
                made["sampling_params"]["top_p"] = 7
            return made

        streams._body = spoilt

    def build(self, listener: EngineListener) -> InferenceEngine:
        return create_engine("sglang", self.model.folder, self._settings, listener)
