"""The audit finds what must not be; a book in order passes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.learner.recovery.consumption_log import ConsumptionLog, StepUse, UsedGroup
from tests.faults.audit import Audit, Live, audit
from tests.faults.observe import Step, Stored
from tests.faults.redis_disk import Loss
from tests.faults.report import merged, quantile, summary

COUNTERS = {"admitted": 6, "trained": 2, "evicted_stale": 1, "filtered": 0, "failed": 0}
LIVE = Live(
    {"train-4": "consumed", "train-5": "ready", "train-6": "generating"}, {"train-5": {0, 1}, "train-6": set()}, 6
)


def use(incarnation: int, version: int, *groups: str, resumed_at: int = 0) -> StepUse:
    return StepUse(
        incarnation, version, resumed_at, 0, [UsedGroup(group, [0, 1], int(group[6:]), 1) for group in groups]
    )


STORED = [Stored(f"train-{g}", m, 1, scored=True) for g in (1, 2, 3, 4, 5) for m in (0, 1)]
USES = [
    use(1, 0, "train-1"),
    use(1, 1, "train-2"),
    use(1, 2, "train-4"),
    # The second learner continued from 1: what the first one did with 2 and 4 is undone.
    use(2, 1, "train-2", resumed_at=1),
    use(2, 2, "train-4", resumed_at=1),
]


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Audit]:
    def compare(
        uses: list[StepUse] = USES,
        live: Live = LIVE,
        stored: list[Stored] = STORED,
        oldest: int = 2,
        max_reuse: int = 1,
        losses: list[Loss] | None = None,
        **counters: int,
    ) -> Audit:
        (tmp_path / "consumption.jsonl").unlink(missing_ok=True)
        log = ConsumptionLog(tmp_path / "consumption.jsonl")
        for entry in uses:
            log.append(entry)
        log.close()
        return audit(
            consumption=tmp_path / "consumption.jsonl",
            counters=COUNTERS | counters,
            live=live,
            stored=stored,
            steps=[Step(0.0, 1, 1, oldest)],
            bound=2,
            max_reuse=max_reuse,
            losses=losses or [],
        )

    return compare


def test_a_book_in_order_passes(look: Callable[..., Audit]) -> None:
    found = look()
    assert found.problems == []
    assert found.conserved
    assert (found.steps, found.discarded_steps) == (3, 2)
    assert found.groups["trained"] == 2
    assert found.trajectories == {
        "stored": 10, "trained": 6, "ended_with_their_group": 2, "alive": 2, "trained_unacknowledged": 0
    }  # fmt: skip


def test_a_group_without_a_state_and_without_a_fate_is_lost(look: Callable[..., Audit]) -> None:
    found = look(evicted_stale=0)
    assert found.lost_groups == 1
    assert not found.conserved
    assert found.problems


def test_a_group_that_is_used_twice_on_the_surviving_lineage_is_doubled(look: Callable[..., Audit]) -> None:
    found = look([*USES, use(2, 3, "train-1", resumed_at=1)])
    assert found.duplicated == 1
    assert "trained twice" in found.problems[0]


def test_a_trained_group_that_waits_again_is_found(look: Callable[..., Audit]) -> None:
    live = Live(LIVE.states | {"train-1": "ready"}, LIVE.members, 6)
    assert any("about to be trained again" in line for line in look(live=live).problems)


def test_a_group_may_be_used_as_often_as_allowed_and_wait_for_its_next_use(look: Callable[..., Audit]) -> None:
    again = StepUse(2, 3, 1, 0, [UsedGroup("train-1", [0, 1], 1, 2)])
    assert look([*USES, again], max_reuse=2).problems == []
    assert any("more than 1 times" in line for line in look([*USES, again]).problems)
    live = Live(LIVE.states | {"train-1": "ready"}, LIVE.members | {"train-1": {0, 1}}, 6)
    assert look(live=live, max_reuse=2, admitted=6, trained=1).problems == []
    assert any("to be trained again" in line for line in look([*USES, again], live=live, max_reuse=2).problems)
    third = StepUse(2, 3, 1, 0, [UsedGroup("train-1", [0, 1], 1, 3)])
    assert any("do not follow" in line for line in look([*USES, third], max_reuse=3).problems)


@pytest.mark.parametrize("group", ["train-1", "train-5"])
def test_a_stored_member_that_its_group_has_not_is_lost(look: Callable[..., Audit], group: str) -> None:
    found = look(stored=[*STORED, Stored(group, 2, 1, scored=True)])
    assert found.lost_trajectories == 1
    assert found.problems


@pytest.mark.parametrize("group", ["train-1", "train-5"])
def test_what_redis_was_made_to_lose_is_forgotten_and_not_lost(look: Callable[..., Audit], group: str) -> None:
    losses = [Loss(10.0, 12.0)]
    found = look(stored=[*STORED, Stored(group, 2, 1, scored=True, at=11.0)], losses=losses)
    assert (found.problems, found.lost_trajectories, found.trajectories["forgotten"]) == ([], 0, 1)
    assert look(stored=[*STORED, Stored(group, 2, 1, scored=True, at=12.5)], losses=losses).lost_trajectories == 1


def test_a_member_is_stored_a_second_time_only_where_the_first_was_lost(look: Callable[..., Audit]) -> None:
    twice = [Stored("train-5", 1, 1, scored=True, at=11.0), Stored("train-5", 1, 2, scored=True, at=13.0)]
    stored = [entry for entry in STORED if (entry.group, entry.member) != ("train-5", 1)]
    assert look(stored=[*stored, *twice], losses=[Loss(10.0, 12.0)]).problems == []
    assert any("stored twice" in line for line in look(stored=[*stored, *twice]).problems)
    assert any("stored twice" in line for line in look(stored=[*stored, *twice], losses=[Loss(12.5, 14.0)]).problems)


def test_what_redis_lost_is_trained_twice_under_no_name(look: Callable[..., Audit]) -> None:
    again = StepUse(2, 3, 1, 0, [UsedGroup("train-6", [0, 1], 1, 1)])
    live = Live(LIVE.states | {"train-6": "consumed"}, LIVE.members, 6)
    found = look([*USES, again], live=live)
    assert found.duplicated == 1
    assert "one prompt task trained as several groups: [['train-1', 'train-6']]" in found.problems


def test_members_without_reward_are_not_missed_and_unknown_groups_are_told(look: Callable[..., Audit]) -> None:
    assert look(stored=[*STORED, Stored("train-1", 2, 1, scored=False)]).problems == []
    assert "never admitted" in look(stored=[*STORED, Stored("train-9", 0, 1, scored=True)]).problems[0]


def test_a_hole_in_the_lineage_and_tokens_over_the_bound_are_told(look: Callable[..., Audit]) -> None:
    assert any("hole" in line for line in look([*USES[:3], use(2, 2, "train-4", resumed_at=1)]).problems)
    assert any("bound" in line for line in look(oldest=3).problems)


def test_a_step_without_a_line_in_the_log_is_told(look: Callable[..., Audit]) -> None:
    assert any("without a line" in line for line in look(USES[1:]).problems)


def test_runs_are_summed(look: Callable[..., Audit]) -> None:
    faults = [
        {"kind": "kill redis", "recovery_s": s, "restored_s": 2 * s, "overlapped": o, "held": int(s)}
        for s, o in ((1.0, False), (3.0, False), (9.0, True))
    ]
    stall = {
        "kinds": ["cut learner>front"], "what": "no step", "at_s": 40.0, "lasted_s": 75.0, "work": {"leased": 8},
        "evaluation": {}, "waits": "leased in full", "ended_by": "killing the learner",
    }  # fmt: skip
    run = {
        "settings": {"staleness": 0}, "stalls": [], "losses": 1, "evaluations": 3,
        "seed": 1, "seconds": 60.0, "sound": True, "faults": faults, "rounds": 2, "balanced": 2,
        "problems": [], "exits": {"learner": {"41": 1}}, "audit": look().as_json(),
    }  # fmt: skip
    total = merged(
        [merged([run]), {**run, "seed": 2, "sound": False, "audit": None, "problems": ["late"], "stalls": [stall]}]
    )
    assert (total["faults"], total["minutes"], total["seeds"]) == (6, 2.0, [1, 2])
    assert total["kinds"]["kill redis"] == {
        "faults": 4, "held": 4, "recovery_p50_s": 1.0, "recovery_p99_s": 3.0, "recovery_max_s": 3.0,
        "restored_p50_s": 2.0, "restored_p99_s": 6.0, "restored_max_s": 6.0,
    }  # fmt: skip
    assert (total["stalls"], total["stalls_by_kind"]) == (1, {"cut learner>front": 1})
    assert (total["losses"], total["evaluations"]) == (2, 6)
    assert total["kinds"]["overlapping faults"]["faults"] == 2
    assert total["exits"] == {"learner": {"41": 2}}
    assert not total["sound"]
    assert "seed 2 (staleness=0): late" in summary(total)
    assert "stall: no step for 75.0 s after cut learner>front (at 40.0 s, ended by killing the learner)" in summary(
        total
    )


def test_quantiles_are_values_that_were_seen() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 4.0]
