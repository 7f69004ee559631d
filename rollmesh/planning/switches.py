"""Keys of the configuration that save memory: one line each.

The bytes that a switch saves are the difference of two plans. So no formula stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.megatron.layouts import divisions, in_parallel
from rollmesh.planning.megatron.memory import MegatronSetup
from rollmesh.planning.placement import node_counts, spread
from rollmesh.planning.plan import MEGATRON, Plan, micro_batch
from rollmesh.planning.settings import with_settings

Value = Callable[[Config, Plan], Any]
Planner = Callable[[Config], Plan]


@dataclass(frozen=True, slots=True)
class Switch:
    """A key, and the value that saves memory.

    Attributes:
        key: dotted.
        value: from the configuration and its plan; None: nothing to be had.
        price: in words.
    """

    key: str
    value: Value
    price: str


@dataclass(frozen=True, slots=True)
class Saving:
    """The effect of a switch.

    Attributes:
        settings: keys with their values.
        price: in words.
        device_bytes: fewer at the peak of a device, of the use where they are most.
        host_bytes: fewer on the first rank's host.
        fits: the run would fit then.
        learner_fits: the learner would fit its devices, without generators, and does not as it is.
    """

    settings: dict[str, Any]
    price: str
    device_bytes: int
    host_bytes: int
    fits: bool
    learner_fits: bool = False


def _halved_budget(config: Config, _: Plan) -> int | None:
    tokens, _count = micro_batch(config)
    half = max(tokens // 2, config.rollout.context_tokens)
    return half if half < tokens else None


def _more_division(config: Config, plan: Plan) -> int | None:
    parallel = config.learner.parallel
    if config.learner.engine == MEGATRON:
        return None
    parts = 2 * (parallel.sp or 1)
    divides = parallel.dp is None and config.learner.ranks % parts == 0 and plan.roles[0].setup.shape.heads % parts == 0
    return parts if divides else None


def _divided_tokens(config: Config, _: Plan) -> int | None:
    parallel = config.learner.parallel
    return _if(config.learner.engine == MEGATRON and parallel.sp == 1 and parallel.tp > 1, parallel.tp)


def _smaller_share(plan: Plan) -> float | None:
    """The largest share that leaves the other users of a device their room."""
    use = next((use for use in plan.devices if "generator" in use.users and not use.fits), None)
    if use is None or plan.generator is None:
        return None
    left = use.memory - use.needed + use.users["generator"]
    share = int(100 * left / use.memory / plan.placement.generators_per_device) / 100
    return share if share > 0 else None


def _fewer_on_the_host(key: str) -> Switch:
    """Takes back an offload where the host has no room for it."""

    def value(config: Config, plan: Plan) -> bool | None:
        short = any(use.problem for use in plan.hosts)
        return _if(short and getattr(config.learner.memory, key), False)

    return Switch(f"learner.memory.{key}", value, "memory of the devices")


def _of_engine(engine: Literal["vllm", "sglang"], share: str) -> Switch:
    """The switch of a generator's engine for its share of a device."""

    def smaller(config: Config, plan: Plan) -> float | None:
        return _smaller_share(plan) if config.rollout.engine == engine else None

    return Switch(f"rollout.{engine}.{share}", smaller, "a smaller KV cache")


def _if(condition: bool, value: Any) -> Any:
    return value if condition else None


SWITCHES = (
    Switch(
        "learner.activation_checkpointing",
        lambda _, plan: _if(plan.roles[0].setup.recompute is not True, True),
        "a second forward pass of every block, about a third more time",
    ),
    Switch(
        "learner.param_dtype",
        lambda _, plan: _if(plan.cluster.cuda and plan.roles[0].setup.compute_bytes == 4, "bfloat16"),
        "computation rounds to 8 bits; masters stay float32",
    ),
    Switch(
        "learner.gradient_sync",
        lambda config, _: _if(config.learner.gradient_sync == "step", "micro_batch"),
        "gradients travel after every micro-batch",
    ),
    Switch(
        "learner.memory.reshard_after_forward",
        lambda config, _: _if(not config.learner.memory.reshard_after_forward, True),
        "layers are gathered a second time",
    ),
    Switch(
        "learner.memory.offload_activations",
        lambda config, plan: _if(
            plan.cluster.cuda
            and plan.roles[0].setup.recompute is True
            and not config.learner.memory.offload_activations,
            True,
        ),
        "copies to pinned host memory and back",
    ),
    Switch(
        "learner.memory.offload_optimizer",
        lambda config, plan: _if(plan.cluster.cuda and not config.learner.memory.offload_optimizer, True),
        "copies from and to the host for every step of the optimizer",
    ),
    Switch(
        "learner.memory.offload_params",
        lambda config, plan: _if(
            plan.cluster.cuda and len(plan.roles) > 1 and not config.learner.memory.offload_params, True
        ),
        "copies from and to the host for every use",
    ),
    *map(_fewer_on_the_host, ("offload_activations", "offload_optimizer", "offload_gradients", "offload_params")),
    Switch(
        "learner.memory.logits_mib",
        lambda config, _: _if(config.learner.memory.logits_mib > 0, 0),
        "logits are computed a second time in the backward pass",
    ),
    Switch(
        "learner.optimizer.state_dtype",
        lambda config, _: _if(
            config.learner.optimizer.name == "adamw" and config.learner.optimizer.state_dtype == "float32", "bfloat16"
        ),
        "moments are rounded stochastically",
    ),
    Switch(
        "learner.optimizer.state_dtype",
        lambda config, _: _if(
            config.learner.optimizer.name == "adamw" and config.learner.optimizer.state_dtype != "8bit", "8bit"
        ),
        "moments are rounded to 256 numbers",
    ),
    Switch(
        "learner.parallel.shards",
        lambda config, _: _if(config.learner.parallel.shards not in (None, config.learner.ranks), config.learner.ranks),
        "layers and gradients travel between all ranks",
    ),
    Switch("learner.batch.tokens_per_micro_batch", _halved_budget, "more and smaller passes"),
    Switch(
        "learner.parallel.sp",
        _more_division,
        "half the data-parallel ranks; two exchanges in each layer between ranks of a micro-batch",
    ),
    Switch("learner.parallel.sp", _divided_tokens, "other exchanges around each divided matrix, no more of them"),
    Switch(
        "learner.parallel.cp",
        lambda config, _: _if(config.learner.engine == MEGATRON, 2 * config.learner.parallel.cp),
        "half the data-parallel ranks; keys and values travel in each layer between ranks of a sequence",
    ),
    Switch(
        "model.dtype",
        lambda config, _: _if(config.model.dtype == "float32", "bfloat16"),
        "generators compute, and weights travel, in bfloat16",
    ),
    _of_engine("vllm", "gpu_memory_utilization"),
    _of_engine("sglang", "mem_fraction"),
    Switch(
        "weights.keep_versions",
        lambda config, _: _if(config.kept_versions > 1, 1),
        "slow receivers begin again more often",
    ),
    Switch(
        "weights.chain",
        lambda config, _: _if(config.weights.chain > 1, 1),
        "receivers of older versions fetch whole ones",
    ),
)


def savings(config: Config, plan: Plan, planner: Planner) -> Iterator[Saving]:
    """The switches that save memory here, the largest saving on a device first.

    Where none is enough, those that are needed together follow, or all of them. If other parts do not fit either, those
    that the learner needs together do.

    Args:
        config: of the run.
        plan: of it.
        planner: plans another configuration on the same devices.
    """
    lacking = not plan.fits and not _alone(config, planner).on_devices
    found = [
        _judged(saving, config, planner, lacking=lacking)
        for switch in _applicable(config, plan, planner)
        if (saving := _try(config, plan, planner, *switch))
    ]
    found.sort(key=lambda saving: (-saving.device_bytes, -saving.host_bytes))
    yield from found
    together: dict[str, Any] = {}
    # The value that saves most is the last one of its key.
    for saving in reversed(found):
        together |= saving.settings
    if len(found) > 1 and not any(saving.fits for saving in found):
        every = _try(config, plan, planner, together, "all of these together")
        if every is not None:
            every = _judged(every, config, planner, lacking=lacking and not any(each.learner_fits for each in found))
            yield _fewest(config, plan, planner, found, every) if every.fits or every.learner_fits else every


def _alone(config: Config, planner: Planner) -> Plan:
    """The plan without generators."""
    return planner(with_settings(config, {"rollout.replicas": 0}))


def _judged(saving: Saving, config: Config, planner: Planner, *, lacking: bool) -> Saving:
    """With the learner's part judged by itself, where that does not fit its devices as it is."""
    fits = lacking and (saving.fits or _alone(with_settings(config, saving.settings), planner).on_devices)
    return replace(saving, learner_fits=fits)


def _fewest(config: Config, plan: Plan, planner: Planner, found: Sequence[Saving], every: Saving) -> Saving:
    """Leaves those out that are not needed, beginning with those that save least."""
    fewest = every
    for saving in reversed(found):
        rest = {key: value for key, value in fewest.settings.items() if key not in saving.settings}
        tried = _try(config, plan, planner, rest, "these together") if rest else None
        if tried is None:
            continue
        tried = _judged(tried, config, planner, lacking=every.learner_fits)
        if tried.fits if every.fits else tried.learner_fits:
            fewest = tried
    return fewest


def _applicable(config: Config, plan: Plan, planner: Planner) -> Iterator[tuple[dict[str, Any], str]]:
    for switch in SWITCHES:
        if (value := switch.value(config, plan)) is not None:
            yield {switch.key: value}, switch.price
    yield from _layouts(config, plan, planner)
    yield from _divisions(config, plan, planner)
    yield from _wider_engine(config, plan, planner)
    for role in plan.roles:
        if not role.setup.trained and not role.setup.offload and plan.cluster.cuda:
            yield {f"learner.roles.{role.setup.name}.offload": True}, "copies from and to the host for every use"


def _layouts(config: Config, plan: Plan, planner: Planner) -> Iterator[tuple[dict[str, Any], str]]:
    """Twice the ranks, or as often that as their devices need, and the same ranks over more nodes."""
    cluster, placement = plan.cluster, plan.placement
    if not cluster.cuda:
        return
    ranks = 1
    while ranks <= placement.ranks:
        ranks *= 2
    taken = 0 if placement.shared else placement.generators * placement.devices_per_generator
    wider_layouts = []
    while ranks + taken <= cluster.count:
        wider_layouts += [spread(config, ranks, nodes) for nodes in islice(node_counts(cluster, ranks), 1)]
        ranks *= 2
    turns = placement.in_turns and not placement.apart
    price = "more devices, which generators may have in their turn" if turns else "devices, which generators lack then"
    for layout in _first_with_room(config, planner, wider_layouts, "learner"):
        yield layout, price
    for nodes in node_counts(cluster, placement.ranks):
        if nodes > placement.learner_nodes:
            wider = spread(config, placement.ranks, nodes)
            del wider["learner.ranks"]
            yield wider, "ranks exchange over the network"
            break


def _divisions(config: Config, plan: Plan, planner: Planner) -> Iterator[tuple[dict[str, Any], str]]:
    """The least division of the model by Megatron's engine that leaves the configured ranks room."""
    actor, placement = plan.roles[0].setup, plan.placement
    if not isinstance(actor, MegatronSetup) or not any(use.problem for use in plan.devices):
        return
    found = divisions(config.learner.parallel, placement.ranks, placement.ranks_per_node, actor.model.facts)
    for settings in _first_with_room(config, planner, [in_parallel(keys) for keys in found if keys], "learner"):
        yield settings, "exchanges in each layer (tp, ep), or stages that wait for one another (pp)"


def _wider_engine(config: Config, plan: Plan, planner: Planner) -> Iterator[tuple[dict[str, Any], str]]:
    """Twice the devices for each generator, or as often that as its weights need."""
    engine = config.rollout.engine
    if engine == "hf" or plan.generator is None:
        return
    times = [2**power for power in range(1, plan.cluster.per_node.bit_length())]
    devices, parts = plan.placement.devices_per_generator, getattr(config.rollout, engine).tensor_parallel
    key = f"rollout.{engine}.tensor_parallel"
    wider = [{key: more * parts} for more in times if more * devices <= plan.cluster.per_node]
    for settings in _first_with_room(config, planner, wider, "generator"):
        yield settings, f"{settings[key] // parts} times the devices for each generator"


def _first_with_room(
    config: Config, planner: Planner, candidates: Sequence[dict[str, Any]], user: str
) -> Iterator[dict[str, Any]]:
    """The first settings at which a user's devices have room, else the last that are possible; none without any.

    If generators on the learner's devices leave room to none, the learner is judged without them.
    """
    last = None
    for settings in candidates:
        try:
            tried = planner(with_settings(config, settings))
        except ConfigError:
            continue
        last = settings
        if not any(use.problem for use in tried.devices if user in use.users):
            yield settings
            return
    if last is not None and user == "learner" and config.rollout.replicas:
        yield from _first_with_room(with_settings(config, {"rollout.replicas": 0}), planner, candidates, user)
    elif last is not None:
        yield last


def _try(config: Config, plan: Plan, planner: Planner, settings: dict[str, Any], price: str) -> Saving | None:
    """A switch's effect; None where it saves nothing, or contradicts the rest."""
    try:
        changed = planner(with_settings(config, settings))
    except ConfigError:
        return None
    before, after = ({use.name: use.needed for use in planned.devices} for planned in (plan, changed))
    device = max((nbytes - after[name] for name, nbytes in before.items() if name in after), default=0)
    host = sum(plan.host.values()) - sum(changed.host.values())
    return Saving(settings, price, device, host, changed.fits) if max(device, host) > 0 else None
