"""The placement of a run in words: who takes turns, and settings of it that have no effect.

Pure, but for `rest_notices`, which looks at the mounted file systems.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.learner.placement.turn_rules import TurnRules
from rollmesh.mesh.config.derived.generator_places import devices_per_generator, generator_places
from rollmesh.mesh.config.derived.memory_release import release_of, rest_folder
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.host_memory import is_in_memory


def describe_turns(config: Config, plan: DevicePlan | None) -> str:
    """The placement in one line, for the start of a run.

    Args:
        config: of the run.
        plan: of its devices; None: not known here.
    """
    placement = config.placement
    on_cpu = plan is not None and not plan.learner and not plan.generators
    if not placement.learner_takes_turns:
        return f"placement split: generators and learner {_have(plan)}, and work at the same time"
    sharing = [place.name for place in generator_places(config) if place.shares_devices]
    own = [place.name for place in generator_places(config) if not place.shares_devices]
    batches = TurnRules.of(config).batches
    who = ", ".join(sharing) or "generators that are started by hand"
    shared = "with the same cores and memory" if on_cpu else "on the same devices"
    text = f"placement {placement.mode}: the learner and {who} take turns {shared}, up to {batches} batch(es) a turn"
    if own:
        text += f"; {', '.join(own)} always generate{'s' if len(own) == 1 else ''}"
    if placement.mode == "auto":
        text += f"; the first {placement.trial_batches} batches in each placement decide"
    return text


def _have(plan: DevicePlan | None) -> str:
    """The verb and object for two sides that take no turns."""
    if plan is None or (plan.learner and not plan.generators) or (plan.generators and not plan.learner):
        return "have devices of their own"
    if not plan.learner:
        return "share the cores and the memory of this machine"
    shared = sorted(set(plan.learner) & {number for devices in plan.generators for number in devices})
    return f"share device(s) {', '.join(map(str, shared))}" if shared else "have devices of their own"


def placement_notices(config: Config, plan: DevicePlan | None) -> Iterator[str]:
    """Sentences about settings of the placement that have no effect here, and about devices that would be idle.

    Args:
        config: of the run.
        plan: of its devices; None: not known here.
    """
    placement = config.placement
    yield from _of_other_modes(config)
    if placement.mode == "hybrid" and not config.rollout.replicas:
        yield (
            "placement hybrid: rollout.replicas is 0, so all generators that start here take turns, as with "
            "placement: collocated. Others may be started by hand: rollmesh generator --own-devices"
        )
    if plan is None:
        return
    named = {
        "placement.devices.learner": (placement.devices.learner, plan.learner),
        "placement.devices.generators": (placement.devices.generators, plan.generators),
    }
    for key, (listed, used) in named.items():
        if listed and not used:
            yield f"without effect: {key}. This part computes on the CPU, or elsewhere"
    if placement.learner_takes_turns and placement.rest_dir is not None and plan.learner:
        yield "without effect: placement.rest_dir. The learner's state rests in pinned memory of the host"
    if placement.learner_takes_turns and release_of(config, on_cpu=not plan.generators) == "process":
        yield (
            "placement.release: process. The engine's processes end in each turn of the learner and start again after "
            "it, which a swap has to wait for; the generators' logs say how long that takes"
        )
    if placement.all_take_turns and plan.generators:
        idle = sorted(set(plan.learner) - {number for devices in plan.generators for number in devices})
        each = devices_per_generator(config.rollout)
        if idle and len(idle) >= each:
            yield (
                f"idle while generators have the devices: {', '.join(map(str, idle))}. "
                f"rollout.replicas: {len(plan.learner) // each} would use them"
            )


def rest_notices(config: Config, plan: DevicePlan) -> Iterator[str]:
    """A sentence about a learner whose state rests in files that take memory; none where it does not."""
    folder = rest_folder(config, on_cpu=not plan.learner)
    if folder is not None and is_in_memory(folder):
        yield f"placement.rest_dir: files in {folder} take memory, so they free none. Set it to a folder on a disk"


def core_notices(config: Config, plan: DevicePlan, cores: int) -> Iterator[str]:
    """A sentence about more generators than cores, where they compute on the CPU; none where they do not.

    Args:
        config: of the run.
        plan: of its devices.
        cores: that this machine has for them.
    """
    generators = len(generator_places(config))
    if not plan.generators and devices_per_generator(config.rollout) and generators > cores:
        yield (
            f"{generators} generators share {cores} core(s): each takes memory, and more than one for each core "
            f"generate nothing more. Set rollout.replicas: {cores} or less"
        )


def _of_other_modes(config: Config) -> Iterator[str]:
    placement = config.placement
    set_here = placement.model_fields_set
    if "shared_generators" in set_here and placement.mode != "hybrid" and placement.shared_generators is not None:
        yield f"without effect: placement.shared_generators. It is of mode hybrid, and the mode is {placement.mode}"
    if "trial_batches" in set_here and placement.mode != "auto":
        yield f"without effect: placement.trial_batches. It is of mode auto, and the mode is {placement.mode}"
    if placement.mode == "split":
        for key in ("batches_per_turn", "release", "step_timeout_s", "rest_dir"):
            if key in set_here and getattr(placement, key) not in (None, "auto"):
                yield f"without effect: placement.{key}. No devices are shared with mode split"
