"""Certificates: pairs from files, their renewal, and what a handshake offers."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from epp.gateway.tls import Pair, Tls, TlsError, self_signed_pair


def write(directory: Path, pair: Pair, when: int) -> None:
    for name, content in (("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (directory / name).write_bytes(content)
        os.utime(directory / name, (when, when))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Both sides in memory; the client's object when it is done. Raises `ssl.SSLError` of either."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    done = 0
    while done != 3:
        for bit, side in ((1, theirs), (2, ours)):
            try:
                side.do_handshake()
                done |= bit
            except ssl.SSLWantReadError:
                pass
    return theirs


def trusting(pair: Pair) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=pair.certificate.decode())
    context.set_alpn_protocols(["h2"])
    return context


def test_a_self_signed_certificate_is_good_for_localhost_and_offers_h2() -> None:
    tls = Tls.self_signed()
    client = handshake(tls.context, trusting(tls.pair))
    assert client.selected_alpn_protocol() == "h2"
    assert client.version() == "TLSv1.3"


def test_tls_1_2_is_taken_and_older_is_refused() -> None:
    tls = Tls.self_signed()
    client = trusting(tls.pair)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert handshake(tls.context, client).version() == "TLSv1.2"
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_changed_pair_is_served_and_a_broken_one_is_refused_and_counted(tmp_path: Path) -> None:
    old, new = self_signed_pair(["localhost"]), self_signed_pair(["localhost"])
    write(tmp_path, old, 1_000)
    tls = Tls.directory(tmp_path)
    assert not tls.refresh()
    write(tmp_path, Pair(new.certificate, old.key), 2_000)  # the writer is half way
    assert not tls.refresh()
    assert not tls.refresh()
    assert (tls.reloads, tls.reload_failures) == (0, 1)
    handshake(tls.context, trusting(old))
    write(tmp_path, new, 3_000)
    assert tls.refresh()
    assert (tls.reloads, tls.reload_failures) == (1, 1)
    handshake(tls.context, trusting(new))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tls.context, trusting(old))


def test_files_that_go_away_leave_the_pair_in_use(tmp_path: Path) -> None:
    pair = self_signed_pair(["localhost"])
    write(tmp_path, pair, 1_000)
    tls = Tls.directory(tmp_path)
    (tmp_path / "tls.key").unlink()
    assert not tls.refresh()
    assert tls.reload_failures == 1
    handshake(tls.context, trusting(pair))


@pytest.mark.parametrize("damage", ["missing", "no PEM", "other key", "encrypted"])
def test_a_first_pair_that_cannot_be_used_is_an_error_with_its_files(tmp_path: Path, damage: str) -> None:
    pair = self_signed_pair(["localhost"])
    write(tmp_path, pair, 1_000)
    key = tmp_path / "tls.key"
    match damage:
        case "missing":
            key.unlink()
        case "no PEM":
            key.write_text("not a key")
        case "other key":
            key.write_bytes(self_signed_pair(["localhost"]).key)
        case "encrypted":
            from cryptography.hazmat.primitives import serialization as s

            loaded = s.load_pem_private_key(pair.key, None)
            key.write_bytes(
                loaded.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
            )
    with pytest.raises(TlsError, match=r"tls\.key"):
        Tls.directory(tmp_path)
