"""Shared by several packages' tests: which inference engines are here, the command, a reward server in a foreign
environment.

A test of a real engine bears the mark `engine("vllm")` or `engine("sglang")`. Those that share a server run in one
process, so that it is started once. Where the engine is not installed they are skipped with the reason, or fail under
ROLLMESH_REQUIRE_ENGINES=1.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom, freeze_heap
from tests import engines_here, no_processes
from tests.command import Command, in_this_process
from tests.repository import REPOSITORY
from tests.suite import tiers
from tests.suite.progress import Progress
from tests.suite.results import Recorder

# An example takes as long as the machine is busy; the suite's own timeouts end what hangs.
settings.register_profile("suite", deadline=None, max_examples=50)
settings.register_profile("all", deadline=None, max_examples=200)
settings.register_profile("fast", deadline=None, max_examples=10)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option for the quick part of the suite."""
    parser.addoption("--no-processes", action="store_true", help="skip tests that start a process")
    tiers.add_options(parser)
    parser.addoption("--results", type=Path, help="write a record of the run, with CPU seconds, to this file")


@pytest.hookimpl(trylast=True)  # the reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Skips what starts a process, if that is asked for; xdist's own processes are started by another. Collection runs
    with less garbage collection. The second tier tries more examples, the quick part fewer."""
    collect_garbage_seldom()
    config.pluginmanager.register(tiers)
    config.pluginmanager.register(Recorder(config))
    config.pluginmanager.register(HeapKeeper())
    if hasattr(config, "workerinput"):
        # Last of all exit handlers, as the first that was registered. To take apart a heap of all tests takes seconds.
        atexit.register(os._exit, 0)
    else:
        config.pluginmanager.register(Progress(config.pluginmanager.get_plugin("terminalreporter")))
    if config.getoption("all_tiers"):
        settings.load_profile("all")
    if config.getoption("no_processes"):
        settings.load_profile("fast")
    if config.getoption("no_processes") and not config.getoption("numprocesses"):
        no_processes.forbid()
        config.pluginmanager.register(no_processes)


# Files to run in one worker, because they share an engine, ranks or a cached result: parts of their names.
_SHARED = (
    ("/engines/vllm/",),
    ("tests/test_layers", "tests/test_supply", "docs/test_docstrings", "docs/test_prose"),
    ("/test_sglang_",),
    ("tests/faults/",),
    ("generators/placement/test_sleeping", "generators/test_", "generators/weights/"),
    ("learner/engines/megatron/", "rollmesh/planning/test_megatron_layers"),
    ("rollmesh/planning/", "docs/test_megatron", "docs/test_placement", "docs/test_planning"),
    (
        "learner/checkpoint/test_killed_writes",
        "learner/distributed/test_roles_memory",
        "learner/distributed/test_worker",
        "learner/engines/test_contract",
        "learner/engines/test_equivalence",
        "learner/engines/test_four_ranks",
        "learner/trainers/test_layouts",
    ),
    (
        "learner/engines/experts/test_",
        "learner/engines/output/test_vocabulary_shard",
        "learner/engines/tensors/test_",
        "learner/engines/test_exact_attention_limits",
        "learner/engines/test_piecewise_step",
        "learner/roles/test_contract",
        "rollmesh/test_export",
    ),
)


class ByFileAndServer(LoadScopeScheduling):
    """`--dist loadfile`, but all files that share an engine's server, import or processes in one process.

    Not by xdist's groups: 3.8 writes them into the names of tests, which pytest does not read any more from 9.2 on.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


def _scope(nodeid: str) -> str:
    file = nodeid.split("::", 1)[0]
    return next((parts[0] for parts in _SHARED if any(part in file for part in parts)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Tests of one engine share its server."""
    return ByFileAndServer(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts long tests to the front, whole runs first, so that no process is left alone with one."""
    items.sort(key=_turn)


def pytest_collection_finish() -> None:
    """Collected objects stay: searches for cycles, as each engine makes one at its end, leave it out."""
    freeze_heap()


class HeapKeeper:
    """Exempts what earlier files have left for good (modules, caches) from collections, once these take long.

    Each engine searches for cycles at its end: in a worker that has imported everything, that costs more than its test.
    """

    _LONG_S = 0.05

    def __init__(self) -> None:
        self._began = 0.0
        self._is_due = False
        gc.callbacks.append(self._time)

    def _time(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        elif info["generation"] == 2 and time.thread_time() - self._began > self._LONG_S:
            self._is_due = True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Looks between two files, when no test's engine is there."""
        if self._is_due and nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()
            self._is_due = False


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("engine"):
        return 0
    if item.get_closest_marker("slow"):
        return 1 if REPOSITORY / "tests" / "integration" in item.path.parents else 2
    return 3


# Before any fixture starts a server.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose engine is not installed; fails it where that is not allowed. Gives the log its level."""
    # Torch's checkpoints report their every step below it. Pytest's option would set it a dozen times per test, and
    # all loggers would forget what they have found.
    if logging.root.level != logging.INFO:
        logging.root.setLevel(logging.INFO)
    engine = item.get_closest_marker("engine")
    if engine is not None:
        engines_here.require(engine.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Takes back what the product sets for its own process: variables of libraries, and handlers of logs. Their stream
    may end with the test."""
    before, handlers = dict(os.environb), [*logging.root.handlers]
    try:
        return (yield)
    finally:
        logging.root.handlers[:] = handlers
        after = dict(os.environb)
        for name in after.keys() | before.keys():
            if name not in before:
                del os.environb[name]
            elif after.get(name) != before[name]:
                os.environb[name] = before[name]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the worlds of engines with the last test of their files: threads of gloo look around while they wait."""
    # The module is heavy; most processes never load it.
    fixtures = sys.modules.get("rollmesh.testing.fixtures")
    if fixtures is not None and (nextitem is None or _scope(item.nodeid) != _scope(nextitem.nodeid)):
        for processes in item.config.stash.get(fixtures.STARTED, {}).values():
            processes.close()


@pytest.fixture
def rollmesh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The `rollmesh` command."""
    return in_this_process(monkeypatch, capsys)


@pytest.fixture(scope="session")
def foreign_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment that holds gRPC's packages, which are those of this one, and nothing of ours."""
    pytest.importorskip("grpc_tools")
    folder = tmp_path_factory.mktemp("foreign")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("grpcio", "grpcio-health-checking", "grpcio-tools", "protobuf", "typing-extensions"):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(distribution.locate_file(top)))
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def third_party_server(foreign_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `examples/reward_server/python`, copied out of the repository and run by `foreign_python`."""
    folder = tmp_path_factory.mktemp("third-party")
    shutil.copytree(REPOSITORY / "examples" / "reward_server" / "python", folder / "python")
    shutil.copy(REPOSITORY / "examples" / "reward_server" / "reward.proto", folder)
    process = subprocess.Popen(
        [foreign_python, "python/server.py", "0"], cwd=folder, env={"PATH": ""}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # the test's own time-out bounds the wait
        assert line.startswith("listening on "), line
        yield f"grpc://{line.split()[-1]}"
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
