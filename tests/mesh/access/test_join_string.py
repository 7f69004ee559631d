"""Join strings: whole, or refused as what they are."""

from __future__ import annotations

import hashlib

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.access.certificates import CertificateAuthority, fingerprint_of
from rollmesh.mesh.access.join_string import JoinString, is_join_string, parse_join_string
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.secret import new_token, parse_secret
from rollmesh.mesh.errors import ConfigError
from tests.secrets_here import TOKEN

GRANT = MeshKey(TOKEN).grant_file(Role.GENERATOR, "node1")
AUTHORITY = CertificateAuthority.new()
PLAIN = JoinString(mesh="10.0.0.5:7400,[2001:db8::5]:7400", grant=GRANT)
WHOLE = JoinString(
    mesh=PLAIN.mesh,
    grant=GRANT,
    authority=fingerprint_of(AUTHORITY.pem, "authority"),
    host="10.0.0.7:7000",
    certificate=AUTHORITY.issue("node1", ["10.0.0.7"]),
)


@pytest.mark.parametrize("join", [PLAIN, WHOLE])
def test_a_string_comes_back_as_it_was(join: JoinString) -> None:
    assert parse_join_string(join.pack(), "here") == join
    assert is_join_string(join.pack())


def test_spaces_and_line_breaks_of_pasting_do_not_matter() -> None:
    text = WHOLE.pack()
    pasted = "\n".join(f"  {text[at : at + 72]} " for at in range(0, len(text), 72))
    assert parse_join_string(pasted, "here") == WHOLE


@given(st.data())
def test_a_string_that_is_cut_short_or_changed_is_named_as_such(data: st.DataObject) -> None:
    text = PLAIN.pack()
    at = data.draw(st.integers(6, len(text) - 1))
    cut, changed = text[:at], text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
    for wrong in (cut, changed):
        with pytest.raises(ConfigError, match=r"cut short or changed \(\d+ characters\)"):
            parse_join_string(wrong, "here")


def test_other_texts_are_no_join_strings() -> None:
    with pytest.raises(ConfigError, match="holds no join string"):
        parse_join_string(TOKEN, "here")
    with pytest.raises(ConfigError, match="another release"):
        parse_join_string(PLAIN.pack().replace("rmj1", "rmj2", 1), "here")
    assert not is_join_string(new_token())


def test_a_token_file_may_be_a_join_string() -> None:
    secret = parse_secret(WHOLE.pack(), "file")
    assert secret.granted is not None
    assert (secret.granted[0].role, secret.granted[0].name) == (Role.GENERATOR, "node1")


def test_no_secret_is_shown() -> None:
    assert WHOLE.certificate is not None
    shown = repr(WHOLE)
    assert GRANT not in shown
    assert repr(WHOLE.certificate.key) not in shown


def test_a_certificate_names_its_hosts_and_ends_with_its_authority() -> None:
    issued = AUTHORITY.issue("node1", ["10.0.0.7", "node1.example", "2001:db8::7"], days=30)
    leaf, top = x509.load_pem_x509_certificates(issued.pem(AUTHORITY.pem))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(map(str, names.get_values_for_type(x509.IPAddress))) == {"10.0.0.7", "2001:db8::7"}
    assert set(names.get_values_for_type(x509.DNSName)) == {"node1.example"}
    leaf.verify_directly_issued_by(top)
    digest = hashlib.sha256(top.public_bytes(Encoding.DER)).digest()
    assert fingerprint_of(issued.pem(AUTHORITY.pem), "file") == fingerprint_of(AUTHORITY.pem, "file") == digest
