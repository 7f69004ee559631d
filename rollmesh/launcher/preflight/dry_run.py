"""A run without its services: everything that is checked before they start, and what they would be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollmesh.launcher.placement.description import describe_turns
from rollmesh.launcher.preflight.checks import check_code, check_files
from rollmesh.launcher.preflight.continuing import Continuation
from rollmesh.launcher.run_secrets import with_own_secrets
from rollmesh.launcher.services import describe_threads, thread_plan
from rollmesh.launcher.trials.opening import opening
from rollmesh.learner.data.locations import is_hub_id
from rollmesh.learner.recovery.run_identity import RunRecord
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.scorers.parts import describe_all
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.reward_service.routing import split_routes


def dry_run(
    config: Config, *, fresh: bool = False, allow_changes: bool = False, fork_server: ForkServer | None = None
) -> list[str]:
    """Checks a run as its start would, and says what would start; nothing is started, and no file is written.

    Args:
        config: of the run.
        fresh, allow_changes: see `launcher.local.LocalRun`.
        fork_server: see `check_code`.

    Returns:
        Lines for a person.

    Raises:
        RollmeshError: the mistake that the start would end with.
    """
    check_files(config)
    first = with_own_secrets(opening(config, fresh=fresh))
    prepared = check_code(first, fresh=fresh, fork_server=fork_server)
    return [
        *_begin(first, fresh=fresh, allow_changes=allow_changes),
        describe_threads(first, thread_plan(first)),
        f"the learner trains with {first.learner.describe_engine('actor')}",
        f"{first.rollout.replicas} generator(s) sample with {first.rollout.engine}",
        f"rewards: {describe_all(first.reward.endpoints or first.reward.functions, first.reward.by_data_source)}",
        prepared.devices.describe(),
        describe_turns(first, prepared.devices),
        *prepared.notices,
        *_of_the_hub(config),
        *_reward_services(config),
        "a dry run: everything that was checked is in order, and nothing was started",
    ]


def _of_the_hub(config: Config) -> Iterator[str]:
    """Says which model and data are not here, so that only a start can check them."""
    if not Path(config.model.path).is_dir():
        yield f"not checked: model.path {config.model.path} is no folder here; the start fetches it from the hub"
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval or ())):
        for source in sources:
            if is_hub_id(source.path):
                yield f"not checked: {key} {source.path} is no file here; the start fetches it from the hub"


def _reward_services(config: Config) -> Iterator[str]:
    """Says which reward services only a run calls."""
    own = split_routes(config.reward.by_data_source)[1]
    for endpoint in dict.fromkeys((*config.reward.endpoints, *(each for some in own.values() for each in some))):
        yield f"not checked: the reward service {endpoint}, which was not called"


def _begin(config: Config, *, fresh: bool, allow_changes: bool) -> list[str]:
    """Says whether the run starts or continues, and from which step."""
    model, folder, name = Path(config.model.path), config.run.folder, config.run.name
    if fresh:
        return [f"run {name} would start over in {folder}"]
    record = RunRecord(config, model if model.is_dir() else None)
    before = Continuation.of(config, record.edited_files(), inputs_differ=record.inputs_differ())
    if before is None:
        return [f"run {name} would start in {folder}"]
    if before.starts_over:
        return [f"run {name} would start over in {folder}, of which nothing was trained, and keep the former folder"]
    record.check(allow_changes=allow_changes)
    if before.finished:
        return [f"run {name} in {folder} has finished, nothing would start: {before.finished}"]
    named = "name" in config.run.model_fields_set
    return [f"run {name} would continue in {folder}", *before.lines(named=named)]
