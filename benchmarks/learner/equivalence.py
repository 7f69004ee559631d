"""Every layout of the learner next to plain transformers: losses, gradient norms, log-probs and weights of real steps.

    OMP_NUM_THREADS=1 python -m benchmarks.learner.equivalence docs/equivalence.md

The reference is transformers' eager forward pass of one sequence at a time, autograd, `clip_grad_norm_` and
`torch.optim.AdamW`. It shares no line with the engines but the batch, and an adapter's first values. The clipped
surrogate, weight decay and clipping are written here again, and so is the adapter: W + s B A in each linear layer.
Models are tiny and random, and all is float32. Behaviour log-probs are the model's own with noise, so that ratios are
near 1 and some are clipped. In batches with images every second prompt has none. In rows with router replay tokens
bring random experts. For these rows, and for those with a loss of balance, the reference has routers of its own.

Each of `ROWS` trains on three batches, of which the last has less than one micro-batch for every rank. A cell has four
largest differences: of the losses, and of the gradient norms before clipping (as a part of the norm). The others are of
the log-probs of other sequences after the last step, and of the weights. Minutes on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.learner.generated_tables import fill_page
from benchmarks.learner.tiny_models import WITH_IMAGES, save_model
from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.docs_reference import markdown_table
from rollmesh.learner.algorithms.losses.ppo import ppo
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import Packing, PromptImages, TrainSequence
from rollmesh.learner.engines.fsdp2.runner import ImagesRefusedError
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.output import layer as output_layer
from rollmesh.learner.engines.output.logit_form import find_backbone
from rollmesh.learner.engines.tensors.adapters import first_values
from rollmesh.learner.model_files.adapter_names import A_END
from rollmesh.learner.vision.families import family_of
from rollmesh.learner.vision.tower import VisionTower
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.parallel import ParallelSection, RouterSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.testing.engine_cases import MEMBERS, make_batches, make_sequences, make_spec, weights
from rollmesh.testing.plain_routers import PlainRouters, with_experts
from rollmesh.testing.worlds import EngineLayout, EngineWorld, Harness, Processes

REFUSED = "refused"
Differences = tuple[float, float, float, float]
"""The largest of losses, gradient norms (relative), log-probs and weights."""
MODELS = {
    "dense": "qwen3",
    "experts": "qwen3_moe",
    "hybrid": "qwen3_5_text",
    "images": "llava",
    "images on grids": "qwen2_5_vl",
}
"""Architectures of `tiny_models` by the columns of the table."""
# A step of AdamW follows signs; eps is far above what rounding leaves of a gradient that is 0.
OPTIMIZER = OptimizerSection(lr=1e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5)
_GROUPS = (6, 6, 1)
_BUDGET = 48
_CLIP = 0.2
# A row with compiled layers takes minutes where other programs have the cores.
_DEADLINE_S = 1200.0
# Tokens and columns: neither a micro-batch nor the vocabulary fits into one tile.
_TILE = (16, 16)


@dataclass(frozen=True, slots=True)
class Row:
    """A way to lay out the learner, or to compute in it: one row of the table.

    Attributes:
        name: in the table.
        processes: of the learner.
        changes: the fields of `EngineSpec` that make it.
        padded: a row for each sequence, whatever the model allows.
        shared: responses share their prompts, else each has its own.
        rests: the engine's memory is offloaded between the halves of every step.
        infers: log-probs are computed there.
        tiles: logits are computed in tiles of 16 tokens and 16 columns, and again in the backward pass.
    """

    name: str
    processes: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False
    shared: bool = True
    rests: bool = False
    infers: bool = False
    tiles: bool = False

    @property
    def layout(self) -> EngineLayout:
        """The layout of the engines."""
        return EngineLayout(self.name, self.processes, changes=self.changes)

    @property
    def lora(self) -> LoraSection | None:
        """The adapter that is trained; None: all weights are."""
        found: LoraSection | None = self.changes.get("lora")
        return found

    @property
    def router(self) -> RouterSection | None:
        """Further work of the routers of experts; None: they choose alone."""
        found: RouterSection | None = self.changes.get("router")
        return found

    @property
    def setting(self) -> Setting:
        """The part of it that the reference has too."""
        return Setting(self.shared, self.lora, self.router)


@dataclass(frozen=True)
class Setting:
    """The part of a row that the reference has too.

    Attributes:
        shared: responses share their prompts, else each has its own.
        lora: the adapter that is trained; None: all weights are.
        router: further work of the routers of experts.
    """

    shared: bool = True
    lora: LoraSection | None = None
    router: RouterSection | None = None


_REPLAY = {"router": RouterSection(replay=True)}
_BALANCE = {"router": RouterSection(load_balance_coeff=0.5)}
_BOTH = {"router": RouterSection(replay=True, load_balance_coeff=0.5, z_loss_coeff=0.01)}
_RECOMPUTED = {"memory": MemorySection(logits_mib=0)}
_ON_HOST = {"activation_checkpointing": True, "memory": MemorySection(offload_activations=True)}
_GATHERED = {"memory": MemorySection(reshard_after_forward=False)}
_LORA = {"lora": LoraSection(rank=4, alpha=8.0)}
ROWS = (
    Row("one rank, prompts shared"),
    Row("one rank, packed, a prompt each", shared=False),
    Row("one rank, padded", padded=True),
    Row("one rank, output layer in tiles", changes=_RECOMPUTED, tiles=True),
    Row("one rank, activations computed again", changes={"activation_checkpointing": True}),
    Row("one rank, activations but products computed again", changes={"activation_checkpointing": "selective"}),
    Row("one rank, activations on the host", changes=_ON_HOST),
    Row("one rank, compiled", changes={"compile": True}),
    Row("one rank, offloaded amid each step", rests=True),
    Row("FSDP2 x2", 2),
    Row("FSDP2 x2, packed, a prompt each", 2, shared=False),
    Row("FSDP2 x2, padded", 2, padded=True),
    Row("FSDP2 x2, output layer in tiles", 2, _RECOMPUTED, tiles=True),
    Row("FSDP2 x2, gradients travel once", 2, {"sync_once": True}),
    Row("FSDP2 x2, layers stay gathered", 2, _GATHERED),
    Row("FSDP2 x2, compiled", 2, {"compile": True}),
    Row("FSDP2 x2, offloaded amid each step", 2, rests=True),
    Row("FSDP2 x2, log-probs amid each step", 2, infers=True),
    Row("FSDP2 x4", 4),
    Row("HSDP 2x2", 4, {"parallel": ParallelSection(shards=2)}),
    Row("HSDP 2x2, padded", 4, {"parallel": ParallelSection(shards=2)}, padded=True),
    Row("HSDP 2x2, gradients travel once", 4, {"parallel": ParallelSection(shards=2), "sync_once": True}),
    Row("LoRA, one rank", changes=_LORA),
    Row("LoRA, one rank, activations computed again", changes={**_LORA, "activation_checkpointing": True}),
    Row("LoRA, FSDP2 x2", 2, _LORA),
    Row("LoRA, Ulysses x2", 2, {**_LORA, "parallel": ParallelSection(sp=2)}),
    Row("EP x2", 2, {"parallel": ParallelSection(ep=2)}),
    Row("EP x2 in FSDP2 x4", 4, {"parallel": ParallelSection(ep=2)}),
    Row("EP x2 in HSDP 2x2", 4, {"parallel": ParallelSection(ep=2, shards=2)}),
    Row("EP x2, padded", 2, {"parallel": ParallelSection(ep=2)}, padded=True),
    Row("EP x2 and Ulysses x2 in FSDP2 x4", 4, {"parallel": ParallelSection(ep=2, sp=2)}),
    Row("Ulysses x2", 2, {"parallel": ParallelSection(sp=2)}),
    Row("Ulysses x2 in FSDP2 x4", 4, {"parallel": ParallelSection(sp=2)}),
    Row("Ulysses x2 in HSDP 2x2", 4, {"parallel": ParallelSection(sp=2, shards=2)}),
    Row("Ulysses x4", 4, {"parallel": ParallelSection(sp=4)}),
    Row("Ulysses x4, packed, a prompt each", 4, {"parallel": ParallelSection(sp=4)}, shared=False),
    Row("Ulysses x4, output layer in tiles", 4, {"parallel": ParallelSection(sp=4), **_RECOMPUTED}, tiles=True),
    Row("replay, one rank", changes=_REPLAY),
    Row("replay, one rank, padded", changes=_REPLAY, padded=True),
    Row("replay, one rank, activations computed again", changes={**_REPLAY, "activation_checkpointing": True}),
    Row("replay, FSDP2 x2", 2, _REPLAY),
    Row("replay, HSDP 2x2", 4, {**_REPLAY, "parallel": ParallelSection(shards=2)}),
    Row("replay, EP x2", 2, {**_REPLAY, "parallel": ParallelSection(ep=2)}),
    Row("replay, EP x2 in HSDP 2x2", 4, {**_REPLAY, "parallel": ParallelSection(ep=2, shards=2)}),
    Row("replay, Ulysses x2", 2, {**_REPLAY, "parallel": ParallelSection(sp=2)}),
    Row("replay, Ulysses x4", 4, {**_REPLAY, "parallel": ParallelSection(sp=4)}),
    Row("balance, one rank", changes=_BALANCE),
    Row("balance, one rank, padded", changes=_BALANCE, padded=True),
    Row("balance, one rank, activations computed again", changes={**_BALANCE, "activation_checkpointing": True}),
    Row("balance, FSDP2 x2", 2, _BALANCE),
    Row("balance, FSDP2 x2, packed, a prompt each", 2, _BALANCE, shared=False),
    Row("balance, HSDP 2x2", 4, {**_BALANCE, "parallel": ParallelSection(shards=2)}),
    Row("balance, EP x2", 2, {**_BALANCE, "parallel": ParallelSection(ep=2)}),
    Row("balance, EP x2 in FSDP2 x4", 4, {**_BALANCE, "parallel": ParallelSection(ep=2)}),
    Row("balance, Ulysses x2", 2, {**_BALANCE, "parallel": ParallelSection(sp=2)}),
    Row("balance, LoRA, FSDP2 x2", 2, {**_BALANCE, **_LORA}),
    Row("replay and both losses, one rank", changes=_BOTH),
    Row(
        "replay and both losses, EP x2 and Ulysses x2 in FSDP2 x4",
        4,
        {**_BOTH, "parallel": ParallelSection(ep=2, sp=2)},
    ),
)


@dataclass(frozen=True, slots=True)
class Training:
    """Numbers of some steps, and what they lead to.

    Attributes:
        losses, grad_norms: by step.
        log_probs: float32, of `Case.unseen`, sequence after sequence, after the last step.
        weights: float32, by name, after the last step.
    """

    losses: list[float]
    grad_norms: list[float]
    log_probs: Tensor
    weights: dict[str, Tensor]

    def differences(self, reference: Training) -> Differences:
        """The largest of the losses, of the norms (relative), of the log-probs and of the weights.

        Raises:
            ValueError: the weights are not of the same names.
        """
        if self.weights.keys() != reference.weights.keys():
            raise ValueError(f"other weights: {sorted(self.weights.keys() ^ reference.weights.keys())}")
        norms = zip(self.grad_norms, reference.grad_norms, strict=True)
        return (
            max(abs(found - true) for found, true in zip(self.losses, reference.losses, strict=True)),
            max(abs(found - true) / true for found, true in norms),
            float((self.log_probs - reference.log_probs).abs().max()),
            max(float((self.weights[name] - true).abs().max()) for name, true in reference.weights.items()),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the batches of its steps, and the result of the reference.

    Attributes:
        folder: of the model.
        batches: by step.
        unseen: sequences that are not trained.
        reference: its numbers.
        moved: the largest change of a weight in these steps.
    """

    folder: Path
    batches: Sequence[Sequence[TrainSequence]]
    unseen: Sequence[TrainSequence]
    reference: Training
    moved: float


def make_case(
    folder: Path, architecture: str, setting: Setting, groups: Sequence[int] = _GROUPS, **changes: object
) -> Case:
    """Writes a model, and trains it with transformers and torch alone.

    Args:
        folder: to write.
        architecture: of `tiny_models`.
        setting: what is trained, and how.
        groups: of each step's batch; as many as the first has are not trained.
        changes: of the model's settings.
    """
    save_model(folder, architecture, **changes)
    factory = AutoModelForImageTextToText if architecture in WITH_IMAGES else AutoModelForCausalLM
    model = factory.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plain = _Plain(model, setting.router or RouterSection())

    def make(seed: int, count: int, *, shared: bool = True) -> list[TrainSequence]:
        sequences = make_sequences(seed, count) if shared else make_sequences(seed, MEMBERS * count)[::MEMBERS]
        return plain.routed(
            sequences if architecture not in WITH_IMAGES else _with_images(model, sequences, seed), seed
        )

    batches = [_near(plain, make(seed, count, shared=setting.shared), seed) for seed, count in enumerate(groups)]
    unseen = make(len(groups), groups[0])
    if setting.lora is not None:
        _add_products(model, setting.lora)
    reference = _train_plainly(plain, batches, unseen)
    moved = max(float((reference.weights[name] - tensor).abs().max()) for name, tensor in before.items())
    return Case(folder, batches, unseen, reference, moved)


def train_in(harness: Harness, case: Case, row: Row) -> Training | None:
    """Trains an engine of a row; collective.

    Returns:
        Its numbers, in the leading process; None: the layout is refused for this model.
    """
    tiles = patch.dict(output_layer.TILES, {"cpu": _TILE}) if row.tiles else nullcontext()
    with tiles:
        return _train(harness, case, row)


def _train(harness: Harness, case: Case, row: Row) -> Training | None:
    try:
        engine = harness.make(make_spec(case.folder, optimizer=OPTIMIZER))
        if row.padded:
            engine._runner.repack("of a comparison")  # type: ignore[attr-defined]  # of FSDP2
            engine.packing = Packing.ROWS
    except (ConfigError, ImagesRefusedError):
        return None
    results = [_step(engine, batch, row) for batch in case.batches]
    # Every data-parallel rank computes all of them.
    outputs = engine.infer([pack(case.unseen)])
    log_probs = outputs[0].policy()[0] if outputs else torch.empty(0)
    return Training([r["loss"] for r in results], [r["grad_norm"] for r in results], log_probs, weights(engine))


def compare(cases: Mapping[str, Case], row: Row, processes: Processes) -> dict[str, Differences | None]:
    """Trains models in the layout of a row; gives the differences of each, see `Training`; None: refused.

    Args:
        cases: by any names.
        row: of the table.
        processes: as many as it says.
    """
    world = EngineWorld(row.layout, processes)
    found = world.run(_train_all, list(cases.values()), row, deadline_s=_DEADLINE_S)[0]
    return {
        name: None if training is None else training.differences(case.reference)
        for (name, case), training in zip(cases.items(), found, strict=True)
    }


def _train_all(harness: Harness, cases: Sequence[Case], row: Row) -> list[Training | None]:
    return [train_in(harness, case, row) for case in cases]


def _step(engine: Engine, sequences: Sequence[TrainSequence], row: Row) -> dict[str, float]:
    batches = make_batches(engine, sequences, _BUDGET)
    engine.accumulate(batches, surrogate, engine.global_counts(batches))
    if row.infers:
        engine.infer(batches)
    if row.rests:
        engine.offload()
        engine.onload()
    return engine.apply().metrics


def surrogate(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """The clipped surrogate as algorithms compute it, the mean over sequences of their means."""
    per_token, metrics = ppo(output.policy()[0], tokens.behaviour_log_probs, tokens, dual_clip=None)
    return LossOutput(aggregate(per_token, tokens, counts, "seq_mean_token_mean"), metrics)


class _Plain:
    """A model of transformers, and what the reference does to its routers."""

    def __init__(self, model: nn.Module, router: RouterSection) -> None:
        self.model: Any = model
        self._router = router
        self._routers = PlainRouters(model) if router != RouterSection() else None

    def routed(self, sequences: Sequence[TrainSequence], seed: int) -> list[TrainSequence]:
        """The sequences, with random experts where they are replayed."""
        routers = self._routers
        if routers is None or not routers.layers or not self._router.replay:
            return list(sequences)
        return with_experts(sequences, routers.layers, routers.experts, routers.chosen, seed)

    def log_probs(self, sequence: TrainSequence) -> Tensor:
        """Log-probs of the response's tokens, [T]."""
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids])).long()
        first = len(sequence.prompt_ids)
        images: dict[str, Tensor] = dict(sequence.images.inputs) if sequence.images is not None else {}
        if "image_grid_thw" in images:
            images["mm_token_type_ids"] = (ids[None] == self.model.config.image_token_id).int()
        if self._routers is not None:
            self._routers.prepare(sequence)
        logits = self.model(ids[None], use_cache=False, **images).logits[0, first - 1 : -1] / sequence.temperature
        found: Tensor = logits.log_softmax(-1).gather(1, ids[first:, None])[:, 0]
        return found

    def start_step(self) -> None:
        """Begins a step, of which the passes so far are no part."""
        if self._routers is not None:
            self._routers.forget()

    def router_losses(self) -> Tensor:
        """Losses of routers over the sequences of a step, with their weights."""
        if self._routers is None:
            return torch.zeros(())
        z = (self._router.z_loss_coeff or 0.0) * self._routers.z_loss()
        return z + (self._router.load_balance_coeff or 0.0) * self._routers.balance()


def _train_plainly(
    plain: _Plain, batches: Sequence[Sequence[TrainSequence]], unseen: Sequence[TrainSequence]
) -> Training:
    model = plain.model
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained_parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in trained_parameters if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses, norms = [], []
    for batch in batches:
        per_sequence = []
        plain.start_step()
        for sequence in batch:
            trained = torch.from_numpy(sequence.response_mask == 1)
            behaviour = torch.from_numpy(sequence.behaviour_log_probs)[trained]
            ratios = (plain.log_probs(sequence)[trained] - behaviour).exp()
            surrogates = sequence.advantages * torch.stack([ratios, ratios.clamp(1 - _CLIP, 1 + _CLIP)])
            per_sequence.append(-surrogates.min(0).values.mean())
        loss = torch.stack(per_sequence).mean()
        optimizer.zero_grad()
        (loss + plain.router_losses()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained_parameters, OPTIMIZER.max_grad_norm)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        log_probs = torch.cat([plain.log_probs(s)[torch.from_numpy(s.response_mask == 1)] for s in unseen])
    _merge_products(model)
    return Training(losses, norms, log_probs, {name: p.detach() for name, p in model.named_parameters()})


class _Product(nn.Module):
    """W + s B A, of which A and B are trained."""

    def __init__(self, layer: str, weight: Tensor, lora: LoraSection) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(first_values(layer + A_END, (lora.rank, inputs), 0))
        self.b = nn.Parameter(torch.zeros(outputs, lora.rank))
        self._scale = lora.scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self._scale * self.b @ self.a


def _add_products(model: Any, lora: LoraSection) -> None:
    model.requires_grad_(False)
    # A vision part has none.
    adapted = {id(module) for module in model.get_decoder().modules()}
    linear = [(name, found) for name, found in model.named_modules() if isinstance(found, nn.Linear)]
    for name, layer in linear:
        if id(layer) in adapted:
            parametrize.register_parametrization(layer, "weight", _Product(name, layer.weight, lora))


def _merge_products(model: nn.Module) -> None:
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


def _with_images(model: PreTrainedModel, sequences: Sequence[TrainSequence], seed: int) -> list[TrainSequence]:
    """Sequences of which every second prompt, from the first on, has an image."""
    family, backbone = family_of(model.config), find_backbone(model)
    assert family is not None, "it takes images"
    assert backbone is not None, "it takes images"
    tower = VisionTower(backbone, family, "of a comparison")
    found: dict[int, tuple[NDArray[np.int32], PromptImages | None]] = {}
    pictured = []
    for s in sequences:
        # The token of images stands for them alone.
        prompt, response = (np.where(ids == tower.image_token, ids + 4, ids) for ids in (s.prompt_ids, s.response_ids))
        if (key := id(s.prompt_ids)) not in found:
            with_image = len(found) % 2 == 0
            found[key] = tower.add_synthetic(prompt, 10 * seed + len(found)) if with_image else (prompt, None)
        ids, images = found[key]
        pictured.append(replace(s, prompt_ids=ids, response_ids=response, images=images))
    return pictured


@torch.no_grad()
def _near(plain: _Plain, sequences: Sequence[TrainSequence], seed: int) -> list[TrainSequence]:
    """The sequences as a policy near the model samples them."""
    noise = np.random.default_rng(seed)
    return [
        replace(
            s,
            behaviour_log_probs=plain.log_probs(s).numpy()
            + noise.normal(0, 0.15, len(s.response_ids)).astype(np.float32),
        )
        for s in sequences
    ]


def table() -> str:
    """The table of all rows, as Markdown."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closers:
        processes = {size: Processes(size) for size in (1, 2, 4)}
        for each in processes.values():
            closers.callback(each.close)
        cases = {
            setting: {
                name: make_case(Path(folder) / f"{name}-{number}", architecture, setting)
                for name, architecture in MODELS.items()
            }
            for number, setting in enumerate({row.setting: None for row in ROWS})
        }
        lines = []
        for row in ROWS:
            found = compare(cases[row.setting], row, processes[row.processes])
            lines.append((row.name, *(_cell(found[name]) for name in MODELS)))
            print(*lines[-1], sep=" | ", file=sys.stderr)
    return markdown_table(("layout", *MODELS), lines)


def _cell(differences: Differences | None) -> str:
    return REFUSED if differences is None else ", ".join(f"{each:.0e}" for each in differences)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    fill_page(arguments, __doc__, "equivalence", table)


if __name__ == "__main__":
    main()
