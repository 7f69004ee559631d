"""Certificate authorities of the tests, and what they certify."""

from __future__ import annotations

from pathlib import Path

from rollmesh.mesh.access.certificates import OWN_HOST, CertificateAuthority


class Authority:
    """Writes certificates.

    Args:
        folder: where everything is written.
        name: of the authority, and of its file.

    Attributes:
        pem: path of its own certificate.
        authority: as the product has it.
    """

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self.authority = CertificateAuthority.new(name)
        self.pem = folder / f"{name}.pem"
        self.pem.write_bytes(self.authority.pem)

    def certify(self, name: str, *hosts: str, days: tuple[float, float] = (-1.0, 1.0)) -> tuple[Path, Path]:
        """Certificate and key of a holder at these hosts: names or addresses; without any, on loopback.

        Args:
            days: from now to its beginning and to its end.
        """
        issued = self.authority.issue(name, hosts or OWN_HOST, days=days[1], begins_in_days=days[0])
        pem, key_pem = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        pem.write_bytes(issued.pem(self.authority.pem))
        key_pem.touch(0o600)
        key_pem.write_bytes(issued.key_pem)
        return pem, key_pem
