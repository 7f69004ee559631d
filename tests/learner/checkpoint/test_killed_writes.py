"""A learner that is killed at any moment of a checkpoint leaves the one before or the new one, whole."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest

from rollmesh.learner.checkpoint.names import version_of
from rollmesh.testing.worlds import IMPORTED_ONCE
from tests.learner.checkpoint.killed_writes import Case, Life, live_and_die

# Lives of two ranks are longer. Rank 0's are fewer, and in `make test-all` alone: it does what one rank does.
CASES = {
    "one rank": Case(every=256),
    "one rank, in more of its bytes": Case(),
    "rank 0 of two": Case(ranks=2, every=256, stride=4),
    "rank 1 of two": Case(ranks=2, victim=1, every=256),
}
BYTES = {"write on __0_0.distcp", "write on __1_0.distcp"}


def lives_of(root: Path, case: Case) -> list[Life]:
    """See `live_and_die`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    ours, theirs = context.Pipe()
    driver = context.Process(target=live_and_die, args=(root, case, theirs))
    driver.start()
    theirs.close()
    try:
        lives: list[Life] = ours.recv()
    finally:
        driver.kill()
        driver.join()
    return lives


@pytest.mark.parametrize(
    "case",
    [
        "one rank",
        "rank 1 of two",
        *(
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in ("one rank, in more of its bytes", "rank 0 of two")
        ),
    ],
)
def test_a_whole_checkpoint_is_found_whatever_operation_is_the_last(case: str, tmp_path: Path) -> None:
    first, *lives, last = lives_of(tmp_path / "checkpoints", CASES[case])
    assert (first.committed, first.left) == ("i0001-v00000001", {"i0001-v00000001"})
    before, outcomes = {first.committed}, set()
    for life in [*lives, last]:
        # It has loaded this one, and found in it what its version says.
        assert life.found == max(before)
        own = f"i{life.incarnation:04d}-v{int(life.found[-8:]) + 1:08d}"
        complete = {name for name in life.left if version_of(name)}
        assert complete <= before | {own}, life
        assert (life.committed or life.found) in complete, "also the one that the buffer names"
        assert life.left - complete <= {".swept-by", f".partial-{own}", *(f".removed-{name}" for name in before)}, life
        outcomes.add((own in complete, bool(life.committed)))
        before = complete
    assert last.left == {".swept-by", last.committed}
    assert {life.died for life in lives} & BYTES, "with half of some bytes on the disk"
    assert outcomes >= {(False, False), (True, True)}
    if CASES[case].ranks == 1:
        assert (True, False) in outcomes, "it is whole, and the buffer does not know of it"
