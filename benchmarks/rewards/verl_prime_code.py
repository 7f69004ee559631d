"""Scores one answer so many times with verl's prime_code; run by an interpreter that has numpy.

`python verl_prime_code.py FOLDER CALLS < JSON`: FOLDER has verl's `prime_code`, the JSON `{"answer", "tests"}`. Prints
the CPU seconds of this process and of all that it has started, imports left out, and the last score, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys


def _cpu_s() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Reads, scores, prints."""
    folder, calls = sys.argv[1], int(sys.argv[2])
    given = json.load(sys.stdin)
    sys.path.insert(0, folder)
    from prime_code import compute_score

    began, score = _cpu_s(), None
    for _ in range(calls):
        with contextlib.redirect_stdout(io.StringIO()):
            score = compute_score(given["answer"], given["tests"], continuous=True)[0]
    print(json.dumps({"cpu_s": _cpu_s() - began, "score": float(score or 0.0)}))


if __name__ == "__main__":
    main()
