"""The adapters that an engine has at once: one per version that still has responses, and the newest.

Invariants: a job keeps the adapter under which it began, so all its tokens are of one version. An earlier adapter is
given up when its last job has ended, at the next swap. There are at most `most`: where a swap would make one more, all
jobs are interrupted before, and continue from their tokens under the newest.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollmesh.generators.engines.adapters import AdapterWeights

if TYPE_CHECKING:
    import torch

MOST_ADAPTERS = 4
"""Versions alive in an engine: a response outlives so many swaps under its own."""


class AdapterForm(Protocol):
    """An adapter in the form in which an engine takes it: files, or shared memory."""

    def discard(self) -> None:
        """Gives them back; any thread, and a second call does nothing."""


@dataclass(slots=True, eq=False)
class LiveAdapter:
    """An adapter in the engine.

    Attributes:
        label: of its version.
        number: unique in this engine, from 1 on.
        name: unique among all engines: no other adapter ever has it, should a version come twice.
        form: in which it was loaded.
        jobs: that compute with it.
    """

    label: str
    number: int
    name: str
    form: Any
    jobs: int = 0


@dataclass(slots=True, eq=False)
class StagedAdapter:
    """An adapter that is about to be loaded.

    Attributes:
        adapter: as it came.
        form: in which the engine takes it.
        base: staged tensors of its base; None where the engine has it.
    """

    adapter: AdapterWeights
    form: AdapterForm
    base: Any


class ServedAdapters:
    """The adapters of one engine. Used in one event loop; `stage` in any thread.

    Args:
        most: that live at once.

    Attributes:
        base_digest: of the base in the engine; empty where it has none.
        newest: the adapter of new jobs; None before the first.
    """

    def __init__(self, most: int = MOST_ADAPTERS) -> None:
        self._most = most
        self._live: list[LiveAdapter] = []
        self._numbers = itertools.count(1)
        self._salt = uuid.uuid4().hex[:8]
        self.base_digest = ""
        self.newest: LiveAdapter | None = None

    @property
    def is_full(self) -> bool:
        """True where every adapter has jobs, and there is no place for another."""
        return len(self._live) >= self._most and all(adapter.jobs for adapter in self._live)

    def stage(
        self,
        adapter: AdapterWeights,
        *,
        form: Callable[[AdapterWeights], AdapterForm],
        stage_base: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    ) -> StagedAdapter:
        """Brings an adapter into the engine's form, and stages its base where the engine has not got it.

        Raises:
            WeightsError: as these two do.
        """
        formed = form(adapter)
        try:
            base = None if adapter.base_digest == self.base_digest else stage_base(adapter.base())
        except BaseException:
            formed.discard()
            raise
        return StagedAdapter(adapter, formed, base)

    def interrupts(self, staged: StagedAdapter, *, recompute: bool) -> bool:
        """True where no job may be running while an adapter is loaded."""
        return recompute or self.is_full or staged.base is not None

    async def install(
        self,
        staged: StagedAdapter,
        label: str,
        *,
        stage_base: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
        load_base: Callable[[Any], Awaitable[None]],
        load: Callable[[LiveAdapter], Awaitable[None]],
    ) -> None:
        """Loads an adapter, which becomes the newest.

        The base comes before it where the engine has not got it, or has lost it since.

        Args:
            staged: from `stage`; given back where this fails.
            label: of its version.
            stage_base: stages tensors of a base, in a thread.
            load_base: loads them; no job runs.
            load: loads the adapter alone.

        Raises:
            WeightsError, EngineError: as the last two do.
        """
        base, digest = staged.base, staged.adapter.base_digest
        staged.base = None
        try:
            if base is None and self.base_digest != digest:
                base = await asyncio.to_thread(stage_base, staged.adapter.base())
            if base is not None:
                self.base_digest = ""
                await load_base(base)
                self.base_digest = digest
            number = next(self._numbers)
            adapter = LiveAdapter(label, number, f"{label}-{self._salt}-{number}", staged.form)
            await load(adapter)
        except BaseException:
            staged.form.discard()
            raise
        self.newest = adapter
        self._live.append(adapter)

    def begin_job(self) -> LiveAdapter | None:
        """The adapter of a job that begins; None before the first."""
        if self.newest is not None:
            self.newest.jobs += 1
        return self.newest

    def end_job(self, adapter: LiveAdapter | None) -> None:
        """Records the end of a job."""
        if adapter is not None:
            adapter.jobs -= 1

    def take_idle(self) -> list[LiveAdapter]:
        """The earlier adapters without jobs, which the caller takes out of the engine."""
        return self._take([adapter for adapter in self._live if not adapter.jobs and adapter is not self.newest])

    def take_all(self) -> list[LiveAdapter]:
        """All adapters, for an engine that runs no job and gives its weights up: it has no base from here on."""
        self.newest, self.base_digest = None, ""
        return self._take(list(self._live))

    def _take(self, taken: list[LiveAdapter]) -> list[LiveAdapter]:
        self._live = [adapter for adapter in self._live if adapter not in taken]
        for adapter in taken:
            adapter.form.discard()
        return taken
