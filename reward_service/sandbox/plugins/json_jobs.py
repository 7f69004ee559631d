"""Jobs and their ends as JSON, for sandboxes of other machines. Bytes are in base64."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from rollmesh.reward_service.sandbox.interface import End, Job, Limits, Ran

PATH = "/v1/run"


def job_to_json(job: Job, inputs: Sequence[bytes]) -> dict[str, Any]:
    """A request: the job, with the time that is left for it, and the inputs of its runs."""
    left_s = job.deadline - time.monotonic()
    return {
        "language": job.language,
        "files": {name: _text(content) for name, content in job.files.items()},
        "argv": list(job.argv),
        "limits": asdict(job.limits),
        "outputs": list(job.outputs),
        "environment": dict(job.environment),
        "inputs": [_text(each) for each in inputs],
        "left_s": None if left_s == float("inf") else left_s,
    }


def job_from_json(found: Any) -> tuple[Job, list[bytes]]:
    """The job and the inputs of a request.

    Raises:
        ValueError: it is none.
    """
    try:
        limits = Limits(**{name: _number(name, value) for name, value in found["limits"].items()})
        left_s = found["left_s"]
        job = Job(
            str(found["language"]),
            {str(name): _bytes(content) for name, content in found["files"].items()},
            [str(each) for each in found["argv"]],
            limits=limits,
            deadline=float("inf") if left_s is None else time.monotonic() + float(left_s),
            outputs=[str(each) for each in found["outputs"]],
            environment={str(name): str(value) for name, value in found["environment"].items()},
        )
        return job, [_bytes(each) for each in found["inputs"]]
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def ran_to_json(ran: Ran) -> dict[str, Any]:
    """The end of a run."""
    files = {name: _text(content) for name, content in ran.files.items()}
    return {**asdict(ran), "stdout": _text(ran.stdout), "stderr": _text(ran.stderr), "files": files}


def ran_from_json(found: Mapping[str, Any]) -> Ran:
    """The end of a run.

    Raises:
        ValueError: it is none.
    """
    try:
        if found["end"] not in get_args(End):
            raise ValueError(f"end {found['end']!r}")
        files = {str(name): _bytes(content) for name, content in found["files"].items()}
        numbers = int(found["code"]), _bytes(found["stdout"]), _bytes(found["stderr"])
        used = float(found["cpu_s"]), int(found["peak"]), found["stalled_s"]
        if not isinstance(used[2], float | int | None):
            raise ValueError(f"stalled_s {used[2]!r}")
        return Ran(found["end"], *numbers, *used, files, str(found["reason"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _number(name: str, value: Any) -> Any:
    return float(value) if name.endswith("_s") else int(value)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
