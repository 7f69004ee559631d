"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollmesh.planning.cluster import GIB
from rollmesh.planning.measured import MeasuredRun
from rollmesh.planning.plan import Plan, RolePlan
from rollmesh.planning.proposal import Proposal
from rollmesh.planning.switches import Saving, as_yaml
from rollmesh.planning.training import COMPONENTS

if TYPE_CHECKING:
    from rollmesh.planning.trace import TracedStep

_ACTIVATIONS = {True: "recomputed", False: "kept", "selective": "recomputed but for products and attention"}
NOT_MODELLED = (
    "not modelled: fragmentation and kernels' workspaces beyond the reserve; images; compilation; side data; experts "
    "that get more than their share of tokens; the optimizer's temporaries"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that `rollmesh plan` says.

    Attributes:
        plan: memory by role, phase and device.
        savings: switches, best first.
        proposal: a layout of its own; None: none fits.
        largest_budget: of a micro-batch at the configured ranks; None: none fits.
        traced: a step by trained role, as torch's tracker counts it; empty: not asked for.
        measured: of a run folder; None: not asked for.
    """

    plan: Plan
    savings: Sequence[Saving]
    proposal: Proposal | None
    largest_budget: int | None
    traced: dict[str, TracedStep]
    measured: MeasuredRun | None


def to_json(found: Findings) -> dict[str, Any]:
    """Everything, in bytes; names as in `Plan` and its parts."""
    plan = found.plan
    return {
        "fits": plan.fits,
        "problems": list(plan.problems),
        "cluster": asdict(plan.cluster) | {"reserve": plan.cluster.describe_reserve()},
        "placement": asdict(plan.placement),
        "learner_peak_bytes": plan.learner_peak,
        "roles": [_role_json(role, found.traced.get(role.setup.name)) for role in plan.roles],
        "generator": None if plan.generator is None else asdict(plan.generator),
        "devices": [asdict(use) | {"needed": use.needed, "fits": use.fits} for use in plan.devices],
        "host": plan.host,
        "savings": [asdict(saving) for saving in found.savings],
        "proposal": None if found.proposal is None else asdict(found.proposal),
        "largest_tokens_per_micro_batch": found.largest_budget,
        "measured": None if found.measured is None else asdict(found.measured),
        "not_modelled": NOT_MODELLED,
    }


def _role_json(role: RolePlan, traced: TracedStep | None) -> dict[str, Any]:
    setup = role.setup
    return {
        "name": setup.name,
        "model": setup.shape.name,
        "model_type": setup.shape.model_type,
        "parameters": setup.shape.elements,
        "trained": setup.trained,
        "shards": setup.shards,
        "sharded": setup.sharded,
        "compute_bytes": setup.compute_bytes,
        "recompute": setup.recompute,
        "offload": setup.offload,
        "tokens_per_micro_batch": setup.tokens,
        "micro_batches": setup.micro_batches,
        "resting_bytes": role.resting,
        "phases": {phase.name: phase.parts | {"total": phase.total} for phase in role.phases},
        "traced_bytes": None if traced is None else asdict(traced),
    }


def lines(found: Findings) -> Iterator[str]:
    """The plan for a terminal."""
    plan = found.plan
    cluster, actor = plan.cluster, plan.roles[0].setup
    yield (
        f"devices: {cluster.nodes} node(s) x {cluster.per_node} {cluster.name}, {_gib(cluster.memory)} GiB each; kept "
        f"free: {cluster.describe_reserve()}"
    )
    ranks, copies = plan.placement.ranks, plan.placement.ranks // actor.shards
    layout = f"FSDP2, {_shards(actor.shards, copies)}" if actor.sharded else "not sharded"
    yield (
        f"learner: {ranks} rank(s), {layout}, compute dtype of {actor.compute_bytes} bytes, activations "
        f"{_ACTIVATIONS[actor.recompute]}, {actor.tokens} tokens to a micro-batch"
        f"{f' on each of the {actor.sp} ranks that divide it' if actor.sp > 1 else ''}, "
        f"{'one' if actor.micro_batches == 1 else f'up to {actor.micro_batches}'} to a step"
    )
    for role in plan.roles:
        yield ""
        yield from _role_lines(role)
    yield ""
    yield f"learner's peak, all roles together: {_gib(plan.learner_peak)} GiB per rank"
    yield from _generator_lines(plan)
    host = ", ".join(f"{name} {_gib(size)}" for name, size in plan.host.items())
    yield f"host memory on the first rank's node, GiB: {host}"
    for use in plan.devices:
        users = " + ".join(f"{name} {_gib(size)}" for name, size in use.users.items())
        verdict = "fits" if use.fits else "does NOT fit"
        yield f"device of {use.name}: {users} + reserve {_gib(use.reserve)} = {_gib(use.needed)} GiB: {verdict}"
    yield ""
    yield from _verdict(found)
    yield NOT_MODELLED


def _shards(shards: int, copies: int) -> str:
    return "full shard" if copies == 1 else f"{copies} copies of {shards} shard(s)"


def _role_lines(role: RolePlan) -> Iterator[str]:
    setup = role.setup
    kind = "trained" if setup.trained else "frozen, in host memory between uses" if setup.offload else "frozen"
    yield (
        f"{setup.name} ({kind}): {setup.shape.model_type}, {setup.shape.elements / 1e9:.3f} billion parameters; "
        "GiB per rank"
    )
    used = [name for name in COMPONENTS if any(phase.parts.get(name) for phase in role.phases)]
    rows = [["", *(phase.name for phase in role.phases)]]
    rows += [[name, *(_gib(phase.parts.get(name, 0)) for phase in role.phases)] for name in used]
    rows.append(["total", *(_gib(phase.total) for phase in role.phases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(["  " + first.strip().ljust(widths[0]), *rest])


def _generator_lines(plan: Plan) -> Iterator[str]:
    generator = plan.generator
    if generator is None:
        yield "generators: none here"
        return
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in generator.parts.items())
    enough = "all slots" if generator.kv_tokens >= generator.wanted_tokens else f"{generator.full_sequences} sequences"
    yield (
        f"generator, GiB on each of its {plan.placement.devices_per_generator} device(s): {parts}; KV cache for "
        f"{generator.kv_tokens} tokens: {enough} of full length"
    )


def _verdict(found: Findings) -> Iterator[str]:
    plan = found.plan
    yield "fits" if plan.fits else "DOES NOT FIT:"
    yield from (f"  {problem}" for problem in plan.problems)
    if found.savings:
        yield "switches that save memory, GiB on a device (on the host):"
    for saving in found.savings:
        verdict = "" if plan.fits else "; then it fits" if saving.fits else "; not enough alone"
        price = f": {saving.price}" if saving.price else ""
        yield f"  {_flags(saving.settings)}: {_gib(saving.device_bytes)} ({_gib(saving.host_bytes)}){verdict}{price}"
    yield from _proposal_lines(found)
    for name, step in found.traced.items():
        role = next(role for role in plan.roles if role.setup.name == name)
        for part, size, planned in step.compared(role.phases):
            yield f"traced {name}, {part}: {_gib(size)} GiB, planned {_gib(planned)} ({planned / size - 1:+.1%})"
    if found.measured is not None:
        yield from found.measured.lines()


def _proposal_lines(found: Findings) -> Iterator[str]:
    if found.largest_budget is not None:
        yield (
            f"largest micro-batch at {found.plan.placement.ranks} rank(s): "
            f"--learner.batch.tokens_per_micro_batch={found.largest_budget}"
        )
    proposal = found.proposal
    if proposal is None:
        yield "no number of ranks on these devices holds the learner with a micro-batch of one sequence"
        return
    layout = "one rank" if proposal.ranks == 1 else f"FSDP2, {_shards(proposal.ranks, 1)}"
    where = "" if proposal.within_node else ", over several nodes"
    yield (
        f"smallest layout: {_flags(proposal.settings)} ({layout}{where}): {_gib(proposal.rank_bytes)} GiB per rank, "
        f"{proposal.left} device(s) left to generators"
    )


def _flags(settings: dict[str, Any]) -> str:
    """Keys as they are given on the command line."""
    return " ".join(f"--{key}={as_yaml(value)}" for key, value in settings.items())


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"
