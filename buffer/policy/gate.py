"""The gate, which decides if another group may be admitted, and to which generators.

B is the number of groups per step, S the bound, and L the number of live unclaimed groups. The next unclaimed batch
will train at version u. If nothing is lost, a group admitted now trains at version u + floor(L / B) at the latest. Its
tokens must then be at most S versions old, so only a generator that serves at least

    floor = u + floor(L / B) - S

may have it. For S = 0 and L < B this demands exactly the current version: true on-policy.

Where groups are used more than once (`buffer.max_reuse`), L is the number of uses that they demand. A group's last use
is then within the bound as well.
"""

from __future__ import annotations


def version_floor(u: int, live: int, groups_per_step: int, max_staleness: int) -> int:
    """The least version a generator must serve to be granted the next group (if negative: any)."""
    return u + live // groups_per_step - max_staleness


def live_limit(u: int, serving: int, groups_per_step: int, max_staleness: int) -> int:
    """Live groups below which the gate is open to a generator serving `serving`.

    The same inequality solved for L: `live < live_limit(...)` iff `version_floor(...) <= serving`.
    """
    return max(0, (serving - u + max_staleness + 1) * groups_per_step)
