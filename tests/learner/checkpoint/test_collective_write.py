"""Work of which every rank does a part: a failure of any kind ends it everywhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from rollmesh.learner.checkpoint.collective_write import Ranks


def _fail(error: Exception) -> Callable[[], None]:
    def part() -> None:
        raise error

    return part


@pytest.mark.parametrize("error", [TimeoutError(), OSError()])
def test_a_failure_without_words_is_one(error: Exception) -> None:
    with pytest.raises(OSError, match=type(error).__name__):
        Ranks(0, 1, lambda message: [message]).on_every_rank(_fail(error))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("of no rank's file")])
def test_what_fails_on_one_rank_fails_on_all(error: Exception) -> None:
    messages: dict[int, bytes] = {}
    barrier = Barrier(2, timeout=180)

    def rank(process: int) -> str:
        def gather(message: bytes) -> list[bytes]:
            messages[process] = message
            barrier.wait()
            return [messages[0], messages[1]]

        with pytest.raises(type(error) if process else OSError) as raised:
            Ranks(process, 2, gather).on_every_rank(_fail(error) if process else lambda: None)
        return str(raised.value)

    with ThreadPoolExecutor(2) as threads:
        leader, failed = threads.map(rank, (0, 1))
    assert "(rank 1 on " in leader
    assert (error.strerror if isinstance(error, OSError) else f"ValueError: {error}") in leader
    assert str(error.args[-1]) in failed
