"""The start-up probe: an engine must compute the same as transformers, or the model is refused.

The truth is one sequence at a time through transformers' eager attention, on the same (sharded) parameters. It is
compared with the engine's own way, packed: log-probs or values, and for trained models the gradient of a random
weighting of them. A packed sequence is also compared with itself among other sequences. All of that is in float32,
where a mistake cannot pass for rounding; then the compute dtype is compared with float32.

Invariants: collective, with the same verdict on every rank; torch's random numbers are not drawn from; gradients are as
before. At its peak memory holds two gradients more than a backward pass makes: as much as AdamW's moments, which do not
exist yet.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollmesh.learner.batching.types import PackedBatch, Packing
from rollmesh.learner.engines.probe_batches import (
    SEED,
    ProbeImages,
    make_probe_batches,
    not_zero,
    output_weights,
    relative_rms,
)
from rollmesh.learner.engines.tolerances import (
    REFUSED_HINT,
    ROUNDED_HINT,
    Difference,
    Evidence,
    problem_of_rounding,
    problem_of_structure,
)
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import DataError, RollmeshError

log = logging.getLogger(__name__)

# Shorter than the sequences are.
_WINDOW = 4
# The change by one more rounding: two units in the last place of float32, whose sums round as well; half of one of
# bfloat16.
_ROUNDINGS = {"float32": 2.0**-22, "bfloat16": 2.0**-9}
# Errors of models that do not accept the usual arguments.
_FOREIGN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ImportError)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedValues:
    """The results of one way of computing.

    Attributes:
        outputs: float32 [R], log-probs or values.
        gradients: this rank's shards by the parameter's index; none for a model that is not trained.
    """

    outputs: Tensor
    gradients: dict[int, Tensor]


class ProbeSubject(Protocol):
    """The subject of a probe.

    Attributes:
        packing: how it computes a micro-batch at present.
        why_rows: why that is in rows, where it is.
    """

    packing: Packing
    why_rows: str

    def read(self, batches: Sequence[PackedBatch]) -> ComputedValues:
        """Computes micro-batches in the present way."""

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Its parameters and buffers by the names of the folder; shards of this process."""

    def in_eager_rows(self) -> AbstractContextManager[None]:
        """Gives, within the context, every sequence a row of its own and transformers' eager attention."""

    def in_float32(self) -> AbstractContextManager[None]:
        """Computes, within the context, in float32 on the same parameters."""

    def recover(self) -> bool:
        """Prepares the subject for another pass after one that broke off; False: impossible."""

    def with_short_windows(self, tokens: int) -> AbstractContextManager[None]:
        """Limits, within the context, sliding attention to this many tokens, so that short sequences show it."""

    def repack(self, reason: str) -> None:
        """Gives every sequence a row of its own from now on."""

    def embedding(self) -> nn.Module:
        """The embedding of the tokens."""

    def probe_images(self) -> ProbeImages | None:
        """Images for its prompts; None: it takes text alone."""


def run_probe(subject: ProbeSubject, name: str, vocabulary: int, world: World, param_dtype: str) -> Evidence:
    """Proves the subject's packing, or that of rows where prompts cannot be shared; then its compute dtype.

    Args:
        subject: the model.
        name: for logs and errors.
        vocabulary: number of tokens.
        world: the ranks.
        param_dtype: compute dtype.

    Returns:
        The evidence for the packing that stays.

    Raises:
        DataError: it is right in neither, or not in the compute dtype.
    """
    probe = Probe(subject, name, vocabulary, world)
    with subject.with_short_windows(_WINDOW):
        try:
            with subject.in_float32():
                evidence = probe.prove("float32")
        except _BrokenPassError as broken:
            if param_dtype == "float32" or not broken.recovered:
                raise
            # Kernels for half precision alone: the tolerance is wider, but fixed as well.
            evidence = probe.prove(param_dtype)
        else:
            if param_dtype != "float32":
                evidence = dataclasses.replace(evidence, rounded=probe.compare_with_float32(param_dtype))
    if subject.packing is Packing.ROWS and world.process == 0:
        log.warning("%s: every sequence is computed in a row of its own: %s", name, subject.why_rows)
    return evidence


class _WrongError(DataError):
    """The engine computes something else than transformers; `reason` has the distance."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be trained right: {reason}", hint=REFUSED_HINT)
        self.reason = reason
        self.recovered = True


class _BrokenPassError(_WrongError):
    """A pass raised an error: of code that is not ours, or of attention that cannot run packed."""

    def __init__(self, name: str, dtype: str, reason: str, recovered: bool) -> None:
        super().__init__(name, reason)
        self.message = f"{name} cannot be computed in {dtype}: {reason}"
        self.recovered = recovered


class Probe:
    """Probes a model.

    Args:
        subject: the model.
        name: for errors.
        vocabulary: number of tokens.
        world: the ranks.
    """

    _truth: ComputedValues

    def __init__(self, subject: ProbeSubject, name: str, vocabulary: int, world: World) -> None:
        self._subject = subject
        self._name = name
        self._world = world
        self._batches = make_probe_batches(vocabulary, world.device, subject.probe_images())

    def prove(self, dtype: str) -> Evidence:
        """Proves the subject's packing; puts it into rows where prompts cannot be shared.

        Args:
            dtype: in which the subject computes at present.

        Raises:
            DataError: it is right in neither.
        """
        with self._subject.in_eager_rows():
            self._truth = self._read(self._batches.alone, dtype)
        self._require_finite()
        if self._subject.packing is not Packing.ROWS:
            try:
                return self._measure(dtype)
            except _WrongError as wrong:
                if not wrong.recovered:
                    raise
                self._subject.repack(wrong.reason)
        return self._measure(dtype)

    def _require_finite(self) -> None:
        """Refuses a model whose results are NaN or infinite, which no other way of computing could agree with.

        Raises:
            DataError: names the tensor that holds such numbers, where one does.
        """
        results = (self._truth.outputs, *self._truth.gradients.values())
        if not self._world.max_int(int(any(map(_is_broken, results)))):
            return
        held = next((name for name, tensor in self._subject.named_tensors() if _is_broken(tensor)), "")
        held = next((found.decode() for found in self._world.gather_bytes(held.encode()) if found), "")
        raise DataError(
            f"{self._name} computes values that are not finite"
            + (f": {held} holds some" if held else ", though its weights are finite"),
            hint="is the model's folder what its author wrote?",
        )

    def compare_with_float32(self, dtype: str) -> Difference:
        """Compares the compute dtype with the results that were proven in float32.

        Args:
            dtype: in which the subject computes at present.

        Raises:
            DataError: the distance is more than rounding explains.
        """
        rounded = self._difference(self._read([self._batches.packed], dtype))
        problem = problem_of_rounding(rounded)
        if problem is not None:
            with self._subject.in_float32():
                noise = self._noise(_ROUNDINGS[dtype])
            problem = problem_of_rounding(rounded, noise)
        if problem is not None:
            raise DataError(f"{self._name} cannot be trained in {dtype}: {problem}", hint=ROUNDED_HINT)
        return rounded

    def _measure(self, dtype: str) -> Evidence:
        """The evidence for the subject's present packing, where it is right."""
        found = self._read([self._batches.packed], dtype)
        among = self._read([self._batches.among_others], dtype).outputs
        leak = relative_rms(among[self._batches.witness], found.outputs[self._batches.witness], self._truth.outputs)
        evidence = Evidence(self._difference(found), float(self._world.max(leak)))
        problem = problem_of_structure(evidence.truth, evidence.leak, dtype)
        if problem is not None and dtype == "float32":
            problem = problem_of_structure(evidence.truth, evidence.leak, dtype, self._noise(_ROUNDINGS[dtype]))
        if problem is not None:
            raise _WrongError(self._name, problem)
        return evidence

    def _read(self, batches: Sequence[PackedBatch], dtype: str) -> ComputedValues:
        """Computes micro-batches; where one rank cannot, no rank has, unless others wait for it inside a collective."""
        failed: Exception | None = None
        found = None
        try:
            found = self._subject.read(batches)
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except (*_FOREIGN, DataError) as error:
            failed = error
        reason = next(filter(None, self._world.gather_failures(failed, _reason(failed))), "")
        if not reason and found is not None:
            return found
        raise _BrokenPassError(self._name, dtype, reason, self._subject.recover()) from failed

    def _noise(self, rounding: float) -> float:
        """The noise in float32 that one more rounding of this relative size makes."""
        generator = torch.Generator()

        def rounded(_module: nn.Module, _args: object, hidden: Tensor) -> Tensor:
            generator.manual_seed(SEED)
            by = 1.0 + rounding * torch.randn(hidden.shape, generator=generator).to(hidden.device)
            return (hidden.float() * by).to(hidden.dtype)

        handle = self._subject.embedding().register_forward_hook(rounded)
        try:
            with self._subject.in_eager_rows():
                return self._difference(self._read(self._batches.alone, "float32")).larger()
        finally:
            handle.remove()

    def _difference(self, found: ComputedValues) -> Difference:
        """The distance of computed values from the truth; collective, the same on every rank."""
        truth, device = self._truth, self._world.device
        outputs = float(self._world.max(relative_rms(found.outputs, truth.outputs, truth.outputs)))
        if not truth.gradients and not found.gradients:
            return Difference(outputs, None)
        squares = torch.zeros(2, device=device)
        for index in truth.gradients.keys() | found.gradients.keys():
            theirs = truth.gradients.get(index, torch.zeros((), device=device))
            squares[0] += (found.gradients.get(index, torch.zeros((), device=device)) - theirs).square().sum()
            squares[1] += theirs.square().sum()
        apart, norm = self._world.sum(squares).sqrt()
        return Difference(outputs, float(apart / not_zero(norm)))


def read(
    batches: Iterable[PackedBatch], forward: Callable[[PackedBatch], Tensor], parameters: Sequence[nn.Parameter]
) -> ComputedValues:
    """Computes micro-batches; leaves the parameters' gradients as they are.

    Args:
        batches: of the same sequences in the same order, however they are divided.
        forward: gives float32 [R'] for a micro-batch, differentiable where there are parameters.
        parameters: those that are trained; none: no gradient is computed.
    """
    draw = output_weights()
    outputs = []
    before = [parameter.grad for parameter in parameters]
    _set_gradients(parameters, [None] * len(before))
    with torch.set_grad_enabled(bool(parameters)):
        for batch in batches:
            output = forward(batch)
            outputs.append(output.detach().float())
            if parameters:
                (output * draw(output)).sum().backward()
    gradients = {i: _local(parameter.grad) for i, parameter in enumerate(parameters) if parameter.grad is not None}
    _set_gradients(parameters, before)
    return ComputedValues(torch.cat(outputs), gradients)


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    return error.message if isinstance(error, RollmeshError) else f"{type(error).__name__}: {error}"


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _is_broken(tensor: Tensor) -> bool:
    """True where a number of this process's part is NaN or infinite."""
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.is_floating_point() and not bool(local.isfinite().all())


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).float()
