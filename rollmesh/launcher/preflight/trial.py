"""Loads a service's code as a trial, before any is started: `python -m rollmesh.launcher.preflight.trial WHAT`.

It runs in the interpreter of the service, as a process of its own. It imports users' code, and torch, which the
launcher does not need. The configuration is JSON on stdin. On stdout one marked line holds the error or the notices, as
JSON. Users' code may print anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.launcher.interpreters import environment_of
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.recovery.run_identity import nothing_trained
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, DataError, RewardError, RollmeshError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.memory_tuning import collect_garbage_seldom

_ERRORS = {kind.exit_code: kind for kind in (ConfigError, DataError, RewardError)}
_ANSWER = "rollmesh trial: "
_FRESH = "--fresh"


class StartTrial:
    """A running trial; to be closed.

    Args:
        what: `learner` or `reward`.
        config: of the run.
        fresh: the run starts over, whatever is in its folder.
        python: the service's interpreter.
        within_s: seconds after which the trial is given up; the service itself will report errors.
    """

    def __init__(self, what: str, config: Config, python: Path | None, within_s: float, *, fresh: bool = False) -> None:
        self._within_s = within_s
        # Files, not pipes: processes started by users' code may keep a pipe open for ever.
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it is read when the process has ended
        with tempfile.TemporaryFile("w+") as config_file:
            config_file.write(config.model_dump_json())
            config_file.seek(0)
            self._process = subprocess.Popen(
                die_with_parent(
                    [
                        str(python or sys.executable),
                        "-m",
                        "rollmesh.launcher.preflight.trial",
                        what,
                        *([_FRESH] if fresh else []),
                    ]
                ),
                stdin=config_file,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment_of(python)},
                start_new_session=True,
            )

    def result(self) -> list[str]:
        """Waits for the trial; returns the notices about a valid configuration.

        Raises:
            ConfigError, DataError, RewardError: the error that was found.
            RollmeshError: the same, of a kind that only users' code raises.
        """
        try:
            self._process.wait(self._within_s)
        except subprocess.TimeoutExpired:
            return []
        self._output.seek(0)
        found = _parse_answer(self._output.read())
        if (wrong := found.get("wrong")) is not None:
            raise _ERRORS.get(wrong["exit_code"], RollmeshError)(wrong["message"], hint=wrong["hint"])
        notices: list[str] = found.get("notices", [])
        return notices

    def close(self) -> None:
        """Ends the trial and the processes that users' code has started in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def _parse_answer(output: str) -> Any:
    """The trial's answer; empty where it ended without one: the service will log the cause."""
    answers = (line.removeprefix(_ANSWER) for line in output.splitlines() if line.startswith(_ANSWER))
    return json.loads(next(answers, "{}"))


# ------------------------------------------------------------------------------------------ in the process that tries


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Runs the trial and prints its answer."""
    collect_garbage_seldom()
    learner = partial(try_learner, fresh=_FRESH in arguments)
    trials: dict[str, Callable[[Config], list[str]]] = {"learner": learner, "reward": _reward}
    answer: dict[str, Any]
    try:
        answer = {"notices": trials[arguments[0]](load_config(json.loads(sys.stdin.read())))}
    except RollmeshError as error:
        answer = {"wrong": {"exit_code": error.exit_code, "message": error.message, "hint": error.hint}}
    print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)  # noqa: T201  # this is the answer


def try_learner(config: Config, *, fresh: bool) -> list[str]:
    """Loads data, algorithm and users' functions as a learner would; returns `Algorithm.notices`.

    Args:
        config: of the run.
        fresh: the run starts over, whatever is in its folder.

    Raises:
        ConfigError, DataError: the error that was found; the engine `hf` does not serve the model.
    """
    from rollmesh.learner.data.dataset import check_first_rows

    for path in (config.data.train, config.data.eval):
        if path is not None:
            check_first_rows(path, config.data.prompt_key)
    # Torch takes a second or more.
    from rollmesh.learner.builders import build_algorithm
    from rollmesh.learner.checkpoint.compatibility import check_newest
    from rollmesh.learner.coordinator.priorities import priority_function

    algorithm = build_algorithm(config)
    priority_function(config)
    if not fresh and not nothing_trained(config.run.folder):
        check_newest(config.run.folder / CHECKPOINTS_NAME, algorithm)
    if config.rollout.engine == "hf" and (folder := Path(config.model.path)).is_dir():
        from rollmesh.generators.engines.hf.model.served_layers import layout_of
        from rollmesh.generators.engines.model_folder import read_config

        layout_of(read_config(folder), folder)
    return algorithm.notices()


def _reward(config: Config) -> list[str]:
    from rollmesh.reward_service.loading import load_function
    from rollmesh.reward_service.routing import split_routes

    functions, _ = split_routes(config.reward.by_data_source)
    for name in (*config.reward.functions, *(name for names in functions.values() for name in names)):
        load_function(name)
    return []


if __name__ == "__main__":
    main()
