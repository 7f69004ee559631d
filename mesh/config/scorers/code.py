"""The configuration of the scorers `code` and `code_fraction`: programs that are run against tests."""

from __future__ import annotations

from pydantic import Field, model_validator

from rollmesh.mesh.config.base import PositiveFloat, PositiveInt, Section

NAMES = ("code", "code_fraction")
"""The scorers, in `reward.functions` and `reward.by_data_source`: all cases pass, and the share that does."""


class CodeSection(Section):
    time_s: PositiveFloat = Field(
        4.0,
        description="CPU seconds for all cases of a response together; less than nine tenths of "
        "`reward.scorer_timeout_s`. Cases for which no time is left have failed.",
    )
    case_s: PositiveFloat = Field(
        2.0, description="CPU seconds for one case. A case that waits ends after four times as long."
    )
    memory_mb: PositiveInt = Field(512, description="Address space of a program, in MiB.")
    cases: PositiveInt | None = Field(None, description="Most cases of a row, the first ones. None: all.")
    same_process: bool = Field(
        True,
        description="Assertions that hand functions or objects of their own to the program may share a process with "
        "it, which is weaker: see docs/code-rewards.md. `false`: such rows are unscorable.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> CodeSection:
        if self.case_s > self.time_s:
            raise ValueError(f"case_s is {self.case_s:g}, more than time_s ({self.time_s:g}), which is for all cases")
        return self
