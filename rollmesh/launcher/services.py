"""The services that `rollmesh run` starts: commands, threads, order of starting and draining."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rollmesh.launcher.final_work import FinalWork, learner_work
from rollmesh.launcher.folder import takeover_stamp
from rollmesh.launcher.interpreters import Interpreter, command_of, environment_of
from rollmesh.launcher.loading import Loading
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.service_process import ServiceSpec, ready_file
from rollmesh.learner.checkpoint.deadlines import LAST_S
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.config.derived.generator_places import GeneratorPlace, generator_places, shared_generators
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.rpc.held_ports import ENVIRONMENT, HeldPorts
from rollmesh.mesh.runtime.threads import ThreadPlan, available_cores, plan_threads, thread_environment

BUFFER = "buffer"
REWARD = "reward"
LEARNER = "learner"
EVALUATOR = "evaluator"
REDIS_FOLDER = "redis"
"""Folder of the embedded Redis in a run's."""
_FRONT = "buffer-"
_ROLE = "role-"
# Names of generators, as they begin.
_GENERATORS = ("generator-", "shared-")
# Torch has to be loaded on a machine where everything starts at once; models come after the first answer.
_TORCH_START_S = 300.0
# Beyond its step, a swap of shared devices, its checkpoint and the like, for which it is waited in addition.
_LEARNER_DRAIN_S = 120.0
# Without an engine's own processes, and with them: these finish their step and free their memory.
_GENERATOR_DRAIN_S = {"hf": 20.0, "vllm": 60.0, "sglang": 60.0}


def _member_id(name: str) -> str:
    """A new id in the mesh for a generator's process, by which it is found in the launcher's events and logs."""
    kind = f"{Role.GENERATOR}-"
    return f"{kind}{name.removeprefix(kind)}-{uuid.uuid4().hex[:8]}"


def learner_processes(config: Config) -> int:
    """Processes on the learner's side of the cores: its ranks, and those of roles with processes of their own."""
    learner = config.learner
    return learner.ranks + sum(map(learner.ranks_of, learner.own_roles))


def thread_plan(config: Config, cores: int | None = None) -> ThreadPlan:
    """The compute threads of each service.

    Args:
        config: of the run.
        cores: that they share; None: those of this machine.
    """
    return plan_threads(
        cores or available_cores(),
        ranks=learner_processes(config),
        replicas=config.rollout.replicas,
        shared=shared_generators(config),
        in_turns=config.placement.all_take_turns,
        learner=config.resources.learner_threads,
        generator=config.resources.generator_threads,
    )


def describe_threads(config: Config, plan: ThreadPlan) -> str:
    """The threads in words, one line for the start of a run."""
    text = plan.describe(learner_processes(config), config.rollout.replicas, shared_generators(config))
    return f"{text}; each side has all cores in its turn" if config.placement.all_take_turns else text


def drain_order(name: str) -> int:
    """Generators first (no new work is paid for), then the learner's checkpoint, its roles and rewards, the buffer.

    The front that may own Redis ends last.
    """
    if name.startswith(_GENERATORS):
        return 0
    if name.startswith(_ROLE):
        return 2
    if name.startswith(_FRONT):
        return 3
    return {LEARNER: 1, EVALUATOR: 1, REWARD: 2}.get(name, 4)


def mesh_address(address_of: Callable[[str], str], config: Config) -> str:
    """The addresses of all fronts, with commas between them; empty before the first is up."""
    return ",".join(address for address in map(address_of, _fronts(config)) if address)


def _fronts(config: Config) -> list[str]:
    return [BUFFER, *(f"{_FRONT}{index}" for index in range(1, config.buffer.fronts))]


def needs_reward_service(config: Config) -> bool:
    """True where a reward service is started here: without given endpoints or scoring inside the generators."""
    return not config.reward.endpoints and not config.reward.in_process


def interpreters_of(config: Config) -> Iterator[Interpreter]:
    """The interpreters of the services that `rollmesh run` starts for a configuration."""
    rollout = config.rollout
    yield Interpreter("buffer.python", config.buffer.python)
    yield Interpreter("learner.python", config.learner.python)
    if needs_reward_service(config):
        yield Interpreter("reward.python", config.reward.python)
    if not generator_places(config):
        return
    # SGLang's server is a process of its own, which may be elsewhere; it does not need rollmesh.
    apart = rollout.engine == "sglang" and (rollout.sglang.address is not None or rollout.sglang.python is not None)
    inside = rollout.engine if rollout.engine != "hf" and not apart else ""
    yield Interpreter("rollout.python", rollout.python, engine=inside)
    if rollout.engine == "sglang" and rollout.sglang.address is None and rollout.sglang.python is not None:
        yield Interpreter("rollout.sglang.python", rollout.sglang.python, service=False, engine="sglang")


def _environment(threads: int, python: Path | None) -> dict[str, str]:
    return {**thread_environment(threads), **environment_of(python), **ENVIRONMENT}


def learner_environment(config: Config, plan: ThreadPlan, devices: DevicePlan) -> dict[str, str]:
    """Variables of the learner, in addition to the launcher's own."""
    return _environment(plan.learner, config.learner.python) | devices.for_learner()


def redis_url(folder: Path) -> str:
    """The URL of a run folder's embedded Redis, written there by its front."""
    return (folder / REDIS_FOLDER / "url").read_text(encoding="utf-8")


class ServiceCatalogue:
    """Builds the specifications of a run's services.

    Args:
        config: the run's configuration.
        config_path: the same as a file that the services read.
        plan: compute threads.
        prepared: devices.
        ports: holds those of all services. A front keeps its own; others get a new one at each start.
        allow_changes: the run may continue with another model or other data.
        start_from: checkpoint from which the learner continues, until it has taken the run over; None: the last one.

    Raises:
        PortInUseError: `network.port` is taken.
    """

    def __init__(
        self,
        config: Config,
        config_path: Path,
        plan: ThreadPlan,
        prepared: Preparation,
        ports: HeldPorts,
        *,
        allow_changes: bool,
        start_from: Path | None = None,
    ) -> None:
        self._config = config
        self._config_path = str(config_path)
        self._folder = config.run.folder
        self._plan = plan
        self._prepared = prepared
        self._ports = ports
        # All other services know these ports from the start of the run.
        self._fronts = {name: ports.hold(config.network.port if name == BUFFER else 0) for name in _fronts(config)}
        self._allow_changes = allow_changes
        self._start_from = start_from
        self._launched = takeover_stamp(self._folder)

    def buffer(self) -> list[ServiceSpec]:
        def command(_restart: bool) -> Sequence[str]:
            program = command_of(self._config.buffer.python)
            return (*program, "buffer", self._config_path, "--port", str(self._fronts[BUFFER]), *self._ready(BUFFER))

        return [ServiceSpec(BUFFER, command, _environment(1, self._config.buffer.python), start_deadline_s=60.0)]

    def further_fronts(self) -> list[ServiceSpec]:
        """The fronts in addition to the first, which starts Redis unless a URL is configured."""
        return [self._front(name) for name in self._fronts if name != BUFFER]

    def _front(self, name: str) -> ServiceSpec:
        def command(_restart: bool) -> Sequence[str]:
            url = () if self._config.buffer.redis else (f"--buffer.redis={redis_url(self._folder)}",)
            program = command_of(self._config.buffer.python)
            return (*program, "buffer", self._config_path, *url, "--port", str(self._fronts[name]), *self._ready(name))

        return ServiceSpec(name, command, _environment(1, self._config.buffer.python), start_deadline_s=60.0)

    def others(self, mesh: str) -> list[ServiceSpec]:
        """Everything but the buffer, given the mesh address."""
        learner, *generators = self.placed(mesh)
        rewards = [self._reward(mesh)] if needs_reward_service(self._config) else []
        roles = [self._role(mesh, role) for role in self._config.learner.own_roles]
        return [learner, *rewards, *roles, *generators]

    def around_evaluator(self, mesh: str, weights: Path | None, *, with_log_probs: bool) -> list[ServiceSpec]:
        """Everything but the buffer for a run without training: an evaluator in the learner's place.

        Args:
            mesh: its address.
            weights, with_log_probs: see `rollmesh.learner.standalone.service.run`.
        """
        _, *others = self.others(mesh)
        return [self._evaluator(mesh, weights, with_log_probs=with_log_probs), *others]

    def placed(self, mesh: str) -> list[ServiceSpec]:
        """The services that the placement concerns: learner and generators."""
        generators = enumerate(generator_places(self._config))
        return [self._learner(mesh), *(self._generator(mesh, index, place) for index, place in generators)]

    def place(self, config: Config, plan: ThreadPlan, devices: DevicePlan) -> None:
        """Takes another placement; services that run keep theirs."""
        self._config, self._plan = config, plan
        self._prepared = replace(self._prepared, devices=devices)

    def _reward(self, mesh: str) -> ServiceSpec:
        def command(_restart: bool) -> Sequence[str]:
            program = command_of(self._config.reward.python)
            return (*program, "reward", "serve", self._config_path, "--mesh", mesh, *self._port(), *self._ready(REWARD))

        return ServiceSpec(REWARD, command, _environment(1, self._config.reward.python))

    def _role(self, mesh: str, role: str) -> ServiceSpec:
        name, learner = f"{_ROLE}{role}", self._config.learner

        def command(_restart: bool) -> Sequence[str]:
            program = command_of(learner.python)
            return (*program, "role", role, self._config_path, "--mesh", mesh, *self._port(), *self._ready(name))

        return ServiceSpec(
            name,
            command,
            _environment(self._plan.learner, learner.python) | self._prepared.devices.for_role(role),
            start_deadline_s=_TORCH_START_S,
            parts=tuple(f"{name}-{rank}" for rank in range(1, learner.ranks_of(role))),
            loading=Loading.of_learner(f"{name}-0", self._config.buffer.stall_limit_s),
        )

    def _generator(self, mesh: str, index: int, place: GeneratorPlace) -> ServiceSpec:
        name = place.name
        rollout, network = self._config.rollout, self._config.network
        in_addition = place.shares_devices and not self._config.placement.all_take_turns
        threads = self._plan.shared if in_addition else self._plan.generator
        # The mesh tells generators the placement in which the run began; trials of others change it.
        sharing = "--shares-devices" if place.shares_devices else "--own-devices"

        def command(_restart: bool) -> Sequence[str]:
            return (
                *(*command_of(rollout.python), "generator", "--mesh", mesh, "--host", network.host),
                *("--metrics-host", network.metrics_host, "--member-id", _member_id(name)),
                # The configuration is this user's own.
                *("--threads", str(threads), "--allow-code", "any", *self._advertise()),
                sharing,
                *(*self._security(), *self._port(), *self._ready(name)),
            )

        return ServiceSpec(
            name,
            command,
            _environment(threads, rollout.python) | self._prepared.devices.for_generator(index),
            start_deadline_s=_TORCH_START_S,
            drain_s=_GENERATOR_DRAIN_S[rollout.engine],
            may_fork=rollout.engine == "hf",
        )

    def _learner(self, mesh: str) -> ServiceSpec:
        def command(restart: bool) -> Sequence[str]:
            runner = command_of(self._config.learner.python)
            # With a Redis of its own, the former holder of this run ran here and is gone: the lock proves it.
            takeover = ("--takeover",) if restart or self._config.buffer.redis is None else ()
            changes = ("--allow-changes",) if self._allow_changes else ()
            options = (*takeover, *changes, *self._from_checkpoint(), *self._port(), *self._ready(LEARNER))
            return (*runner, "learner", self._config_path, "--mesh", mesh, *options)

        return ServiceSpec(
            LEARNER,
            command,
            learner_environment(self._config, self._plan, self._prepared.devices),
            start_deadline_s=_TORCH_START_S,
            drain_s=_LEARNER_DRAIN_S,
            final_work=FinalWork(learner_work, LAST_S),
            completes_run=True,
            parts=tuple(f"{LEARNER}-{rank}" for rank in range(1, self._config.learner.ranks)),
            loading=Loading.of_learner(f"{LEARNER}-0", self._config.buffer.stall_limit_s),
        )

    def _evaluator(self, mesh: str, weights: Path | None, *, with_log_probs: bool) -> ServiceSpec:
        def command(_restart: bool) -> Sequence[str]:
            runner = command_of(self._config.learner.python)
            stored = ("--weights", str(weights)) if weights is not None else ()
            options = (*stored, *(("--log-probs",) if with_log_probs else ()), *self._port(), *self._ready(EVALUATOR))
            return (*runner, "evaluator", self._config_path, "--mesh", mesh, *options)

        return ServiceSpec(
            EVALUATOR,
            command,
            learner_environment(self._config, self._plan, self._prepared.devices),
            start_deadline_s=_TORCH_START_S,
            completes_run=True,
        )

    def _from_checkpoint(self) -> tuple[str, ...]:
        """The checkpoint option of a start; successors of the first learner continue from the steps trained since."""
        if self._start_from is None or takeover_stamp(self._folder) != self._launched:
            return ()
        return ("--from-checkpoint", self._start_from.name)

    def _port(self) -> tuple[str, str]:
        return ("--port", str(self._ports.hold()))

    def _ready(self, name: str) -> tuple[str, str]:
        return ("--ready-file", str(ready_file(self._folder, name)))

    def _advertise(self) -> tuple[str, ...]:
        host = self._config.network.advertise
        return ("--advertise", host) if host else ()

    def _security(self) -> tuple[str, ...]:
        """Generators learn everything else over the mesh, but need these to be let in."""
        security = self._config.security
        options = {
            "--token-file": security.token_file,
            "--tls-ca": security.tls_ca,
            "--tls-cert": security.tls_cert,
            "--tls-key": security.tls_key,
            "--tls-client-ca": security.tls_client_ca,
            "--endpoint-key-file": security.endpoint_key_file,
            "--metrics-key-file": security.metrics_key_file,
            "--telemetry-key-file": security.telemetry_key_file,
        }
        pairs = [(flag, str(path)) for flag, path in options.items() if path is not None]
        insecure = ("--allow-insecure",) if security.allow_insecure else ()
        return (*(item for pair in pairs for item in pair), *insecure)
