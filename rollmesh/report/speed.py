"""The learner's own speed: time, arithmetic and memory by role, over the steps of a run."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from rollmesh.report.metrics import Record, metric_value

# Metric, its words in the report, and the format of a value.
_MEDIANS = [
    (r"timing_s/infer/(.+)", "{} inference {:.3g} s"),
    (r"timing_s/update/(.+)", "{} update {:.3g} s"),
    (r"perf/tflops/(.+)", "{} {:.3g} TFLOP/s per device"),
    (r"perf/mfu/(.+)", "{} MFU {:.1%}"),
]
_LARGEST = [
    (r"perf/max_memory_allocated_(gb)", "device memory of tensors {1:.2f} GiB"),
    (r"perf/max_memory_reserved_(gb)", "reserved {1:.2f} GiB"),
    (r"perf/max_rss_(gb)", "host memory of a rank {1:.2f} GiB"),
]


def speed_of(steps: Sequence[Record]) -> dict[str, float]:
    """Medians of speeds and times, and the largest memory, by metric.

    Args:
        steps: training records; those before these metrics were written have none.
    """
    found: dict[str, list[float]] = {}
    for record in steps:
        for name in record:
            if _is_speed(name) and (value := metric_value(record, name)) is not None:
                found.setdefault(name, []).append(value)
    largest = [pattern for pattern, _ in _LARGEST]
    return {
        name: max(values) if any(re.fullmatch(pattern, name) for pattern in largest) else statistics.median(values)
        for name, values in found.items()
    }


def speed_lines(speed: Mapping[str, float]) -> Iterator[str]:
    """The values in words, in a fixed order of their kinds."""
    for pattern, words in (*_MEDIANS, *_LARGEST):
        for name, value in speed.items():
            if match := re.fullmatch(pattern, name):
                yield words.format(match[1], value)


# Records of a long run have few different names, each of them many times.
@lru_cache(maxsize=4096)
def _is_speed(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _ in (*_MEDIANS, *_LARGEST))
