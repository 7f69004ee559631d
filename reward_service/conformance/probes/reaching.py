"""Is something there, and what does it say of itself?"""

from __future__ import annotations

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.session import Session
from rollmesh.reward_service.conformance.transport import CallError

HEALTH, INFO, KEY = "reach.health", "reach.info", "reach.key"


async def health(session: Session) -> None:
    """The standard health service."""
    try:
        trouble = await session.transport.health(session.timeout_s)
    except CallError as error:
        if error.kind == "unimplemented":
            remedy = "serve grpc.health.v1, or Info over HTTP: orchestrators ask it whether the server is alive"
            session.find("warning", HEALTH, "no health service", remedy)
        else:
            session.find("warning", HEALTH, str(error), "answer health checks while you can score")
        return
    if trouble:
        session.find("warning", HEALTH, trouble, "say SERVING while you can score")


async def info(session: Session) -> None:
    """Info, which is optional."""
    try:
        session.info = await session.transport.info(session.timeout_s)
    except CallError as error:
        session.find("note", INFO, f"no answer to Info ({error})", "it is optional; with it callers know your limits")


async def key(session: Session) -> None:
    """A server that has a key refuses calls without it."""
    if not session.transport.has_key:
        session.skipped[KEY] = "no key was given"
        return
    item = session.many(1, "stranger")
    for words, wrong in (("without its key", ""), ("with a wrong key", "wrong-" + session.nonce)):
        stranger = session.transport.with_key(wrong)
        try:
            await stranger.score(reward_pb2.ScoreRequest(items=item), session.timeout_s)
        except CallError as error:
            if error.kind not in ("unauthenticated", "denied"):
                remedy = "refuse such calls with UNAUTHENTICATED (HTTP 401), so that callers know the reason"
                session.find("warning", KEY, f"a call {words} ended as {error}", remedy)
        else:
            session.find("error", KEY, f"a call {words} was answered", "check the credential of every call")
        finally:
            await stranger.close()
