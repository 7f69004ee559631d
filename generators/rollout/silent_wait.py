"""The reason of a wait that no other component names: members are held, and no token is sampled.

Their engine is stuck, or their tools and programs are slow; the generator's log says which.
"""

from __future__ import annotations

_AFTER_S = 10.0


class SilenceClock:
    """A clock that runs from the last new token, or from the first member held; read now and then."""

    def __init__(self) -> None:
        self._tokens = 0
        self._since: float | None = None

    def reason(self, *, tokens: int, generating: int, now_s: float) -> str:
        """The reason why no token comes; empty while tokens do.

        Args:
            tokens: sampled for groups since the start.
            generating: members given to the engine, or to an agent.
            now_s: of a monotonic clock.
        """
        if self._since is None or tokens != self._tokens or not generating:
            self._tokens, self._since = tokens, now_s
        silent_s = now_s - self._since
        return f"no token was sampled for {silent_s:.0f} s, {generating} members held" if silent_s > _AFTER_S else ""
