"""Every layout of Megatron-Core next to one rank of FSDP2: losses, gradients, outputs and weights of real steps.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.megatron_equivalence docs/megatron-equivalence.md

Models are tiny and random, and all is float32. Each layout trains a policy and a critic on three batches, of which the
last has less than one micro-batch for every rank. In rows with router replay tokens bring random experts. A cell has
six largest differences. Two are of the losses of both models, and of their gradient norms before clipping (as a part of
the norm). The others are of log-probs, entropies and values of other sequences after the last step, and of the weights.
Minutes on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.learner.equivalence import OPTIMIZER, REFUSED, surrogate
from benchmarks.learner.generated_tables import fill_page
from benchmarks.learner.tiny_models import ARCHITECTURES
from rollmesh.learner.algorithms.docs_reference import markdown_table
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.parallel import MegatronSection, ParallelSection, RouterSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.testing.contract_inference import infer
from rollmesh.testing.engine_cases import (
    MEMBERS,
    critic_loss,
    make_batches,
    make_sequences,
    make_spec,
    save_random,
    weights,
)
from rollmesh.testing.plain_routers import with_experts
from rollmesh.testing.worlds import EngineLayout, EngineWorld, Harness, Processes

REFERENCE = EngineLayout("fsdp2")
"""The layout with which all others are compared: one rank of FSDP2."""
FIELDS = ("losses", "grad_norms", "log_probs", "entropies", "values", "weights")
"""Fields of which a cell has differences."""
# The vocabulary is no multiple of what each process has: some rows of the embedding are padding.
_VOCABULARY, _LAYERS = 150, 4
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "QK norm, tied": ("qwen3", {"tie_word_embeddings": True}),
    "biases, untied": ("qwen2", {"tie_word_embeddings": False}),
    "experts": ("qwen3_moe", {"tie_word_embeddings": False}),
}
"""Name in `tiny_models`, and settings, by the columns of the table; two query heads share a key everywhere."""
_LORA = LoraSection(rank=4, alpha=8.0)
_PLAIN = RouterSection()
_GROUPS = (6, 6, 1)
_BUDGET = 48
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """The part of a row that the reference has too.

    Attributes:
        shared: responses share their prompts, else each has its own.
        lora: the adapter of the policy that is trained; None: all weights are.
        router: further work of the routers of experts.
        groups: of each step's batch; sequences that are not trained are as many as the first has.
        layers: of the model.
    """

    shared: bool = True
    lora: LoraSection | None = None
    router: RouterSection = _PLAIN
    groups: tuple[int, ...] = _GROUPS
    layers: int = _LAYERS


@dataclass(frozen=True, slots=True)
class Row:
    """A layout: one row of the table.

    Attributes:
        name: in the table.
        processes: of the learner.
        parallel: division of the model.
        changes: further fields of `EngineSpec`.
        shared: responses share their prompts, else each has its own.
        lora: an adapter of the policy is trained.
        router: further work of the routers of experts.
    """

    name: str
    processes: int = 1
    parallel: ParallelSection = field(default_factory=ParallelSection)
    changes: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = True
    lora: bool = False
    router: RouterSection = _PLAIN

    @property
    def case(self) -> Case:
        """The part of it that the reference has too."""
        return Case(self.shared, _LORA if self.lora else None, self.router)

    @property
    def layout(self) -> EngineLayout:
        """The layout of the engines."""
        return EngineLayout(self.name, self.processes, "megatron", {"parallel": self.parallel, **self.changes})


_ROUTERS = {
    "replay": RouterSection(replay=True),
    "balance": RouterSection(load_balance_coeff=0.5),
    "replay and both losses": RouterSection(replay=True, load_balance_coeff=0.5, z_loss_coeff=0.01),
}


def _row(name: str, processes: int, changes: Mapping[str, Any] | None = None, **parallel: Any) -> Row:
    kind = name.partition(",")[0]
    router = _ROUTERS.get(kind, _PLAIN)
    return Row(name, processes, ParallelSection(**parallel), changes or {}, lora=kind == "LoRA", router=router)


_OVERLAP = {"megatron": MegatronSection(overlap_grad_reduce=True, overlap_param_gather=True)}
_AGAIN = {"activation_checkpointing": True}
ROWS = (
    Row("one rank"),
    Row("one rank, packed, a prompt each", shared=False),
    Row("one rank, activations computed again", changes=_AGAIN),
    _row("TP2", 2, tp=2),
    _row("TP2 without sequence parallelism", 2, tp=2, sp=1),
    _row("PP2", 2, pp=2),
    _row("PP2, layers 1 and 3", 2, pp=2, layers=(1, 3)),
    _row("PP3", 3, pp=3),
    _row("PP2, interleaved", 2, pp=2, vpp=2),
    _row("PP2, activations computed again", 2, _AGAIN, pp=2),
    _row("TP2, some activations computed again", 2, {"activation_checkpointing": "selective"}, tp=2),
    _row("CP2", 2, cp=2),
    Row("CP2, packed, a prompt each", 2, ParallelSection(cp=2), shared=False),
    Row("DP2, distributed optimizer", 2),
    Row("DP2, gradients and parameters overlap", 2, changes=_OVERLAP),
    _row("TP2 x PP2", 4, tp=2, pp=2),
    _row("TP2 x PP2, interleaved, overlap", 4, _OVERLAP, tp=2, pp=2, vpp=2),
    _row("TP2 x CP2", 4, tp=2, cp=2),
    _row("PP2 x CP2, interleaved", 4, pp=2, vpp=2, cp=2),
    _row("TP2 x DP2", 4, tp=2),
    _row("PP2 x DP2, overlap", 4, _OVERLAP, pp=2),
    _row("EP2", 2, ep=2),
    _row("EP4", 4, ep=4),
    _row("ETP2 in TP2", 2, tp=2, etp=2),
    _row("ETP2 x EP2", 4, etp=2, ep=2),
    _row("TP2 x EP2", 2, tp=2, ep=2),
    _row("CP2 x EP2", 2, cp=2, ep=2),
    _row("TP2 x EP2 x PP2", 4, tp=2, ep=2, pp=2),
    _row("LoRA, one rank, activations computed again", 1, _AGAIN),
    _row("LoRA, TP2", 2, tp=2),
    _row("LoRA, TP2 without sequence parallelism", 2, tp=2, sp=1),
    _row("LoRA, PP2, interleaved, activations computed again", 2, _AGAIN, pp=2, vpp=2),
    _row("LoRA, CP2", 2, cp=2),
    _row("LoRA, DP2, gradients and parameters overlap", 2, _OVERLAP),
    _row("LoRA, TP2 x PP2", 4, tp=2, pp=2),
    _row("LoRA, EP2", 2, ep=2),
    _row("LoRA, TP2 x EP2", 2, tp=2, ep=2),
    _row("replay, one rank", 1),
    _row("replay, TP2", 2, tp=2),
    _row("replay, PP2", 2, pp=2),
    _row("replay, PP2, interleaved, activations computed again", 2, _AGAIN, pp=2, vpp=2),
    _row("replay, CP2", 2, cp=2),
    _row("replay, EP2", 2, ep=2),
    _row("replay, TP2 x EP2", 2, tp=2, ep=2),
    _row("balance, one rank", 1),
    _row("balance, TP2", 2, tp=2),
    _row("balance, PP2, interleaved, activations computed again", 2, _AGAIN, pp=2, vpp=2),
    _row("balance, CP2", 2, cp=2),
    _row("balance, DP2, gradients and parameters overlap", 2, _OVERLAP),
    _row("balance, EP2", 2, ep=2),
    _row("balance, ETP2 x EP2", 4, etp=2, ep=2),
    _row("replay and both losses, PP2, activations computed again", 2, _AGAIN, pp=2),
    _row("replay and both losses, CP2 x EP2", 2, cp=2, ep=2),
    _row("replay and both losses, TP2 x EP2 x PP2", 4, tp=2, ep=2, pp=2),
)


@dataclass(frozen=True, slots=True)
class Training:
    """Numbers of some steps, and what they lead to.

    Attributes:
        losses, grad_norms: of policy and critic, by step.
        log_probs, entropies, values: float32, of sequences that are not trained, after the last step.
        weights: float32, by name, of both, after the last step.
    """

    losses: Tensor
    grad_norms: Tensor
    log_probs: Tensor
    entropies: Tensor
    values: Tensor
    weights: dict[str, Tensor]

    def differences(self, reference: Training) -> dict[str, float]:
        """The largest of each field; of the norms as a part of them.

        Raises:
            ValueError: the weights are not of the same names.
        """
        if self.weights.keys() != reference.weights.keys():
            raise ValueError(f"other weights: {sorted(self.weights.keys() ^ reference.weights.keys())}")
        found = {
            name: float((getattr(self, name) - getattr(reference, name)).abs().max())
            for name in ("losses", "log_probs", "entropies", "values")
        }
        found["grad_norms"] = float(((self.grad_norms - reference.grad_norms) / reference.grad_norms).abs().max())
        found["weights"] = max(
            float((self.weights[name] - true).abs().max()) for name, true in reference.weights.items()
        )
        return found


def make_model(folder: Path, name: str, layers: int = _LAYERS) -> Path:
    """Writes the random model of a column."""
    kind, settings = MODELS[name]
    sizes = {"num_hidden_layers": layers, "vocab_size": _VOCABULARY}
    return save_random(AutoConfig.for_model(kind, **(ARCHITECTURES[kind].settings | sizes | settings)), folder)


def train(harness: Harness, model: Path, case: Case) -> Training | None:
    """Trains policy and critic; collective.

    Args:
        harness: of a layout.
        model: folder.
        case: what is trained.

    Returns:
        The numbers; weights in the leading process alone. None: the layout is refused for this model.
    """
    try:
        policy = harness.make(make_spec(model, optimizer=OPTIMIZER, lora=case.lora, router=case.router))
    except ConfigError:
        return None
    critic = harness.make(make_spec(model, optimizer=OPTIMIZER, router=case.router), "value_model")
    metrics = []
    for seed, groups in enumerate(case.groups):
        sequences = _sequences(seed, groups, case)
        for engine, loss in ((policy, surrogate), (critic, critic_loss)):
            batches = make_batches(engine, sequences, _BUDGET)
            engine.accumulate(batches, loss, engine.global_counts(batches))
            metrics.append(engine.apply().metrics)
    unseen = _sequences(len(case.groups), case.groups[0], case)
    outputs = infer(policy, unseen, _BUDGET)
    return Training(
        torch.tensor([each["loss"] for each in metrics]),
        torch.tensor([each["grad_norm"] for each in metrics]),
        outputs["log_probs"],
        outputs["entropy"],
        infer(critic, unseen, _BUDGET)["values"],
        _named("policy", policy) | _named("critic", critic),
    )


def compare(
    models: Mapping[str, Path], row: Row, references: Mapping[str, Training], processes: Processes
) -> dict[str, dict[str, float] | None]:
    """Trains models in the layout of a row; gives the differences of each; None: refused.

    Args:
        models: folders by any names.
        row: of the table.
        references: by the same names.
        processes: as many as the row says.
    """
    world = EngineWorld(row.layout, processes)
    found = {name: world.run(train, model, row.case, deadline_s=_DEADLINE_S)[0] for name, model in models.items()}
    return {name: None if each is None else each.differences(references[name]) for name, each in found.items()}


def _sequences(seed: int, groups: int, case: Case) -> Sequence[TrainSequence]:
    sequences = make_sequences(seed, groups) if case.shared else make_sequences(seed, MEMBERS * groups)[::MEMBERS]
    if not case.router.replay:
        return sequences
    sizes = ARCHITECTURES["qwen3_moe"].settings
    return with_experts(sequences, case.layers, sizes["num_experts"], sizes["num_experts_per_tok"], seed)


def _named(role: str, engine: Engine) -> dict[str, Tensor]:
    return {f"{role}.{name}": tensor for name, tensor in weights(engine).items()}


def reference(model: Path, case: Case, processes: Processes) -> Training:
    """The numbers of one rank of FSDP2."""
    found = EngineWorld(REFERENCE, processes).run(train, model, case)[0]
    assert found is not None, "one rank divides nothing"
    return found


def table() -> str:
    """The table of all rows, as Markdown."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closers:
        processes = {size: Processes(size) for size in sorted({row.processes for row in ROWS})}
        for each in processes.values():
            closers.callback(each.close)
        models = {name: make_model(Path(folder) / kind, name) for name, (kind, _) in MODELS.items()}
        references = {
            case: {name: reference(model, case, processes[1]) for name, model in models.items()}
            for case in {row.case: None for row in ROWS}
        }
        lines = []
        for row in ROWS:
            found = compare(models, row, references[row.case], processes[row.processes])
            lines.append((row.name, *(_cell(found[name]) for name in MODELS)))
            print(*lines[-1], sep=" | ", file=sys.stderr)
    return markdown_table(("layout", *MODELS), lines)


def _cell(differences: Mapping[str, float] | None) -> str:
    return REFUSED if differences is None else ", ".join(f"{differences[name]:.0e}" for name in FIELDS)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    fill_page(arguments, __doc__, "megatron", table)


if __name__ == "__main__":
    main()
