"""Certificates for tests: an authority, and one that it signed for whoever belongs to a fleet."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gemm_tuner.fleet.scheduler import TlsIdentity


def make_identity(folder: Path) -> TlsIdentity:
    """Make an authority and a certificate with its key in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own_key, authority_key = (ec.generate_private_key(ec.SECP256R1()) for _key in range(2))
    authority = _certificate("authority", authority_key, "authority", authority_key, is_ca=True)
    own = _certificate("fleet", own_key, "authority", authority_key, is_ca=False)
    files = {
        "authority": authority.public_bytes(Encoding.PEM),
        "certificate": own.public_bytes(Encoding.PEM),
        "key": own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for name, content in files.items():
        (folder / f"{name}.pem").write_bytes(content)
    return TlsIdentity(**{name: folder / f"{name}.pem" for name in files})


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .sign(issuer_key, SHA256())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
