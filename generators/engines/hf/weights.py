"""The weights of a model: new ones are staged while decoding continues and put in place by pointing at them.

Invariants: a set of tensors is complete, checked and where the model can use it before anything of the model changes.
The swap copies nothing, so that it takes microseconds per tensor whatever their size. A swap that fails halfway points
back, so that a model never holds a mixture of two versions. Tensors that are what the model needs (dtype, device,
contiguous) are served from the memory in which they came; it is never written to again. So the tensors of a version
stay as they are for as long as they are referenced, whatever is swapped in meanwhile.

While the engine sleeps they lie on the host, or nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from rollmesh.mesh.errors import WeightsError


class StagedWeights:
    """A complete set of weights, ready to be swapped in.

    Attributes:
        pairs: (parameter, tensor of its dtype, device and shape), each parameter once.
    """

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.pairs = pairs


class ModelWeights:
    """The parameters and persistent buffers of a model; tied names share one.

    Those that the model was built with mean nothing, and are released at once: the first set takes their place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._shapes = {name: target.shape for name, target in self._targets.items()}
        self._home = next(iter(self._targets.values())).device
        self._place = self._home
        # One for all: the allocator gives no memory of one stream to another, each would keep a model of its own.
        self._stream = torch.cuda.Stream(self._home) if self._home.type == "cuda" else None
        self._names: dict[int, list[str]] = {}
        for name, target in self._targets.items():
            self._names.setdefault(id(target), []).append(name)
        self.drop()
        self.to_device()

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Checks a complete set of tensors and brings it to where it can serve; for any thread.

        Raises:
            WeightsError: a tensor is unknown, has another shape, or is missing; names it. Or there is no memory.
        """
        placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            with self._on_copy_stream():
                for name, source in tensors:
                    target = self._targets.get(name)
                    if target is None:
                        raise WeightsError(f"tensor {name!r} is not part of the model", hint="send Hugging Face names")
                    if source.shape != self._shapes[name]:
                        shapes = f"{list(source.shape)}, expected {list(self._shapes[name])}"
                        raise WeightsError(f"tensor {name!r} has shape {shapes}")
                    if id(target) not in placed:
                        placed[id(target)] = (target, _usable(source, target.dtype, self._place))
        except (RuntimeError, MemoryError) as error:
            raise WeightsError(
                f"no place for new weights next to those in service: {error}", hint="the old ones stay in service"
            ) from error
        missing = sorted(names[0] for target, names in self._names.items() if target not in placed)
        if missing:
            raise WeightsError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
        return StagedWeights(list(placed.values()))

    def swap(self, staged: StagedWeights) -> StagedWeights:
        """Puts staged weights in place, between two steps, and returns those that were there.

        Raises:
            WeightsError: it failed; the former weights are in place, all of them.
        """
        former = StagedWeights([(target, target.data) for target, _ in staged.pairs])
        try:
            for target, tensor in staged.pairs:
                # It may have been staged while the engine slept, or before.
                _point(target, tensor.to(self._place))
        except (RuntimeError, MemoryError) as error:
            for target, tensor in former.pairs:
                target.data = tensor
            raise WeightsError(f"the swap failed, the former weights are back in place: {error}") from error
        return former

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors in place now, by name; they stay as they are through later swaps."""
        return {name: target.data for name, target in self._targets.items()}

    def drop(self) -> int:
        """Releases all of them; returns the bytes. Before the model runs again, a complete set is swapped in."""
        # One that comes before `to_device` waits for it on the host.
        self._place = torch.device("cpu")
        freed = 0
        for target in self._distinct():
            freed += target.data.nbytes if target.device == self._home else 0
            target.data = torch.empty(0, dtype=target.dtype, device=self._home)
        return freed

    def to_host(self) -> int:
        """Keeps them in host memory until `to_device`; returns the bytes that the device has again."""
        return self._move(torch.device("cpu"))

    def to_device(self) -> None:
        """Brings them back.

        Raises:
            RuntimeError: there is no memory; they are where they were.
        """
        self._move(self._home)

    def _move(self, place: torch.device) -> int:
        targets = [target for target in self._distinct() if target.device != place]
        moved = [_copy_to(target.data, place) for target in targets]
        if self._home.type == "cuda":
            # Copies are queued like kernels; the memory that is released below is given out again.
            torch.cuda.synchronize(self._home)
        freed = sum(target.data.nbytes for target in targets)
        for target, tensor in zip(targets, moved, strict=True):
            target.data = tensor
        self._place = place
        return freed

    def _distinct(self) -> list[torch.Tensor]:
        return list({id(target): target for target in self._targets.values()}.values())

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Runs copies on a stream of their own, on a GPU; they are complete at the end."""
        if self._stream is None or self._place != self._home:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _usable(source: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor itself where the model can use it as it is, else a copy."""
    return source.detach().to(device=device, dtype=dtype).contiguous()


def _copy_to(source: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A copy elsewhere, which may still be under way; what a GPU had lies in pinned memory, which it reaches itself."""
    if not source.is_cuda:
        return source.to(place, non_blocking=source.is_pinned())
    return torch.empty_like(source, device=place, pin_memory=True).copy_(source, non_blocking=True)


def _point(target: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        # It was made on another stream: its memory must not be given out again while this one still reads it.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    target.data = tensor
