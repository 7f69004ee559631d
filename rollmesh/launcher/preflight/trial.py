"""Loads a service's code as a trial, before any is started: `python -m rollmesh.launcher.preflight.trial WHAT`.

It runs in the interpreter and the environment of the service, as a process of its own. It imports users' code, and
torch, which the launcher does not need. No service has what it loads.

Its stdin is a socket for lines of JSON. The launcher writes the configuration, and the trial answers with the error or
the notices. Users' code may print anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rollmesh.launcher.interpreters import command_of
from rollmesh.launcher.logs import explain_exit, tail
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.recovery.run_identity import nothing_trained
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, DataError, RewardError, RollmeshError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom

_ERRORS = {kind.exit_code: kind for kind in (ConfigError, DataError, RewardError)}
_LEARNER, _MODEL, _REWARD = "learner", "model", "reward"
_TRIED = {_LEARNER: "the learner's code", _MODEL: "the model's folder", _REWARD: "the reward functions"}
# Lines of its output that an error shows.
_SHOWN = 5
_FRESH = "--fresh"


class StartTrial:
    """A running trial; to be closed.

    Args:
        what: `learner`, `model` or `reward`.
        config: of the run.
        python: the service's interpreter.
        environment: of the service, in addition to this process's own.
        within_s: seconds after which a trial that has not answered is given up; its service will report errors.
        fresh: the run starts over, whatever is in its folder.
        fork_server: forks it if that is possible; None: it is executed.
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
        fork_server: ForkServer | None = None,
    ) -> None:
        command = [*command_of(python, "rollmesh.launcher.preflight.trial"), what, *([_FRESH] if fresh else [])]
        whole = {**os.environ, **environment}
        self._tried = _TRIED[what]
        self._within_s = within_s
        self._socket, theirs = socket.socketpair()
        self._ended = False
        # A file takes what users' code prints, of which there may be more than a pipe holds.
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # until `close`
        with theirs:
            output = self._output.fileno()
            files: dict[str, Any] = {"stdin": theirs.fileno(), "stdout": output, "stderr": output}
            forked = fork_server.start(command, env=whole, **files) if fork_server is not None else None
            self._process = forked or subprocess.Popen(
                die_with_parent(command), env=whole, start_new_session=True, **files
            )
        self._socket.settimeout(within_s)
        with contextlib.suppress(OSError):  # it has ended, which `result` reports
            self._socket.sendall(f"{config.model_dump_json()}\n".encode())

    def result(self) -> list[str]:
        """Waits for the trial; returns the notices about a valid configuration.

        Raises:
            ConfigError, DataError, RewardError: the error that was found.
            RollmeshError: the same, of a kind that only users' code raises; or it has ended without an answer.
        """
        answer = ""
        try:
            with contextlib.suppress(ConnectionError), self._socket.makefile("r", encoding="utf-8") as lines:
                answer = lines.readline()
            if not answer:
                self._process.wait(self._within_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            # The service will show whether it hangs.
            self.close()
            return []
        if not answer:
            raise self._failure(self._process.wait())
        found = json.loads(answer)
        if (wrong := found.get("wrong")) is not None:
            raise _ERRORS.get(wrong["exit_code"], RollmeshError)(wrong["message"], hint=wrong["hint"])
        notices: list[str] = found["notices"]
        return notices

    def _failure(self, status: int) -> RollmeshError:
        lines = tail(Path(self._output.name))
        how, _ = explain_exit(status, lines)
        shown = " | ".join(line for line in lines[-_SHOWN:] if line.strip())
        return RollmeshError(f"the trial of {self._tried} gave no answer: {how}", hint=shown or "it printed nothing")

    def close(self) -> None:
        """Ends the trial, and the processes that users' code has started in it."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()
        self._output.close()


# ------------------------------------------------------------------------------------------ in the process that tries


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Runs the trial, and answers."""
    collect_garbage_seldom()
    learner = partial(try_learner, fresh=_FRESH in arguments)
    trials: dict[str, Callable[[Config], list[str]]] = {_LEARNER: learner, _MODEL: try_model, _REWARD: _try_reward}
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


def try_learner(config: Config, *, fresh: bool) -> list[str]:
    """Loads data, algorithm and users' functions as a learner would, and examines the models' folders.

    Args:
        config: of the run.
        fresh: the run starts over, whatever is in its folder.

    Returns:
        Notices about a valid configuration and its models.

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
    from rollmesh.learner.examination.folder import READ_S
    from rollmesh.learner.examination.models import examine_models
    from rollmesh.learner.metrics.trackers.opening import check_trackers
    from rollmesh.learner.model_files.adapter_checks import check_adapter
    from rollmesh.learner.notices import notices
    from rollmesh.learner.start_requirements import check_device, check_start
    from rollmesh.learner.written.ends import end_notices
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
    return [*notices(config, algorithm), *end_notices(config), *examine_models(config, algorithm, read_s=READ_S)]


def try_model(config: Config) -> list[str]:
    """Examines the folder of a model that is evaluated as it is.

    Args:
        config: of the evaluation.

    Returns:
        Notices about it.

    Raises:
        DataError: it cannot be used.
    """
    from rollmesh.learner.examination.folder import READ_S, examine

    return examine(Path(config.model.path), "model.path", read_s=READ_S)


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
