"""Golden packs: answers whose scores are known, by data_source."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.reward_service.conformance.findings import Severity
from rollmesh.reward_service.conformance.packs import Known, names, pack
from rollmesh.reward_service.conformance.session import Session

PACK = "known"


async def known_answers(session: Session) -> None:
    """The packs that were asked for, or else those of the scorers that Info names."""
    for name in session.options.packs or [name for name in names() if name in session.info.scorers]:
        # A scorer may serve other sources than the pack's here, so only what was asked for can be wrong.
        await _pack(session, name, "error" if session.options.packs else "note")


async def _pack(session: Session, name: str, severity: Severity) -> None:
    rows = pack(name)
    probe = f"{PACK}.{name}"
    totals: dict[str, float] = {}
    step = session.most(len(rows))
    for first in range(0, len(rows), step):
        part = [row.as_item(f"{session.nonce}/{probe}") for row in rows[first : first + step]]
        totals |= (await session.call(part, probe=probe)).totals
    wrong = [row for row in rows if not row.allows(totals.get(f"{session.nonce}/{probe}/{row.number}"))]
    session.figures.setdefault("known_answers", {})[name] = {"right": len(rows) - len(wrong), "of": len(rows)}
    if wrong:
        session.find(severity, probe, _words(wrong, rows, totals, f"{session.nonce}/{probe}"), _REMEDY)


_REMEDY = "give such rows to a scorer that knows them, or leave the pack out"


def _words(wrong: Sequence[Known], rows: Sequence[Known], totals: dict[str, float], prefix: str) -> str:
    example = wrong[0]
    total = totals.get(f"{prefix}/{example.number}")
    got = "no score" if total is None else f"{total:g}"
    return (
        f"{len(wrong)} of {len(rows)} answers were scored otherwise, such as {example.response[:80]!r} for "
        f"{example.truth!r:.80}: {got}, not {example.low:g} to {example.high:g}"
    )
