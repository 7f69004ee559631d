"""Loads a service's code as a trial, before any is started: `python -m rollmesh.launcher.preflight.trial WHAT`.

It runs in the interpreter and the environment of the service, as a process of its own. It imports users' code, and
torch, which the launcher does not need. After its answer it waits to continue as the service: loading all of that takes
seconds, which are spent once.

Its stdin is a socket for lines of JSON. The launcher writes the configuration, and in the end the service's command.
The trial answers in between, with the error or the notices. Users' code may print anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.recovery.run_identity import nothing_trained
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, DataError, RewardError, RollmeshError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom

_ERRORS = {kind.exit_code: kind for kind in (ConfigError, DataError, RewardError)}
_LEARNER, _REWARD = "learner", "reward"
_FRESH = "--fresh"


class StartTrial:
    """A running trial; to be closed.

    Args:
        what: `learner` or `reward`.
        config: of the run.
        python: the service's interpreter.
        environment: of the service, in addition to this process's own.
        within_s: seconds after which the trial is given up; the service itself will report errors.
        fresh: the run starts over, whatever is in its folder.
    """

    def __init__(
        self,
        what: str,
        config: Config,
        python: Path | None,
        environment: Mapping[str, str],
        within_s: float,
        *,
        fresh: bool = False,
    ) -> None:
        module = ("-m", "rollmesh.launcher.preflight.trial", what, *([_FRESH] if fresh else []))
        self._socket, theirs = socket.socketpair()
        # A file takes what users' code prints, of which there may be more than a pipe holds.
        with theirs, tempfile.TemporaryFile() as output:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                die_with_parent([str(python or sys.executable), *module]),
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._socket.settimeout(within_s)
        self._send(config.model_dump_json())

    def result(self) -> list[str]:
        """Waits for the trial; returns the notices about a valid configuration.

        Raises:
            ConfigError, DataError, RewardError: the error that was found.
            RollmeshError: the same, of a kind that only users' code raises.
        """
        try:
            with self._socket.makefile("r", encoding="utf-8") as lines:
                found = json.loads(lines.readline() or "{}")
        except OSError:
            found = {}
        if not found:
            # It hangs, or ended without an answer: the service will log the cause.
            self.close()
        if (wrong := found.get("wrong")) is not None:
            raise _ERRORS.get(wrong["exit_code"], RollmeshError)(wrong["message"], hint=wrong["hint"])
        notices: list[str] = found.get("notices", [])
        return notices

    def become(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes] | None:
        """Lets the process continue as a service, which is the caller's from then on; None where it has ended.

        Args:
            command: of the service, `PYTHON -m MODULE ARGUMENT...`.
            log: takes the service's output, and that of the trial before it.
        """
        if self._process is None or not self._send(json.dumps({"command": [*command], "log": log.name})):
            return None
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """Ends the trial, unless it has become a service, and the processes that users' code has started in it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        self._socket.close()

    def _send(self, line: str) -> bool:
        """False where no one will read it."""
        try:
            self._socket.sendall(f"{line}\n".encode())
        except OSError:
            return False
        return True


# ------------------------------------------------------------------------------------------ in the process that tries


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Runs the trial, answers, and continues as the service where it is asked to."""
    collect_garbage_seldom()
    learner = partial(try_learner, fresh=_FRESH in arguments)
    trials: dict[str, Callable[[Config], list[str]]] = {_LEARNER: learner, _REWARD: _try_reward}
    # A copy, which is closed in the processes that users' code starts.
    with socket.socket(fileno=os.dup(0)) as launcher, launcher.makefile("rw", encoding="utf-8") as lines:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        answer: dict[str, Any]
        try:
            answer = {"notices": trials[arguments[0]](load_config(json.loads(lines.readline())))}
        except RollmeshError as error:
            answer = {"wrong": {"exit_code": error.exit_code, "message": error.message, "hint": error.hint}}
        lines.write(f"{json.dumps(answer)}\n")
        lines.flush()
        if "wrong" in answer or arguments[0] != _LEARNER:
            return
        # While the buffer starts.
        import rollmesh.learner.service  # noqa: F401

        order = lines.readline()
    if order:
        _continue_as(**json.loads(order))


def _continue_as(command: Sequence[str], log: str) -> None:
    """Continues as `PYTHON -m MODULE ARGUMENT...` begins."""
    sys.stdout.flush()
    with open(log, "ab") as service, open(1, "rb", closefd=False) as trial:
        trial.seek(0)
        shutil.copyfileobj(trial, service)
        service.flush()
        for output in (1, 2):
            os.dup2(service.fileno(), output)
    module, *arguments = command[2:]
    sys.orig_argv, sys.argv = [*command], [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def try_learner(config: Config, *, fresh: bool) -> list[str]:
    """Loads data, algorithm and users' functions as a learner would; returns `learner.notices.notices`.

    Args:
        config: of the run.
        fresh: the run starts over, whatever is in its folder.

    Raises:
        ConfigError, DataError: the error that was found; the engine `hf` does not serve the model.
    """
    from rollmesh.learner.data.curriculum import load_curriculum
    from rollmesh.learner.data.dataset import check_first_rows

    for source in (*config.data.train, *(config.data.eval or ())):
        check_first_rows(source, config.data.prompt_key)
    if config.data.curriculum is not None:
        load_curriculum(config.data.curriculum)
    # Torch takes a second or more.
    from rollmesh.learner.builders import build_algorithm
    from rollmesh.learner.callbacks.loading import callback_factories
    from rollmesh.learner.checkpoint.compatibility import check_newest
    from rollmesh.learner.coordinator.priorities import priority_function
    from rollmesh.learner.metrics.trackers.opening import check_trackers
    from rollmesh.learner.model_files.adapter_checks import check_adapter
    from rollmesh.learner.notices import notices
    from rollmesh.learner.start_requirements import check_device, check_start
    from rollmesh.mesh.runtime.devices import choose_device

    check_start(config)
    check_device(config, choose_device(config.learner.device, "learner.device"))
    algorithm = build_algorithm(config)
    priority_function(config)
    if not fresh and not nothing_trained(config.run.folder):
        check_newest(config.run.folder / CHECKPOINTS_NAME, algorithm, config.learner)
    if (folder := Path(config.model.path)).is_dir():
        from rollmesh.generators.engines.hf.model.served_layers import layout_of
        from rollmesh.mesh.model_config import naming_config, read_config

        described = read_config(folder)
        if config.rollout.engine == "hf":
            with naming_config(folder):
                layout_of(described, folder)
        if config.learner.lora is not None:
            check_adapter(config.learner.lora, folder)
    check_trackers(config)
    callback_factories(config)
    return notices(config, algorithm)


def _try_reward(config: Config) -> list[str]:
    from rollmesh.reward_service.composition.part import Part
    from rollmesh.reward_service.configured import with_configured
    from rollmesh.reward_service.loading import load_function
    from rollmesh.reward_service.routing import split_routes

    routed, _ = split_routes(config.reward.by_data_source)
    functions, by_source = with_configured(config.reward, config.reward.functions, routed)
    for part in map(Part.of, (*functions, *chain.from_iterable(by_source.values()))):
        if isinstance(part.use, str):
            load_function(part.use)
    if not config.reward.runs_programs:
        return []
    from rollmesh.reward_service.sandbox.configured import in_force

    return [f"programs of the model run on {asyncio.run(in_force(config.reward.isolation)).describe()}"]


if __name__ == "__main__":
    main()
