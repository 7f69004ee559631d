"""`rollmesh sft`, `rollmesh rm` and `rollmesh dpo`: their configurations, their run folder, and their Python API.

`rollmesh.sft(config)` and its siblings run the command itself in a process of its own. So its memory, on devices too,
is free afterwards, and several ranks are no other case than one.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.data.objects import RowObjects, with_rows
from rollmesh.launcher.errors import ServiceExitError
from rollmesh.launcher.folder import locked, set_aside
from rollmesh.launcher.interpreters import command_of
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.learner.trainers.record import edited_held_out
from rollmesh.mesh.config import load_as, save_config
from rollmesh.mesh.config.trainers.configs import CONFIGS, TrainerConfig
from rollmesh.mesh.config.variables import without_settings
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.log_format import LogSettings, setup_logging
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.runtime.threads import available_cores, plan_rank_threads, thread_environment
from rollmesh.report.changes import describe_changes
from rollmesh.run_files import check_command, read_any_config, trained_by
from rollmesh.training.summary import write_training_summary

log = logging.getLogger(__name__)
INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a training that was asked to end before its last step, and has ended in order."""
Source = TrainerConfig | Mapping[str, Any] | Path | str


def sft(
    config: Source,
    *,
    train: RowObjects | Path | str | None = None,
    eval: RowObjects | Path | str | None = None,  # noqa: A002 - the name of the configuration's key
    overrides: Sequence[str] = (),
    fresh: bool = False,
) -> Path:
    """Fine-tunes a model on conversations or responses, as `rollmesh sft` does.

    Args:
        config: a configuration, the same as a mapping, or the path of a YAML file.
        train: in place of `data.train`: a path, a `datasets.Dataset`, or rows as dicts. Rows are written once, below
            `run.dir`, under a name that follows from their content.
        eval: the same for `data.eval`.
        overrides: as on the command line, `"learner.steps=10"`.
        fresh: start the run over; the folder that it has is kept under another name.

    Returns:
        The Hugging Face folder of the trained model: the first of `checkpoint.hf`.

    Raises:
        ConfigError: the configuration is wrong.
        KeyboardInterrupt: after an orderly end of the training.
        ServiceExitError: the training has ended with an error, which its log names, or was asked to end.
    """
    return _train("sft", config, overrides, {"train": train, "eval": eval}, fresh=fresh)


def rm(
    config: Source,
    *,
    train: RowObjects | Path | str | None = None,
    eval: RowObjects | Path | str | None = None,  # noqa: A002 - the name of the configuration's key
    overrides: Sequence[str] = (),
    fresh: bool = False,
) -> Path:
    """Trains a reward model on pairs, as `rollmesh rm` does; see `sft`."""
    return _train("rm", config, overrides, {"train": train, "eval": eval}, fresh=fresh)


def dpo(
    config: Source,
    *,
    train: RowObjects | Path | str | None = None,
    eval: RowObjects | Path | str | None = None,  # noqa: A002 - the name of the configuration's key
    overrides: Sequence[str] = (),
    fresh: bool = False,
) -> Path:
    """Optimizes a model by preferences, as `rollmesh dpo` does; see `sft`."""
    return _train("dpo", config, overrides, {"train": train, "eval": eval}, fresh=fresh)


def read_trainer_config(command: str, source: Source, overrides: Sequence[str] = ()) -> TrainerConfig:
    """The configuration of a command.

    Raises:
        ConfigError: see `load_config`.
    """
    if isinstance(source, TrainerConfig):
        source = source.model_dump()
    return load_as(CONFIGS[command], Path(source) if isinstance(source, str) else source, overrides, command=command)


def run_here(command: str, config: TrainerConfig, *, fresh: bool = False) -> int:
    """Trains in this process, which is one rank or the only one.

    It comes before the numerical libraries are loaded, which read their threads from the environment.

    Args:
        command: `sft`, `rm` or `dpo`.
        config: of the run.
        fresh: see `sft`.

    Returns:
        The exit status. `INTERRUPTED` comes from one rank of each machine, as its program ends with the first rank
        that has such a status.
    """
    rank = int(os.environ.get("RANK", "0"))
    setup_logging(command if rank == 0 else f"{command}-{rank}", LogSettings.of(config))
    plan = plan_rank_threads(available_cores(), os.environ)
    for name, value in thread_environment(plan.learner).items():
        os.environ.setdefault(name, value)
    if rank == 0:
        log.info("%s", plan.describe(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), replicas=0))
    keep_freed_memory(TENSOR_BYTES)
    import torch

    # It may have been loaded before: ranks are forked from a process that has it.
    torch.set_num_threads(plan.learner)
    from rollmesh.learner.liveness.rank_exit import run_rank
    from rollmesh.learner.stop_signals import StopSignals
    from rollmesh.learner.trainers.process import train_rank

    controls, complete, end = ControlRequests(), False, _End()

    def work() -> None:
        nonlocal complete
        with StopSignals(controls, listen=rank == 0), ExitStack() as closers:
            if rank == 0:
                if fresh:
                    set_aside(config.run.folder, time.strftime("%Y%m%d-%H%M%S"))
                check_command(config.run.folder, command)
                closers.enter_context(locked(config.run.folder))
                _report_changes(command, config)
                closers.enter_context(_summarized(command, config.run.folder, end))
            complete = train_rank(command, config, controls, end.begins)
            if rank == 0 and complete:
                end.text = "finished"

    status = run_rank(work)
    interrupted = status == 0 and not complete and os.environ.get("LOCAL_RANK", "0") == "0"
    return INTERRUPTED if interrupted else status


def _report_changes(command: str, config: TrainerConfig) -> None:
    """Says which settings differ from those with which the run has trained so far; its data and model may not."""
    folder = config.run.folder
    if trained_by(folder) != command:
        return
    before = read_any_config(folder).model_dump(mode="json")
    edited = [f"{path} (edited)" for path in edited_held_out(folder, config)]
    if changes := [*describe_changes(before, config.model_dump(mode="json")), *edited]:
        log.warning("changed since the last launch: %s", "; ".join(changes))


@dataclass(slots=True)
class _End:
    """The end of a training, in words; None if it was refused, so that an earlier end still holds.

    `begins` is called once nothing of it can be refused any more.
    """

    text: str | None = "interrupted"
    begun: bool = False

    def begins(self) -> None:
        self.begun = True


@contextmanager
def _summarized(command: str, folder: Path, end: _End) -> Iterator[None]:
    """Writes the summary of a training that ends within the block, whatever way it ends."""
    began_s = time.monotonic()
    try:
        yield
    except RollmeshError as error:
        end.text = str(error) if end.begun else None
        raise
    finally:
        if end.text is not None and trained_by(folder) is not None:
            for line in write_training_summary(folder, command, end.text, began_s).lines():
                log.info("%s", line)


def _train(
    command: str,
    source: Source,
    overrides: Sequence[str],
    rows: Mapping[str, RowObjects | Path | str | None],
    *,
    fresh: bool,
) -> Path:
    from rollmesh.learner.checkpoint.hf_folders import FOLDER

    config = with_rows(partial(read_trainer_config, command, source), overrides, rows)
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as scratch:
        path = Path(scratch, CONFIG)
        save_config(config, path)
        arguments = [command, str(path), *(["--fresh"] if fresh else [])]
        status = _status_of([*command_of(None), *arguments])
    if status == INTERRUPTED:
        raise ServiceExitError(
            command, status, "was asked to end before its last step", (), hint="call it again: it continues"
        )
    if status:
        raise ServiceExitError(command, status, f"ended with status {status}", (), hint="its log names the cause")
    return config.run.folder / FOLDER / config.checkpoint.hf[0]


def _status_of(command: Sequence[str]) -> int:
    """The exit status of a command. A Ctrl-C here asks it to end in order, and a second one to end at once.

    Raises:
        KeyboardInterrupt: after the end of the command.
    """
    interrupted = False
    # In a group of its own: the terminal's Ctrl-C would reach it a second time.
    with subprocess.Popen(die_with_parent(command), process_group=0, env=without_settings(os.environ)) as process:
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return status
