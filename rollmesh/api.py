"""The Python API: `rollmesh.train(config, reward_fn=...)`, the same mesh as `rollmesh run`, and `rollmesh.evaluate`.

Invariant: nothing is simulated. Buffer, generators and learner are processes of their own. A Python reward function is
served over gRPC from the calling process, so it may be a closure, a notebook cell or hold a model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollmesh.caller_callbacks import called_back, with_callbacks
from rollmesh.data.objects import RowObjects, with_rows
from rollmesh.evaluation.evaluate import Evaluation, EvaluationRequest
from rollmesh.evaluation.function_identity import function_identity
from rollmesh.evaluation.settings import read_for_evaluation
from rollmesh.evaluation.summary import EvaluationSummary
from rollmesh.launcher.console.plain import PlainView
from rollmesh.launcher.console.view import SilentView, View, open_view
from rollmesh.launcher.local import LocalRun
from rollmesh.launcher.preflight.checks import check_code, check_files
from rollmesh.launcher.preloaded import PRELOADED_MODULES
from rollmesh.launcher.trials.opening import opening
from rollmesh.learner.callbacks.interface import Callback
from rollmesh.learner.evaluation.measurement_identity import reward_measurement, scorer_identity
from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.access.secret import new_token
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.service import advertised_address
from rollmesh.report.summary import Summary
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.scoring.configured import configured_engine
from rollmesh.reward_service.server.server import RewardServer

RewardFunction = Callable[..., Any]
_Outcome = TypeVar("_Outcome")
_Outcome_co = TypeVar("_Outcome_co", covariant=True)
_START_DEADLINE_S = 30.0


def train(
    config: Config | Mapping[str, Any] | Path | str,
    reward_fn: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
    *,
    train: RowObjects | Path | str | None = None,
    eval: RowObjects | Path | str | None = None,  # noqa: A002 - the name of the configuration's key
    callbacks: Sequence[Callback | str] = (),
    overrides: Sequence[str] = (),
    quiet: bool = False,
    fresh: bool = False,
    allow_changes: bool = False,
    from_checkpoint: str | None = None,
) -> Summary:
    """Trains to the end of the run and returns its summary; called again with the same run folder, continues.

    Args:
        config: a configuration, the same as a mapping, or the path of a YAML file.
        reward_fn: in place of `reward.functions`: a function (or several, summed) with verl's, TRL's or the batch
            signature, or import paths `module:function`. Functions are called in this process, in threads: one that
            holds the interpreter for ever holds this process. Paths run in worker processes, which are ended then.
        train: in place of `data.train`: a path, a `datasets.Dataset`, or rows as dicts. Rows are written once, below
            `run.dir`, under a name that follows from their content.
        eval: the same for `data.eval`.
        callbacks: hear of the run's events. Objects of classes derived from `rollmesh.Callback` are called in this
            process; paths, as in `logging.callbacks`, by the learner.
        overrides: as on the command line, `"learner.steps=10"`.
        quiet: show nothing.
        fresh: start the run over; the folder that it has is kept under another name.
        allow_changes: continue the run with another model or other data than it began with.
        from_checkpoint: continue from this one of the run's checkpoints, or from the `best`: the steps since are
            undone.

    Raises:
        CallbackError: a callback has ended the run.
        RollmeshError: what else ended the run early.
        KeyboardInterrupt: after an orderly end of all services.
    """
    rows = with_rows(partial(_resolve, config), overrides, {"train": train, "eval": eval})
    resolved, own_callbacks = with_callbacks(rows, callbacks)
    with _serving(resolved, _functions(reward_fn)) as served:
        check_files(served)
        first = opening(served, fresh=fresh)
        with ForkServer.spawn(PRELOADED_MODULES) or nullcontext() as fork_server:
            prepared = check_code(first, fresh=fresh, fork_server=fork_server)
            view: View = SilentView() if quiet else open_view(resolved)
            try:
                run = LocalRun(
                    first,
                    view,
                    prepared,
                    asked=served,
                    fresh=fresh,
                    allow_changes=allow_changes,
                    from_checkpoint=from_checkpoint,
                    fork_server=fork_server,
                )
                return _run_in_thread(run, partial(called_back, resolved, own_callbacks))
            finally:
                view.close()


def evaluate(
    config: Config | Mapping[str, Any] | Path | str,
    model: Path | str | None = None,
    reward_fn: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
    *,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    quiet: bool = False,
    fresh: bool = False,
) -> EvaluationSummary:
    """Evaluates a model on `data.eval` and returns the metrics; called again, continues what was interrupted.

    Args:
        config: as of `train`; of it count the prompts, the rewards and the generators. No training data are needed.
        model: folder or hub id of a model, or folder of a run, of a checkpoint or of peft's adapter; None:
            `model.path`. A run stands for its best checkpoint, or for the latest where none is the best.
        reward_fn: as of `train`.
        overrides: as on the command line, `"eval.n=8"`.
        out: folder of the results; None: `eval-MODEL` below `run.dir`.
        quiet: show nothing.
        fresh: start it over; the folder that it has is kept under another name.

    Raises:
        RollmeshError: what ended the evaluation early; responses so far stay in its folder.
        KeyboardInterrupt: after an orderly end of all services.
    """
    source = Path(config) if isinstance(config, str) else config
    values = source.model_dump() if isinstance(source, Config) else source
    resolved = read_for_evaluation(values, overrides, {}, None if model is None else str(model))
    functions = _functions(reward_fn)
    rewards = reward_measurement(resolved.reward, list(map(_identity, functions))) if functions else None
    with _serving(resolved, functions) as served:
        chosen, folder = None if model is None else str(model), None if out is None else Path(out)
        evaluation = Evaluation(EvaluationRequest(served, chosen, folder, fresh=fresh, rewards=rewards))
        view: View = SilentView() if quiet or sys.stdout is None else PlainView(1)
        try:
            with ForkServer.spawn(PRELOADED_MODULES) or nullcontext() as fork_server:
                return evaluation.run(view, _run_in_thread, fork_server)
        finally:
            view.close()


def _resolve(config: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        return load_config(config.model_dump(), overrides) if overrides else config
    return load_config(Path(config) if isinstance(config, str) else config, overrides)


def _functions(reward_fn: RewardFunction | str | Sequence[RewardFunction | str] | None) -> list[RewardFunction | str]:
    if reward_fn is None:
        return []
    if callable(reward_fn) or isinstance(reward_fn, str):
        return [reward_fn]
    given = list(reward_fn) if isinstance(reward_fn, Sequence) else [reward_fn]
    if wrong := [item for item in given if not (callable(item) or isinstance(item, str))]:
        raise ConfigError(
            f"reward_fn: {wrong[0]!r} is no reward function",
            hint="give a function, `module:function`, or a list of these",
        )
    return given


def _identity(function: RewardFunction | str) -> str:
    return scorer_identity(function) if isinstance(function, str) else function_identity(function)


@contextmanager
def _serving(config: Config, functions: Sequence[RewardFunction | str]) -> Iterator[Config]:
    """Serves the functions from this process while the block runs; gives the configuration that points to them."""
    if not functions:
        yield config
        return
    if config.reward.endpoints or config.reward.in_process:
        raise ConfigError(
            "reward_fn is given, and so is reward.endpoints or reward.in_process", hint="leave one of them out"
        )
    names = [function for function in functions if isinstance(function, str)]
    if len(names) == len(functions):
        yield _with_reward(config, functions=names)
        return
    remote = split_routes(config.reward.by_data_source)[1]
    engine = configured_engine(config.reward, functions)

    key = new_token()

    async def start() -> RewardServer:
        # A gRPC server belongs to the event loop on which it is made.
        server = RewardServer(
            engine,
            timeout_s=config.reward.timeout_s,
            security=config.security,
            key=SharedKey(key),
            max_message_mb=config.network.max_message_mb,
        )
        await server.start(config.network.host)
        return server

    bridge = AsyncBridge("reward")
    try:
        server = bridge.call(start(), _START_DEADLINE_S)
        try:
            address = advertised_address(config.network.host, server.port, config.network.advertise)
            routes = {source: list(endpoints) for source, endpoints in remote.items()}
            with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
                file = Path(folder, "reward.key")
                file.touch(0o600)
                file.write_text(key, encoding="utf-8")
                endpoint = f"grpc://{address}"
                keys = {**config.reward.key_files, endpoint: file}
                yield _with_reward(config, endpoints=[endpoint], by_data_source=routes, key_files=keys)
        finally:
            bridge.call(server.stop(), _START_DEADLINE_S)
    finally:
        bridge.close()


def _with_reward(config: Config, **changes: Any) -> Config:
    return config.model_copy(update={"reward": config.reward.model_copy(update=changes)})


class _Launch(Protocol[_Outcome_co]):
    """A launcher of services: `LocalRun` and `LocalEvaluation`."""

    async def run(self, *, handle_signals: bool) -> _Outcome_co: ...

    def interrupt(self) -> None: ...


def _run_in_thread(
    run: _Launch[_Outcome], around: Callable[[Callable[[], None]], AbstractContextManager[object]] | None = None
) -> _Outcome:
    """Runs the launcher's event loop in a thread: a notebook's thread has a loop of its own.

    Args:
        run: the launcher.
        around: a context to run it in, made from a function that interrupts the run.
    """
    loop = asyncio.new_event_loop()

    def interrupt() -> None:
        with suppress(RuntimeError):  # the run has ended by itself
            loop.call_soon_threadsafe(run.interrupt)

    with around(interrupt) if around is not None else nullcontext():
        return _wait_for_end(run, loop)


def _wait_for_end(run: _Launch[_Outcome], loop: asyncio.AbstractEventLoop) -> _Outcome:
    outcome: concurrent.futures.Future[_Outcome] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(loop.run_until_complete(run.run(handle_signals=False)))
        except BaseException as error:  # noqa: BLE001  # carried over to the caller's thread, whatever it is
            outcome.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=work, name="rollmesh-launcher")
    thread.start()
    interrupted = False
    try:
        while True:
            try:
                found = outcome.result()
            except KeyboardInterrupt:
                if outcome.done():
                    raise
                interrupted = True
                loop.call_soon_threadsafe(run.interrupt)
                continue
            if interrupted:
                raise KeyboardInterrupt
            return found
    finally:
        thread.join()
