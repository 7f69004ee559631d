"""The transport that brings the weights, and the reasons against cheaper ones: logged at first use and at a change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rollmesh.generators.weights.transports import Transport
from rollmesh.mesh.weights import BucketSet

log = logging.getLogger(__name__)


class TransportLog:
    """The transport of the latest full transfer; deltas travel by grpc alone, and are no choice.

    Attributes:
        text: the transport, and for each cheaper one the reason against it; empty before the first transfer.
    """

    def __init__(self) -> None:
        self.text = ""

    def record(
        self,
        used: str,
        bucket_set: BucketSet,
        available: Sequence[Transport],
        setting: str,
        failures: Mapping[str, str],
    ) -> None:
        """Records the transport of a transfer.

        Args:
            used: name of the transport that brought them.
            bucket_set: the bytes.
            available: all transports, the cheapest first.
            setting: `weights.transport`.
            failures: the errors of those that were tried before, by name.
        """
        if bucket_set.base is not None:
            return
        reasons = []
        for transport in available:
            if transport.name == used:
                break
            if setting in ("auto", transport.name):
                reason = failures.get(transport.name) or transport.refusal(bucket_set) or "it was not tried"
                reasons.append(f"{transport.name}: {reason}")
        # Failures name their version; the same failure with the next version is no change of the choice.
        changed = used != self.text.partition(" ")[0] or bool(failures)
        self.text = f"{used} (not {'; not '.join(reasons)})" if reasons else used
        if changed:
            log.info("weights come over %s", self.text)
