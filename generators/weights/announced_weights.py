"""The weights of a version in service as they were announced, with what it takes to compute them again."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.generators.engines.adapters import AdapterWeights, WeightSet
from rollmesh.protos import weights_pb2


@dataclass(frozen=True, slots=True)
class AnnouncedWeights:
    """A version as announced.

    Attributes:
        manifest: of the version, checked.
        adapter: bytes of its tensors, where they are an adapter's; else None: their digests say enough.
        base: bytes of the base to which the adapter belongs.
    """

    manifest: weights_pb2.Manifest
    adapter: memoryview | None = None
    base: memoryview | None = None

    def for_engine(self, data: memoryview, *, with_adapters: bool) -> WeightSet:
        """The weights as an engine gets them.

        Args:
            data: bytes of the version; never written to again.
            with_adapters: it computes with adapters next to their base; others get merged weights.
        """
        # Imported late: torch takes a second, and the learner is waited for meanwhile.
        from rollmesh.mesh.weights.merging import effective_tensors
        from rollmesh.mesh.weights.tensors import named_tensors

        manifest, base = self.manifest, self.base
        if base is None or not with_adapters:
            return effective_tensors(manifest, data, base)
        return AdapterWeights(
            lambda: named_tensors(manifest.base, base),
            manifest.base.digest,
            dict(named_tensors(manifest, data)),
            manifest.scale,
        )
