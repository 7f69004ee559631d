"""`rollmesh reward try`: responses of a file or a run, scored and shown as they come."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.learner.metrics.files import SAMPLES
from rollmesh.mesh.config.load import load_config, read_values
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.variables import overrides_from
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.reward_service.client.client import RewardScorer
from rollmesh.reward_service.samples import SampleRow, read_rows
from rollmesh.reward_service.trying.chosen import NOTHING, chosen_scorer
from rollmesh.reward_service.trying.summary import summarize
from rollmesh.reward_service.trying.trial import try_rows
from rollmesh.reward_service.trying.tried import Tried
from rollmesh.run_files import read_config

INTERRUPTED = 130
# Seconds between two words on the progress of what prints nothing else.
_PROGRESS_S = 5.0


@dataclass(slots=True)
class Trial:
    """Rows to be tried, and the scorer for them.

    Attributes:
        rows: as they are read.
        scorer: makes the scorer, on the event loop that uses it.
        limit: most responses; None: all.
        found: outcomes so far.
        began: monotonic time at which the scorer was ready; None before.
    """

    rows: Iterator[SampleRow]
    scorer: Callable[[], RewardScorer]
    limit: int | None = None
    found: list[Tried] = field(default_factory=list)
    began: float | None = None

    async def run(self, each: Callable[[Tried], None]) -> None:
        """Scores all of it.

        Args:
            each: is called with each outcome, in the order of the rows.

        Raises:
            RollmeshError: a row cannot be read, or a function cannot be loaded.
        """
        scorer = self.scorer()
        try:
            await scorer.start()
            self.began = time.monotonic()
            async for tried in try_rows(scorer, self.rows, limit=self.limit):
                self.found.append(tried)
                each(tried)
        finally:
            await scorer.close()


def trial_of(
    source: Path,
    config_path: Path | None,
    overrides: Sequence[str],
    functions: Sequence[str],
    endpoint: str | None,
    key_file: Path | None,
    *,
    steps: Collection[int] | None,
    limit: int | None,
) -> Trial:
    """A trial from the arguments of the command.

    Raises:
        ConfigError: they contradict one another, or the configuration cannot be used.
        DataError: a run without samples.
    """
    is_run = source.is_dir()
    config: Config | None = None
    if config_path is not None:
        values = NOTHING | read_values(config_path, {})
        config = load_config(values, [*overrides_from(os.environ), *overrides])
    elif overrides:
        raise ConfigError(f"{overrides[0]} changes a configuration, and none is given", hint="--config names its file")
    elif is_run:
        config = read_config(source)
    rows = read_rows(source / SAMPLES if is_run else source)
    if steps:
        rows = (row for row in rows if row.step in steps)
    if is_run and not (source / SAMPLES).exists():
        raise DataError(f"no samples in {source}", hint="logging.samples_per_step sets how many samples are kept")
    return Trial(rows, lambda: chosen_scorer(config, functions=functions, endpoint=endpoint, key_file=key_file), limit)


def show_trial(trial: Trial, say: Callable[[str], None], tell: Callable[[str], None], *, as_json: bool) -> int:
    """Runs a trial and shows it; returns the exit status of the command.

    Args:
        say: shows outcomes and the summary.
        tell: shows the progress, where outcomes come at the end.

    Raises:
        DataError: the rows have no responses.
    """
    last = time.monotonic()

    def each(tried: Tried) -> None:
        nonlocal last
        if not as_json:
            say(tried.line())
        elif time.monotonic() - last > _PROGRESS_S:
            last = time.monotonic()
            tell(f"{len(trial.found)} responses so far")

    interrupted = False
    try:
        asyncio.run(trial.run(each))
    except KeyboardInterrupt:
        interrupted = True
    if not trial.found and not interrupted:
        raise DataError("there is no response to try", hint="rows need `response` or `responses`")
    summary = summarize(trial.found, 0.0 if trial.began is None else time.monotonic() - trial.began)
    if as_json:
        rows = [tried.to_json() for tried in trial.found]
        say(json.dumps({"complete": not interrupted, "rows": rows, "summary": summary.to_json()}, indent=1))
    else:
        for line in (*summary.lines(), *(["interrupted: this is what was there"] if interrupted else [])):
            say(line)
    if interrupted:
        return INTERRUPTED
    return 0 if summary.clean else 1
