"""The configuration of placement: which devices generators and learner have, and whether they share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import DeviceNumbers, PositiveFloat, PositiveInt, Section

PlacementMode = Literal["split", "collocated", "hybrid", "auto"]
# Other spellings of the mode, as users of other systems write it.
_SPELLINGS = {"colocate": "collocated", "collocate": "collocated", "colocated": "collocated"}


class PlacementDevices(Section):
    learner: DeviceNumbers | None = Field(
        None, description="CUDA devices of the learner's ranks, by number, a device each; none: the first free ones."
    )
    generators: list[DeviceNumbers] | None = Field(
        None,
        description="CUDA devices of the generators that `rollmesh run` starts, by number, one list per generator, "
        "with `mode: hybrid` those of their own first. None: those that the learner leaves, or its own in turns.",
    )
    roles: dict[str, DeviceNumbers] = Field(
        default_factory=dict,
        description="CUDA devices of roles with `learner.roles.NAME.at: own`, by role, a device for each rank. Others "
        "get the first that learner and generators leave.",
    )


class PlacementSection(Section):
    mode: PlacementMode = Field(
        "split",
        description="split: generators and learner have devices of their own. collocated: they take turns on the same "
        "ones. hybrid: some generators have their own, others share the learner's. auto: the first batches decide.",
    )
    devices: PlacementDevices = Field(
        default_factory=PlacementDevices, description="CUDA devices by role; checked against the machine."
    )
    batches_per_turn: PositiveInt | None = Field(
        None,
        description="Batches that the learner trains in one turn on shared devices, at most `buffer.max_staleness` "
        "+ 1; none: `buffer.max_staleness`, at least 1.",
    )
    release: Literal["auto", "memory", "process"] = Field(
        "auto",
        description="The way in which a sleeping generator gives memory back. With memory its engine releases it. "
        "With process the processes of the engine end until the next turn. With auto it is memory, where that works.",
    )
    shared_generators: PositiveInt | None = Field(
        None,
        description="Generators on the learner's devices with `mode: hybrid`, in addition to `rollout.replicas`; "
        "none: as many as find devices among one for each rank, at least 1.",
    )
    step_timeout_s: PositiveFloat = Field(
        300.0, description="Seconds for each step of a swap, for example until generators have given memory back."
    )
    rest_dir: Path | None = Field(
        None,
        description="Folder for the learner's state while it rests, where it computes on a CPU; none: the run's "
        "folder. Memory would give nothing back there.",
    )
    trial_batches: PositiveInt = Field(
        4, description="Batches that `mode: auto` trains in each placement before it decides."
    )

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mode") in _SPELLINGS:
            return {**values, "mode": _SPELLINGS[values["mode"]]}
        return values

    @property
    def learner_takes_turns(self) -> bool:
        """True where the learner may take turns, be it with a few generators."""
        return self.mode != "split"

    @property
    def all_take_turns(self) -> bool:
        """True where every generator may take turns with the learner; with `hybrid` only those in addition do.

        A generator that was started by hand follows it, unless a flag says otherwise.
        """
        return self.mode in ("collocated", "auto")


def section_from(value: Any) -> Any:
    """The section for a mode alone (`placement: collocated`); other values as they are."""
    return {"mode": value} if isinstance(value, str) else value
