"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.addresses import split_address
from rollmesh.planning.cluster import GIB
from rollmesh.planning.measured import ComparedRun
from rollmesh.planning.megatron.memory import MegatronSetup
from rollmesh.planning.memory_uses import MemoryUse
from rollmesh.planning.placement import RENDEZVOUS, Placement
from rollmesh.planning.plan import Plan, RolePlan
from rollmesh.planning.proposal import Choice, Proposal, Search
from rollmesh.planning.role_memory import COMPONENTS, RoleSetup
from rollmesh.planning.settings import flags
from rollmesh.planning.switches import Saving
from rollmesh.planning.topologies.both import Topology, topology_lines

if TYPE_CHECKING:
    from rollmesh.planning.trace import TracedStep

_ACTIVATIONS = {True: "recomputed", False: "kept", "selective": "recomputed but for products and attention"}
# Bytes that are not 0.00 GiB.
_SMALLEST_SHOWN = 0.005 * GIB
NOT_MODELLED = (
    "not modelled: fragmentation and kernels' workspaces beyond the reserve; images; compilation; side data; experts "
    "that get more than their share of tokens; the optimizer's temporaries"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """All results of `rollmesh plan`.

    Attributes:
        plan: memory by role, phase and device.
        savings: switches, best first.
        search: a layout of its own, or what is in its way.
        choices: divisions by Megatron's engine that fit.
        topologies: the configured placement, with other ranks where these fit, and the other one.
        traced: a step by trained role, as torch's tracker counts it; empty: not asked for.
        measured: a run compared with its plan; None: not asked for.
    """

    plan: Plan
    savings: Sequence[Saving]
    search: Search
    choices: Sequence[Choice]
    topologies: tuple[Topology, ...]
    traced: dict[str, TracedStep]
    measured: ComparedRun | None


def to_json(found: Findings) -> dict[str, Any]:
    """Everything, in bytes; names as in `Plan` and its parts."""
    plan = found.plan
    return {
        "fits": plan.fits,
        "problems": list(plan.problems),
        "notices": list(plan.notices),
        "cluster": asdict(plan.cluster)
        | {"reserve": plan.cluster.describe_reserve(), "host_reserve": plan.cluster.describe_host_reserve()},
        "placement": asdict(plan.placement),
        "learner_peak_bytes": plan.learner_peak,
        "roles": [_role_json(role, found.traced.get(role.setup.name)) for role in plan.roles],
        "generator": None if plan.generator is None else asdict(plan.generator),
        "devices": [use.to_json() for use in plan.devices],
        "host": plan.host,
        "hosts": [use.to_json() for use in plan.hosts],
        "savings": [asdict(saving) for saving in found.savings],
        "proposal": None if found.search.proposal is None else asdict(found.search.proposal),
        "obstacles": list(found.search.obstacles),
        "divisions": [asdict(choice) for choice in found.choices],
        "topologies": [topology.to_json() for topology in found.topologies],
        "largest_tokens_per_micro_batch": found.search.largest_budget,
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
        "trained_parameters": setup.shape.trained if setup.trained else 0,
        "division": setup.division_json(),
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
    yield f"hosts: {cluster.describe_host()}; kept free: {cluster.describe_host_reserve()}"
    placement = plan.placement
    yield (
        f"learner: {_ranks(placement)}, {actor.division}, compute dtype of {actor.compute_bytes} bytes, activations "
        f"{_ACTIVATIONS[actor.recompute]}, {actor.tokens} tokens to a micro-batch"
        f"{f' on each of the {actor.parts} ranks that divide it' if actor.parts > 1 else ''}, "
        f"{'one' if actor.micro_batches == 1 else f'up to {actor.micro_batches}'} to a step"
    )
    for role in plan.roles:
        yield ""
        yield from _role_lines(role)
    yield ""
    yield f"learner's peak, all roles together: {_gib(plan.learner_peak)} GiB per rank"
    yield from _generator_lines(plan)
    if not cluster.cuda:
        host = ", ".join(f"{name} {_gib(size)}" for name, size in plan.host.items())
        yield f"versions and copies on the first rank's node, GiB: {host}"
    for use in (*plan.devices, *plan.hosts):
        yield _use_line(use, "device of " if use in plan.devices else "")
    yield ""
    yield from _verdict(found)
    yield NOT_MODELLED


def _ranks(placement: Placement) -> str:
    nodes = placement.learner_nodes
    return f"{placement.ranks} rank(s)" + (
        f", {placement.ranks_per_node} on each of {nodes} nodes" if nodes > 1 else ""
    )


def _use_line(use: MemoryUse, kind: str) -> str:
    users = " + ".join(f"{name} {_gib(size)}" for name, size in use.users.items())
    reserve = f" + reserve {_gib(use.reserve)}" if use.reserve else ""
    verdict = "fits" if use.fits else "does NOT fit" if use.required else "does not fit: weights travel over grpc"
    return f"{kind}{use.name}: {users}{reserve} = {_gib(use.needed)} of {_gib(use.memory)} GiB: {verdict}"


def _role_lines(role: RolePlan) -> Iterator[str]:
    setup = role.setup
    shape = setup.shape
    kind = "trained" if setup.trained else "frozen, in host memory between uses" if setup.offload else "frozen"
    if shape.adapted:
        kind = f"an adapter of {shape.trained / 1e6:.1f} million parameters is trained"
    yield (
        f"{setup.name} ({kind}): {shape.model_type}, {shape.elements / 1e9:.3f} billion parameters; "
        f"GiB per rank{_of_worst(setup)}"
    )
    used = [name for name in COMPONENTS if any(phase.parts.get(name) for phase in role.phases)]
    rows = [["", *(phase.name for phase in role.phases)]]
    rows += [[name, *(_gib(phase.parts.get(name, 0)) for phase in role.phases)] for name in used]
    rows.append(["total", *(_gib(phase.total) for phase in role.phases)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(["  " + first.strip().ljust(widths[0]), *rest])
    yield from _stage_lines(setup)


def _of_worst(setup: RoleSetup) -> str:
    if not isinstance(setup, MegatronSetup) or setup.sizes.pp == 1:
        return ""
    return f" of stage {setup.worst.number}, which needs most"


def _stage_lines(setup: RoleSetup) -> Iterator[str]:
    """A line for each stage, where there are several."""
    if not isinstance(setup, MegatronSetup) or setup.sizes.pp == 1:
        return
    for stage in setup.stages:
        largest = stage.largest
        layers = " + ".join(str(len(part)) for part in stage.layers)
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in largest.parts.items() if size)
        flying = f"{stage.in_flight} {'micro-batch(es)' if setup.sizes.vpp == 1 else 'passes'} in flight"
        yield (
            f"  stage {stage.number}: {layers} layers, {stage.parameters / 1e9:.3f} billion parameters per rank, "
            f"{flying}: {_gib(largest.total)} at {largest.name} ({parts})"
        )
    if setup.trained:
        yield f"  {_waiting(setup.waiting)}, with all {setup.micro_batches} micro-batch(es) of a step"


def _waiting(share: float) -> str:
    return f"stages wait for {share:.1%} of the time that they compute"


def _generator_lines(plan: Plan) -> Iterator[str]:
    generator = plan.generator
    if generator is None:
        yield "generators: none here"
        return
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in generator.parts.items())
    enough = "all slots" if generator.kv_tokens >= generator.wanted_tokens else f"{generator.full_sequences} sequences"
    placement = plan.placement
    if placement.elsewhere:
        others = f", {placement.on_learner_nodes} on each of the learner's" if placement.on_learner_nodes else ""
        yield f"generators: {placement.generators}, {placement.elsewhere} on each node without ranks{others}, at most"
    yield (
        f"generator, GiB on each of its {placement.devices_per_generator} device(s): {parts}; KV cache for "
        f"{generator.kv_tokens} tokens: {enough} of full length"
    )


def _verdict(found: Findings) -> Iterator[str]:
    plan = found.plan
    yield from topology_lines(found.topologies)
    yield "fits as configured" if plan.fits else "DOES NOT FIT as configured:"
    yield from (f"  {problem}" for problem in plan.problems)
    yield from plan.notices
    yield from _saving_lines(found)
    yield from _proposal_lines(found)
    yield from _choice_lines(found)
    for name, step in found.traced.items():
        role = next(role for role in plan.roles if role.setup.name == name)
        for part, size, planned in step.compared(role.phases):
            yield f"traced {name}, {part}: {_gib(size)} GiB, planned {_gib(planned)} ({planned / size - 1:+.1%})"
    if found.measured is not None:
        yield from found.measured.lines()


def _saving_lines(found: Findings) -> Iterator[str]:
    fits, savings = found.plan.fits, found.savings
    heading, then = "switches that save memory", "it fits"
    if savings and not fits and not any(saving.fits for saving in savings):
        if not any(topology.plan.fits for topology in found.topologies):
            yield "no switch that saves memory makes it fit"
        savings = [saving for saving in savings if saving.learner_fits]
        heading, then = "for the learner alone", "the learner fits its devices"
    if savings:
        yield f"{heading}, GiB on a device (on the host):"
    for saving in savings:
        enough = saving.fits or then != "it fits"
        verdict = "" if fits else f"; then {then}" if enough else "; not enough by itself"
        saved = f"{_gib(saving.device_bytes)} ({_gib(saving.host_bytes)})"
        yield f"  {flags(saving.settings)}: {saved}{verdict}: {saving.price}"


def _choice_lines(found: Findings) -> Iterator[str]:
    """Divisions that fit, and what a product of sizes would mistake."""
    if found.choices:
        ranks = found.choices[0].ranks
        yield f"divisions of {ranks} rank(s) that fit their devices, the least first, without generators:"
    for choice in found.choices:
        keys = ", ".join(f"{key}: {value}" for key, value in choice.parallel.items())
        waits = f", {_waiting(choice.waiting)}" if choice.waiting else ""
        yield (
            f"  learner.parallel: {{{keys}}}: dp {choice.dp}, {_gib(choice.rank_bytes)} GiB per rank, up to "
            f"{choice.micro_batches} micro-batch(es) per data-parallel rank and step{waits}"
        )
    setups = [role.setup for role in found.plan.roles]
    if any(isinstance(setup, MegatronSetup) and setup.model.facts.experts for setup in setups):
        yield "ep divides the same ranks as dp (and tp, cp), in another way: ranks are tp x pp x cp x dp, without ep"


def _proposal_lines(found: Findings) -> Iterator[str]:
    if found.search.largest_budget is not None:
        yield (
            f"largest micro-batch at {found.plan.placement.ranks} rank(s): "
            f"--learner.batch.tokens_per_micro_batch={found.search.largest_budget}"
        )
    proposal = found.search.proposal
    if proposal is None:
        yield "no layout was found for the learner with a micro-batch of one sequence; what comes nearest is"
        yield from (f"  {obstacle}" for obstacle in found.search.obstacles)
        return
    layout = "one rank" if proposal.ranks == 1 else proposal.division
    where = (
        f", {proposal.ranks // proposal.nodes} ranks on each of {proposal.nodes} nodes" if proposal.nodes > 1 else ""
    )
    yield (
        f"smallest layout: {flags(proposal.settings)} ({layout}{where}): {_gib(proposal.rank_bytes)} GiB per rank"
        f"{_left(found, proposal)}"
    )
    if proposal.nodes > 1:
        yield from _several_nodes(proposal.settings)


def _left(found: Findings, proposal: Proposal) -> str:
    """The devices of generators beside that layout; of a CPU all have their part."""
    plan = found.plan
    if not plan.cluster.cuda:
        return ""
    if plan.placement.in_turns and not plan.placement.apart:
        return ", which generators have in their turn"
    if plan.generator is not None and not proposal.left:
        return ", no device left to generators: only in turns (placement: collocated) do they have any"
    return f", {proposal.left} device(s) left to generators"


def _several_nodes(settings: dict[str, Any]) -> Iterator[str]:
    """The rest of what ranks of several nodes need."""
    if RENDEZVOUS in settings.values():
        host, port = split_address(RENDEZVOUS)
        yield f"  {host} stands for the address of node 0 in the network of the ranks; any free port will do for {port}"
    yield "  `rollmesh learner CFG --mesh ADDRESS --node N` on each of these nodes, N from 0 on: docs/operations.md"
    yield "  ranks of several nodes need --security.allow_insecure=true, on a private network only: docs/security.md"


def _gib(nbytes: int) -> str:
    """GiB; few bytes are not shown as none."""
    if nbytes and abs(nbytes) < _SMALLEST_SHOWN:
        return "<0.01" if nbytes > 0 else ">-0.01"
    return f"{nbytes / GIB:.2f}"
