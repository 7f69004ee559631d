"""One check of a reward server: all probes, and their report."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.findings import Finding, Report
from rollmesh.reward_service.conformance.probes import answers, reaching
from rollmesh.reward_service.conformance.probes.order import FOUNDATIONS, PROBES, is_chosen, refuse_unknown
from rollmesh.reward_service.conformance.probes.restarting import KILL, ServerProcess, kill
from rollmesh.reward_service.conformance.session import Options, Session
from rollmesh.reward_service.conformance.transport import CallError, Transport

# A server that cannot be called at all needs no more probes.
_HOPELESS = ("unimplemented", "unauthenticated", "denied")


async def check(
    address: str, transport: Transport, samples: Sequence[reward_pb2.ScoreItem], options: Options | None = None
) -> Report:
    """Checks a server.

    Args:
        address: for the report.
        transport: makes the calls; it is left open.
        samples: items to score, those of one prompt in one group, right responses before wrong ones.

    Raises:
        ConfigError: a restart command that cannot be executed, or a golden pack or probes that do not exist.
    """
    session = Session(transport, samples, options or Options())
    refuse_unknown(session.options.only)
    process = ServerProcess(session.options.restart)
    try:
        if session.options.restart:
            await process.start(transport)
        else:
            await transport.connect(session.timeout_s)
        outcomes = await _probe_all(session, process)
    except CallError as error:
        remedy = "is the server running, the port right, TLS the same on both sides?"
        finding = Finding("error", "reach.connection", f"unreachable: {error}", remedy)
        return Report(address, [*session.findings, finding], reachable=False)
    finally:
        process.kill()
    return Report(address, session.findings, _name(session.info), outcomes, session.figures, session.skipped)


async def _probe_all(session: Session, process: ServerProcess) -> dict[str, int]:
    only = session.options.only
    await reaching.info(session)
    if is_chosen(reaching.HEALTH, only):
        await reaching.health(session)
    if is_chosen(reaching.KEY, only):
        await reaching.key(session)
    outcomes, failure = await answers.samples(session)
    if failure and (failure.kind in _HOPELESS or await _is_silent(session)):
        return {}
    for probe, run in PROBES:
        if probe in FOUNDATIONS or is_chosen(probe, only):
            await run(session)
    if session.options.restart:
        await kill(session, process)
    else:
        session.skipped[KILL] = "no restart command"
    return outcomes


async def _is_silent(session: Session) -> bool:
    """True if not even one item is answered in time: further probes would each wait as long."""
    failure = (await session.call(session.samples[:1])).failure
    return failure is not None and failure.kind == "deadline"


def _name(info: reward_pb2.InfoResponse) -> str:
    scorers = ", ".join(f"{name} {version}" for name, version in sorted(info.scorers.items()))
    server = f"{info.name} {info.version}".strip()
    return f"{server}{f': {scorers}' if scorers else ''}"
