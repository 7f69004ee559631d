"""Typed errors of the mesh.

Invariant: every error that a user or a remote service can cause is one of these. It has a stable `code`, a message that
names the offending thing, and a `hint` that says what to do next. Commands print it as one line and exit with
`exit_code`; services map it to a gRPC status code (`mesh.rpc.errors`).
"""

from __future__ import annotations

from typing import ClassVar


class RollmeshError(Exception):
    """Base of all expected failures.

    Args:
        message: what is wrong, naming the key, file, field or address.
        hint: what the reader can do about it.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(RollmeshError):
    """A wrong configuration: unknown key, bad value, contradiction."""

    code = "config"
    exit_code = 2


class UnauthenticatedError(ConfigError):
    """A caller without a credential, or with one that is forged, over, of another mesh or for another contract."""

    code = "unauthenticated"


class PermissionDeniedError(ConfigError):
    """A caller with a role that may not call the verb, or with another member's name."""

    code = "permission_denied"


class DataError(RollmeshError):
    """A dataset or model folder that is missing or lacks required data."""

    code = "data"
    exit_code = 3


class ChatTemplateError(DataError):
    """A chat template that is missing, or refuses a conversation, or would make another one of it."""

    code = "chat_template"


class PayloadError(RollmeshError):
    """A malformed trajectory or message; `field` names the offending part."""

    code = "payload"
    exit_code = 4

    def __init__(self, field: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {message}", hint=hint)
        self.field = field


class UnreachableError(RollmeshError):
    """A service did not answer within its deadline."""

    code = "unreachable"
    exit_code = 5


class PortInUseError(RollmeshError):
    """An address to bind that is taken."""

    code = "port_in_use"
    exit_code = 6


class StoreError(RollmeshError):
    """Redis is unreachable, refuses writes, or cannot be started."""

    code = "store"
    exit_code = 7


class RunBusyError(StoreError):
    """Another launcher, or the Redis of another buffer, works in the same run folder."""

    code = "run_busy"
    exit_code = 42


class RewardError(RollmeshError):
    """A reward function or endpoint failed; never turned into a zero."""

    code = "reward"
    exit_code = 8


class WeightsError(RollmeshError):
    """A version of the weights could not be received whole and verified."""

    code = "weights"
    exit_code = 9


class VersionGoneError(WeightsError):
    """A version of the weights that is not kept any more: there are newer ones."""

    code = "version_gone"


class StarvedError(RollmeshError):
    """Groups come, but none can be trained: the algorithm drops them all, or they all fail."""

    code = "starved"
    exit_code = 11


class StalledError(RollmeshError):
    """A run that has stood still for too long; the message names the holders of groups, and since when they hold
    them.
    """

    code = "stalled"
    exit_code = 12


class StuckError(RollmeshError):
    """A part of a service that hangs while the service answers. The service ends itself, so that it is started
    again.
    """

    code = "stuck"
    exit_code = 13


class RankLostError(StuckError):
    """A rank of the learner that has died, hangs or is cut off; the message names it.

    Args:
        message: which rank, where, and in which phase.
        hint: see RollmeshError.
        heard: the exit status of rank 0, which logs the cause; None: no other rank does.
    """

    code = "rank_lost"

    def __init__(self, message: str, *, hint: str = "", heard: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.heard = heard

    @property
    def status(self) -> int:
        """The exit status of the rank: that of rank 0, where that one ends too."""
        return self.exit_code if self.heard is None else self.heard


class DivergedError(RollmeshError):
    """Gradients have not been finite for longer than a run may train on nothing."""

    code = "diverged"
    exit_code = 14


class MismatchError(RollmeshError):
    """Generators sample from another policy than the learner trains, although both have the same version."""

    code = "mismatch"
    exit_code = 15


class SwapError(RollmeshError):
    """Devices that generators and learner share could not change hands, again and again; the message names who holds
    them.
    """

    code = "swap"
    exit_code = 16


class MemoryHeldError(SwapError):
    """A learner that cannot give the memory of shared devices back; it ends, and the next one finds them free."""

    code = "memory_held"
    exit_code = 17


class CallbackError(RollmeshError):
    """A user's callback that has raised or hung, in a run that is to end then."""

    code = "callback"
    exit_code = 18


class RoleLostError(RollmeshError):
    """Processes of a role that have died or do not answer, with the state of their model; the learner continues from
    its last checkpoint.
    """

    code = "role_lost"
    exit_code = 19


class FencedError(RollmeshError):
    """A learner that a newer incarnation has superseded; it must stop and is not restarted."""

    code = "fenced"
    exit_code = 40

    def __init__(
        self,
        message: str = "another learner has taken this run over",
        *,
        hint: str = "this learner must end; the newer incarnation continues the run",
    ) -> None:
        super().__init__(message, hint=hint)


class TakeoverRefusedError(RollmeshError):
    """A run that another learner still holds."""

    code = "takeover_refused"
    exit_code = 41


class OldGenerationError(RollmeshError):
    """A caller with an old connection generation: the member must join again (its agent does)."""

    code = "old_generation"
    exit_code = 42


class LostStateError(StoreError):
    """Redis may have lost acknowledged writes: the learner must report its uses again (it does by itself)."""

    code = "lost_state"
    exit_code = 43


# Exit codes after which a restart would end the same way.
PERMANENT = frozenset(
    error.exit_code
    for error in (
        CallbackError,
        ConfigError,
        DataError,
        DivergedError,
        FencedError,
        MismatchError,
        StalledError,
        StarvedError,
        SwapError,
    )
)


def ended_by(error: BaseException, what: str) -> RollmeshError:
    """The error by which background work has ended, for those that depend on it."""
    if isinstance(error, RollmeshError):
        return error
    return RollmeshError(
        f"{what} failed: {type(error).__name__}: {error}", hint="a bug in Rollmesh: the log says where it failed"
    )
