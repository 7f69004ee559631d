"""The trials of placements in a running mesh: measures, estimates, tries, and settles on the fastest.

Only learner and generators are replaced; the buffer keeps every group. A trial ends by its measurement, by its deadline
or because its services give up. The deadline follows from the time of the best placement so far. The first placement is
no trial: the run's own watch over stalls ends it. All of it ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.launcher.trials.candidates import IN_TURNS, Candidate
from rollmesh.launcher.trials.choice import best_placement, may_be_faster, next_trial
from rollmesh.launcher.trials.control import MeshControl
from rollmesh.launcher.trials.disturbances import MeshState, Watch
from rollmesh.launcher.trials.estimates import Bounds, Division, Measurement, estimate
from rollmesh.launcher.trials.measuring import MeasuringRules, Meter, evaluation_span, least_batches
from rollmesh.launcher.trials.record import Estimated, Measured, PlacementRecord, finite
from rollmesh.learner.metrics.files import METRICS
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import RollmeshError
from rollmesh.report.metrics import MetricsTail, Record, is_evaluation, is_training
from rollmesh.report.restarts import RestartsTail
from rollmesh.report.turns import PhasesTail

_LOOK_S = 0.2
# Batches of milliseconds vary, so that a few of them say little.
_LEAST_S = 6.0
# A trial may take so many times as long as the best placement, and this long in addition.
_PATIENCE, _GRACE_S = 3.0, 60.0


@dataclass(slots=True)
class _Seen:
    """Results of the trials so far."""

    measured: dict[str, Measured] = field(default_factory=dict)
    divisions: dict[Division, Measurement] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per batch by placement; infinite where the trial has failed."""
        return {name: math.inf if one.batch_s is None else one.batch_s for name, one in self.measured.items()}


class Trials:
    """The trials of one run, which is in turns.

    Args:
        asked: the configuration, with `placement.mode: auto`.
        found: placements by name, that in turns among them.
        left_out: why others are not possible.
        valid_for: see `PlacementRecord`.
        control: of the mesh.

    Attributes:
        record: the present state, for status and summary.
    """

    def __init__(
        self,
        asked: Config,
        found: Mapping[str, Candidate],
        left_out: Sequence[str],
        valid_for: str,
        control: MeshControl,
    ) -> None:
        self._folder: Path = asked.run.folder
        self._steps = asked.learner.steps
        self._least = max(least_batches(asked))
        self._rules = MeasuringRules(asked.placement.trial_batches, _LEAST_S, asked.buffer.max_staleness + 1)
        self._candidates = dict(found)
        self._left_out = list(left_out)
        self._control = control
        self._present = IN_TURNS
        self._seen = _Seen()
        self._estimates: list[Estimated] = []
        self._untried: list[str] = []
        self._tail = MetricsTail(self._folder / METRICS, from_end=True)
        self._phases, self._restarts = PhasesTail(self._folder), RestartsTail(self._folder)
        self._mesh = MeshState()
        self._step = 0
        self._checkpoint_s = 0.0
        self._began: float | None = None
        # Seconds without steps at the launch, then in each change.
        self._launch_s = math.inf
        self._changes: list[float] = []
        self._changed = 0.0
        self._doing = "the first measurement"
        self._valid_for = valid_for
        self.record = self._recorded()

    async def run(self) -> None:
        """Measures and tries until a placement stays; it is kept in the run folder.

        Raises:
            RollmeshError: no placement works any more; the last one's error.
        """
        try:
            await self._choose()
        except asyncio.CancelledError:
            self.record = self._recorded(undecided=f"the run ended amid {self._doing}")
            with contextlib.suppress(OSError):
                self.record.write(self._folder)
            raise
        finally:
            # From now on the run ends with its services.
            self._control.keep()
        await self._publish(decided=True)
        self._control.report(f"placement {self.record.text}{self._cost()}")

    async def _choose(self) -> None:
        await self._measure()
        await self._leave_out()
        self._estimates = [Estimated(name, b.low, finite(b.high)) for name, b in self._bounds().items()]
        self._report_estimates()
        while (name := self._next()) is not None:
            await self._try(name)
        self._untried = may_be_faster(self._bounds(), self._seen.seconds)
        while (name := best_placement(self._present, self._seen.seconds)) != self._present:
            self._doing = f"the change to {name}"
            try:
                await self._change(name)
            except RollmeshError as error:
                self._failed(name, error.message)
                if all(map(math.isinf, self._seen.seconds.values())):
                    raise

    def _next(self) -> str | None:
        left = self._steps - self._step
        if self._mesh.data_left is not None:
            left = min(left, self._mesh.data_left)
        measured = self._rules.warm_up + math.ceil(self._rules.seconds / min(self._seen.seconds.values()))
        # The run would end amid the trial.
        if left < max(self._least, measured):
            return None
        # The first change ends learner and generators too, with a checkpoint.
        changes = self._changes or [self._launch_s + self._checkpoint_s]
        return next_trial(self._bounds(), self._seen.seconds, cost_s=sum(changes) / len(changes), batches_left=left)

    def _bounds(self) -> dict[str, Bounds]:
        return {
            name: estimate(one.division, self._seen.divisions)
            for name, one in self._candidates.items()
            if name not in self._seen.measured
        }

    async def _leave_out(self) -> None:
        """Drops what cannot be tried."""
        others = [name for name in self._candidates if name != IN_TURNS]
        if others and (names := self._control.strangers()):
            self._left_out.append(f"all others: {', '.join(names)} take turns too, and were started by hand")
            refused = others
        else:
            reasons = {name: await self._control.refusal(self._candidates[name]) for name in others}
            self._left_out += [f"{name}: {why}" for name, why in reasons.items() if why]
            refused = [name for name, why in reasons.items() if why]
        for name in refused:
            del self._candidates[name]

    async def _try(self, name: str) -> None:
        """Moves the run into a placement and measures it; a failure is its result."""
        best_s = min(self._seen.seconds.values())
        if self._began is None:
            self._began = self._control.clock()
        self._doing = f"the trial of {name}"
        self._control.report(
            f"placement auto tries {name}: {self._bounds()[name]} a batch expected, {best_s:.3g} s so far"
        )
        try:
            await self._change(name)
            needed = self._rules.warm_up + max(self._rules.batches, math.ceil(self._rules.seconds / best_s))
            await self._measure(_GRACE_S + _PATIENCE * best_s * needed)
        except TimeoutError:
            self._failed(name, f"it is more than {_PATIENCE:g} times slower")
        except RollmeshError as error:
            self._failed(name, error.message)

    async def _change(self, name: str) -> None:
        began = self._control.clock()
        self._present = name
        await self._publish()
        try:
            await self._control.place(self._candidates[name])
        finally:
            self._changed = self._control.clock()
            self._changes.append(self._changed - began)
        # Those of the services before.
        self._note_steps(self._tail.read())
        self._phases.read()
        self._restarts.read()

    async def _measure(self, limit_s: float | None = None) -> None:
        """Measures the placement in force.

        Args:
            limit_s: deadline of a trial, without evaluations and disturbances; None: this placement is the first.

        Raises:
            RollmeshError: a service of the placement on trial cannot run.
            TimeoutError: the deadline has passed.
        """
        candidate = self._candidates[self._present]
        meter, watch = Meter(candidate.division.mode, self._rules), Watch(self._control.clock())
        before, has_stepped = list[Record](), False
        while True:
            if limit_s is not None and (error := self._control.failure()) is not None:
                raise error
            new = self._tail.read()
            self._mesh = await self._control.look()
            watch.look(self._control.clock(), self._mesh)
            for at in self._restarts.read():
                watch.restarted(at)
            if any(map(is_training, new)):
                self._note_steps(new)
                watch.stepped()
            if not has_stepped:
                before += new
                has_stepped = self._note_first_step(before)
            found = meter.add(new, self._phases.read(), watch.is_disturbed)
            if found is not None:
                break
            if limit_s is not None and watch.counted_s > limit_s:
                raise TimeoutError
            await asyncio.sleep(_LOOK_S)
        self._seen.measured[self._present] = Measured(self._present, found.batch_s, found.batches)
        self._seen.divisions[candidate.division] = found
        await self._publish()
        self._control.report(_measured_text(self._present, found))

    def _note_first_step(self, records: Sequence[Record]) -> bool:
        """Notes the time until the first step, without evaluations; False where there is none yet."""
        first = next((record for record in records if is_training(record)), None)
        if first is None:
            return False
        spans = [evaluation_span(record) for record in records if is_evaluation(record)]
        evaluations_s = sum(ended - began for began, ended in spans if ended <= first["time"])
        if self._changes:
            self._changes[-1] += max(0.0, first["time"] - self._changed - evaluations_s)
        else:
            self._launch_s = max(0.0, first["time"] - self._control.launched - evaluations_s)
        return True

    def _failed(self, name: str, why: str) -> None:
        self._seen.measured[name] = Measured(name, None, 0, why)
        self._control.report(f"placement {name} is out: {why}")

    def _note_steps(self, records: Sequence[Record]) -> None:
        for record in filter(is_training, records):
            self._step = max(self._step, int(record["step"]))
            self._checkpoint_s = max(self._checkpoint_s, float(record.get("timing_s/save_checkpoint") or 0.0))

    def _report_estimates(self) -> None:
        estimates = [f"{name} {bounds}" for name, bounds in self._bounds().items()]
        if estimates:
            self._control.report(f"placement auto: estimates, seconds per batch: {'; '.join(estimates)}")
        for reason in self._left_out:
            self._control.report(f"placement auto leaves out {reason}")

    def _cost(self) -> str:
        if self._began is None:
            return ""
        took_s, still_s = self._control.clock() - self._began, sum(self._changes)
        return f"; the trials took {took_s:.0f} s, {still_s:.0f} s of them without steps"

    async def _publish(self, *, decided: bool = False) -> None:
        """Shows the present state; a disk that refuses it only costs trials the next time."""
        self.record = self._recorded(decided=decided)
        try:
            await asyncio.to_thread(self.record.write, self._folder)
        except OSError as error:
            self._control.report(f"the placement is not kept in {self._folder}: {error.strerror}")

    def _recorded(self, *, decided: bool = False, undecided: str = "") -> PlacementRecord:
        present = self._candidates[self._present]
        return PlacementRecord(
            mode=present.division.mode,
            asked="auto",
            name=self._present,
            settings=dict(present.settings),
            decided=decided,
            undecided=undecided,
            step=self._step,
            steps=self._steps,
            untried=tuple(self._untried),
            estimates=tuple(self._estimates),
            measured=tuple(self._seen.measured.values()),
            left_out=tuple(self._left_out),
            trial_s=0.0 if self._began is None else self._control.clock() - self._began,
            change_s=sum(self._changes),
            valid_for=self._valid_for,
        )


def _measured_text(name: str, found: Measurement) -> str:
    text = f"placement {name}: {found.batch_s:.3g} s a batch, measured over {found.batches}"
    if name != IN_TURNS:
        return text
    sides = f"{found.generation.high:.3g} generating, {found.training.high:.3g} training"
    return f"{text}: {sides}, {found.swap_s:.3g} in swaps"
