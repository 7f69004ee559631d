"""Which transport brings the weights, and why the cheaper ones did not: logged when first used and when it changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rollmesh.generators.weights.transports import Transport
from rollmesh.mesh.weights import Wanted

log = logging.getLogger(__name__)


class TransportChoice:
    """The choice of the latest full transfer; links of differences travel by grpc alone, and are no choice.

    Attributes:
        text: the transport, and for each cheaper one the reason against it; empty before the first transfer.
    """

    def __init__(self) -> None:
        self.text = ""

    def note(
        self, used: str, wanted: Wanted, available: Sequence[Transport], setting: str, failures: Mapping[str, str]
    ) -> None:
        """Notes what brought some bytes.

        Args:
            used: name of the transport that brought them.
            wanted: the bytes.
            available: all transports, the cheapest first.
            setting: `weights.transport`.
            failures: what went wrong with those that were tried before, by name.
        """
        if wanted.base is not None:
            return
        reasons = []
        for transport in available:
            if transport.name == used:
                break
            if setting in ("auto", transport.name):
                reason = failures.get(transport.name) or transport.refusal(wanted) or "it was not tried"
                reasons.append(f"{transport.name}: {reason}")
        # What failed names its version; the same failure with the next version is no change of the choice.
        changed = used != self.text.partition(" ")[0] or bool(failures)
        self.text = f"{used} (not {'; not '.join(reasons)})" if reasons else used
        if changed:
            log.info("weights come over %s", self.text)
