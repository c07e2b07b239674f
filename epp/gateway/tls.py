"""TLS for the edge: certificate and key from files, read again when they change, or self-signed.

TLS 1.2 or newer and ALPN `h2`, which gRPC clients insist on. The files are read once into memory, checked as a pair in
a fresh context, and only then used for new handshakes; a pair that does not fit or does not parse (cert-manager and
kubelet swap files while we look) is refused with a log line and a count, and the old one stays.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class TlsError(Exception):
    """The first certificate and key cannot be used; the text says why and names the files."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate chain and its private key, PEM."""

    certificate: bytes
    key: bytes


class Tls:
    """Where the edge's certificate comes from, and the context that serves it.

    `context` stays the same object for good: each handshake takes the newest good pair through it. `pair` is that pair.
    """

    def __init__(self, pair: Pair, certificate: Path | None = None, key: Path | None = None) -> None:
        self.pair = pair
        self.reloads = 0
        self.reload_failures = 0
        self._paths = (certificate, key) if certificate is not None and key is not None else None
        self._seen = _stamp(self._paths)
        self._current = make_context(pair)
        self.context = make_context(pair)
        # OpenSSL calls this for every handshake, also without a server name, and goes on with the context set there.
        self.context.sni_callback = self._choose

    @classmethod
    def files(cls, certificate: Path, key: Path) -> Tls:
        """From two PEM files. Raises `TlsError`."""
        try:
            return cls(Pair(certificate.read_bytes(), key.read_bytes()), certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"cannot use {certificate} with {key}: {error}") from error

    @classmethod
    def directory(cls, path: Path) -> Tls:
        """From `tls.crt` and `tls.key` in a directory, as a Kubernetes TLS secret is mounted. Raises `TlsError`."""
        return cls.files(path / "tls.crt", path / "tls.key")

    @classmethod
    def self_signed(cls, names: Sequence[str] = ("localhost", "127.0.0.1", "::1")) -> Tls:
        """From a fresh self-signed certificate for these DNS names and addresses; gateways do not verify the picker."""
        return cls(self_signed_pair(names))

    def refresh(self) -> bool:
        """Read the files again if they changed (two `stat` calls if not). True: a new pair is in use."""
        stamp = _stamp(self._paths)
        if self._paths is None or stamp == self._seen:
            return False
        self._seen = stamp
        certificate, key = self._paths
        try:
            pair = Pair(certificate.read_bytes(), key.read_bytes())
            self._current = make_context(pair)
        except (OSError, ssl.SSLError) as error:
            self.reload_failures += 1
            log.error("new %s with %s refused, the old pair stays: %s", certificate, key, error)
            return False
        self.pair = pair
        self.reloads += 1
        log.info("certificate %s was read again", certificate)
        return True

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current


def make_context(pair: Pair) -> ssl.SSLContext:
    """A server context for this pair. Raises `ssl.SSLError` if they are no pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:  # mode 0700; the ssl module reads files only
        certificate, key = Path(directory, "tls.crt"), Path(directory, "tls.key")
        certificate.write_bytes(pair.certificate)
        key.write_bytes(pair.key)
        # A password callback, so that an encrypted key is an error and not a prompt on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    return context


def self_signed_pair(names: Sequence[str], days: int = 3_650) -> Pair:
    """A new EC P-256 key (a millisecond, where RSA-4096 takes seconds) and a certificate of its own signing."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvsteer")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _general_name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _stamp(paths: tuple[Path, Path] | None) -> tuple[tuple[int, int, int], ...]:
    """What changes when a file does: time, inode and size. A missing file stamps as zeros."""
    stamps = []
    for path in paths or ():
        try:
            status = os.stat(path)
            stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
