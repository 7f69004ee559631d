"""A score belongs to an item's content: not to its id, its place, its call or its neighbours."""

from __future__ import annotations

import math
import statistics

from rollmesh.reward_service.conformance.findings import Severity
from rollmesh.reward_service.conformance.session import Session, changed_totals

REPEAT, RANDOM, SAME_ID, EQUAL, ALONE, MEAN = (
    "identity.repeat",
    "identity.random",
    "identity.same-id",
    "identity.equal-content",
    "identity.alone",
    "identity.group-mean",
)
_MIXED_UP = "normal for a sampling judge, which is not deterministic; otherwise items are mixed up"
_CLAIMED = "its Info says `deterministic`: leave that out if scores may change, or see whether items are mixed up"
# Responses of each kind, and rounds, by which chance is told from judgement; and the distance in standard errors.
_EACH, _ROUNDS, _DISTANCE = 8, 4, 3.0
_NO_PAIR = "it scores the sample items alike; a sample file may help"
_CHANGING = "its scores change from call to call"


async def repeat(session: Session) -> None:
    """The same items again, in reverse."""
    items = session.samples[: session.most(len(session.samples))]
    before = (await session.call(items, probe=REPEAT)).totals
    after = (await session.call(list(reversed(items)), probe=REPEAT)).totals
    changed = changed_totals(before, after)
    session.is_repeatable = not changed
    if changed:
        key = min(changed)
        message = f"{len(changed)} scores changed ({key!r}: {before[key]:g}, then {after[key]:g})"
        remedy = _CLAIMED if session.info.deterministic else _MIXED_UP
        session.find(_by_claim(session, "note"), REPEAT, message, remedy)


async def random_scores(session: Session) -> None:
    """Scores that change still tell right responses from wrong ones."""
    if session.is_repeatable or len(session.samples) < 2:
        session.skipped[RANDOM] = "its scores are repeatable"
        return
    right, wrong = session.samples[:2]
    good: list[float] = []
    bad: list[float] = []
    for turn in range(_ROUNDS):
        for scores, like, name in ((good, right, "right"), (bad, wrong, "wrong")):
            made = [session.made(like, f"random/{turn}/{name}/{n}", like.response) for n in range(session.most(_EACH))]
            scores += (await session.call(made, probe=RANDOM)).totals.values()
    if min(len(good), len(bad)) < 2:
        return
    spread = (statistics.variance(good) / len(good) + statistics.variance(bad) / len(bad)) ** 0.5
    apart = statistics.fmean(good) - statistics.fmean(bad)
    if apart <= _DISTANCE * spread:
        message = (
            f"{len(good)} right responses got {statistics.fmean(good):.3g} on average, "
            f"{len(bad)} wrong ones {statistics.fmean(bad):.3g}: no difference beyond chance"
        )
        session.find("warning", RANDOM, message, "a reward has to depend on the response; see the order of items too")


async def same_id(session: Session) -> None:
    """The same ids with other content in a later call: a cache by item_id alone would answer for it."""
    if session.pair is None or session.is_repeatable is False:
        session.skipped[SAME_ID] = _NO_PAIR if session.pair is None else _CHANGING
        return
    count = session.most(8)
    texts = [like.response for like in session.pair]
    like = session.pair[0]
    straight = [session.made(like, f"same/{n}", texts[n % 2]) for n in range(count)]
    swapped = [session.made(like, f"same/{n}", texts[1 - n % 2]) for n in range(count)]
    fresh = [session.made(like, f"fresh/{n}", texts[1 - n % 2], group="fresh") for n in range(count)]
    first, second, third = [
        list((await session.call(items, probe=SAME_ID)).totals.values()) for items in (straight, swapped, fresh)
    ]
    if len(first) == len(third) == count and second == first != third:
        message = "other content under the ids of an earlier call got that call's scores"
        session.find("error", SAME_ID, message, "never keep scores by item_id: use content_key, or the content itself")


async def equal_content(session: Session) -> None:
    """Equal items under different ids agree."""
    if session.is_repeatable is False:
        session.skipped[EQUAL] = _CHANGING
        return
    like = session.samples[0]
    together = [session.made(like, f"equal/{n}", like.response, group="equal") for n in range(session.most(6))]
    later = [session.made(like, f"later/{n}", like.response, group="later") for n in range(session.most(6))]
    totals = [
        total for items in (together, later) for total in (await session.call(items, probe=EQUAL)).totals.values()
    ]
    if len(set(totals)) > 1:
        message = f"equal items under different ids got scores from {min(totals):g} to {max(totals):g}"
        session.find(_by_claim(session, "note"), EQUAL, message, "a score should depend on the content alone")


async def alone(session: Session) -> None:
    """An item alone, in its group, and among other groups."""
    if session.pair is None or session.is_repeatable is False or session.most(8) < 4:
        session.skipped[ALONE] = _NO_PAIR if session.pair is None else _CHANGING
        return
    better, worse = session.pair
    half = session.most(8) // 2
    group = [
        session.made(like, f"group/{n}", like.response, group="whole") for n, like in enumerate((better, worse) * half)
    ][:half]
    others = [session.made(like, f"others/{n}", like.response, group="others") for n, like in enumerate([worse] * half)]
    apart = (await session.call(group, probe=ALONE)).totals
    among = (await session.call([*others, *group], probe=ALONE)).totals
    remedy = "a score must not depend on what else a call holds"
    _compare(session, apart, among, "with another group in the call", remedy)
    if session.info.needs_group:
        return
    single = {}
    for item in group[:2]:
        lone = session.made(item, item.item_id + "/alone", item.response, group=item.item_id)
        single[item.item_id] = next(iter((await session.call([lone], probe=ALONE)).totals.values()), None)
    known = {key: total for key, total in single.items() if total is not None}
    _compare(session, apart, known, "alone", "if it compares the responses of a group, say Info.needs_group")


def _compare(session: Session, before: dict[str, float], after: dict[str, float], words: str, remedy: str) -> None:
    changed = changed_totals(before, after)
    if changed:
        key = min(changed)
        message = f"an item got {before[key]:g} in its group and {after[key]:g} {words}"
        session.find(_by_claim(session, "warning"), ALONE, message, remedy)


async def group_mean(session: Session) -> None:
    """The members of a group are not all given the same where alone they differ."""
    if session.pair is not None or session.info.needs_group or len(session.samples) < 2:
        session.skipped[MEAN] = "the members of a group differ" if session.pair is not None else "nothing to compare"
        return
    lone: list[float] = []
    for n, like in enumerate(session.samples[:2]):
        made = session.made(like, f"lone/{n}", like.response, group=f"lone/{n}")
        lone += (await session.call([made], probe=MEAN)).totals.values()
    if not all(map(math.isfinite, lone)):
        session.skipped[MEAN] = "a total is not finite"
    elif len(lone) == 2 and lone[0] != lone[1]:
        message = f"responses that get {lone[0]:g} and {lone[1]:g} alone get the same within a group"
        session.find("error", MEAN, message, "score each response; the learner compares the group by itself")


def _by_claim(session: Session, otherwise: Severity) -> Severity:
    """A server that calls itself deterministic is held to it."""
    return "error" if session.info.deterministic else otherwise
