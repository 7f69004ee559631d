"""The drafts from which the new holder of a group continues.

A draft counts for nothing while it waits. Handing it out makes its tokens part of what will be trained: their versions
join the group's, and so its deadline. A draft with which the group would be over the bound is not handed out but
dropped, and its member begins again. So a response that continues a draft can be trained whenever its group can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.buffer.reference_model.group_states import Group


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens sampled of a member that is not done, and their versions, as `attempt` wrote them."""

    attempt: int
    tokens: int
    ranges: VersionRanges

    def is_older_than(self, attempt: int, tokens: int) -> bool:
        """True if a draft of `tokens` tokens, by `attempt`, replaces it."""
        return (self.attempt, self.tokens) < (attempt, tokens)


def grant_drafts(group: Group, drafts: dict[int, Draft], deadline_of: Callable[[Group], int], u: int) -> list[int]:
    """Members with drafts that go to the holder; the group counts their versions, the others are removed from `drafts`.

    Args:
        drafts: of this group, by member.
        deadline_of: last version that may train the group as it is.
        u: version at which the next unclaimed batch will train.
    """
    granted = []
    for member, draft in sorted(drafts.items()):
        before = group.ranges
        group.ranges = before.merged(draft.ranges)
        deadline = deadline_of(group)
        if deadline >= u:
            group.deadline = deadline
            granted.append(member)
        else:
            group.ranges = before
            del drafts[member]
    return granted
