"""Evaluations of a run, formatted for a reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.checkpoint.best import Best, best_checkpoint
from rollmesh.learner.evaluation.result_log import ResultLog
from rollmesh.mesh.errors import DataError

# Subfolder of a run; named here because the store of checkpoints loads torch.
_CHECKPOINTS = "checkpoints"


def evaluations(run: Path) -> tuple[list[dict[str, Any]], Best | None]:
    """All results by incarnation and version, and the best one.

    Raises:
        DataError: the run has none.
    """
    results = ResultLog(run).results()
    if not results:
        raise DataError(
            f"{run} has no evaluation yet", hint="data.eval and eval.every_steps set what is evaluated and when"
        )
    return results, best_checkpoint(run / _CHECKPOINTS)


def result_table(results: list[dict[str, Any]], best: Best | None) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    names = list(dict.fromkeys(name for result in results for name in result["metrics"]))
    sources = list(dict.fromkeys(source for result in results for source in result["by_source"]))
    of_sources = [f"reward/{source}" for source in sources] if len(sources) > 1 else []
    head = ["version", "reward", *of_sources, *names, "scored", "failed", "tokens", "seconds", ""]
    rows = []
    for result in results:
        by_source, metrics = result["by_source"], result["metrics"]
        is_best = best is not None and (best.incarnation, best.version) == (result["incarnation"], result["version"])
        rows.append(
            [
                f"{result['incarnation']}:{result['version']}",
                f"{result['reward']:.4f}",
                *(_show(by_source.get(source)) for source in sources if of_sources),
                *(_show(metrics.get(name)) for name in names),
                str(result["scored"]),
                str(result["failed"]),
                f"{result['response_length']:.1f}",
                f"{result['seconds']:.1f}",
                f"best by {best.metric}" if best is not None and is_best else "",
            ]
        )
    return head, rows


def result_grid(run: Path) -> list[list[str]]:
    """A table with its head; empty where the run has no evaluation."""
    try:
        head, rows = result_table(*evaluations(run))
    except DataError:
        return []
    return [head, *rows]


def result_lines(run: Path) -> Iterator[str]:
    """The results as lines, one per evaluation.

    Raises:
        DataError: the run has none.
    """
    head, rows = result_table(*evaluations(run))
    yield from aligned([head, *rows])


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def row_lines(run: Path, version: str, number: int) -> Iterator[str]:
    """Prompts of one round, those with the lowest mean reward first.

    Args:
        run: its folder.
        version: `incarnation:version`, or a version alone: the newest of that number.
        number: prompts at most.

    Raises:
        DataError: there is no such round, or its prompts are not kept any more.
    """
    results, _ = evaluations(run)
    names = [(result["incarnation"], result["version"]) for result in results]
    found = [name for name in names if version in (f"{name[0]}:{name[1]}", str(name[1]))]
    if not found:
        raise DataError(f"version {version} was not evaluated", hint="`rollmesh evals RUN` lists those that were")
    rows = ResultLog(run).rows(*found[-1])
    if not rows:
        raise DataError(
            f"the prompts of version {version} are not kept", hint="see eval.keep_rows; old ones are removed"
        )
    for row in sorted(rows, key=_mean)[:number]:
        yield f"row {row['row']}  {row['data_source']}  prompt {row['prompt']!r}  truth {row['ground_truth']!r}"
        for response in row["responses"]:
            outcome = response["reason"] if response["reward"] is None else f"{response['reward']:g}"
            yield f"  {outcome}  {response['text']!r}"


def _mean(row: dict[str, Any]) -> float:
    rewards = [response["reward"] for response in row["responses"] if response["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else float("-inf")


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
