"""How the API server is found and as whom it is asked: a pod's service account, a kubeconfig, tokens that change."""

from __future__ import annotations

import base64
import os
import ssl
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from epp.discovery.kubernetes.credentials import (
    AccessError,
    ExecPlugin,
    ExecToken,
    FileToken,
    find,
    from_kubeconfig,
    in_cluster,
)


def certificate() -> tuple[bytes, bytes]:
    """A self-signed certificate and its key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return made.sign(key, hashes.SHA256()).public_bytes(pem), key.private_bytes(pem, *private)


def kubeconfig(folder: Path, *, cluster: Any = None, user: Any = None, **root: Any) -> Path:
    """A kubeconfig file of one context."""
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "models"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://api.example:6443/"} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
    } | root
    path = folder / "config"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
async def test_a_pod_has_its_token_its_ca_and_its_namespace_mounted(tmp_path: Path, host: str, server: str) -> None:
    (tmp_path / "ca.crt").write_bytes(certificate()[0])
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("models")
    access = in_cluster({"KUBERNETES_SERVICE_HOST": host}, tmp_path)
    assert (access.server, access.namespace) == (server, "models")
    assert isinstance(access.tls, ssl.SSLContext)
    assert access.tls.verify_mode is ssl.CERT_REQUIRED
    assert await access.headers() == {"authorization": "Bearer first"}


async def test_a_rotated_token_is_used_from_the_next_request_on(tmp_path: Path) -> None:
    """As the kubelet does it: the file is a link to a folder that is put in the place of another."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    link = tmp_path / "token"
    link.symlink_to("one/token")
    token = FileToken(link)
    assert await token.current() == "one"
    (tmp_path / "new").symlink_to("two/token")
    (tmp_path / "new").rename(link)
    assert await token.current() == "two"


async def test_a_token_that_was_refused_is_read_again_though_its_file_looks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("aaa")
    token = FileToken(path)
    assert await token.current() == "aaa"
    stamp = path.stat()
    path.write_text("bbb")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert await token.current() == "aaa"
    token.refused()
    assert await token.current() == "bbb"


async def test_a_token_file_that_is_away_for_a_moment_costs_nothing_and_one_that_never_was_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    token = FileToken(path)
    with pytest.raises(AccessError, match=r"token: No such file"):
        await token.current()
    path.write_text("t")
    assert await token.current() == "t"
    path.unlink()
    assert await token.current() == "t"


async def test_a_kubeconfig_gives_the_server_the_namespace_and_a_token(tmp_path: Path) -> None:
    access = from_kubeconfig(kubeconfig(tmp_path, user={"token": "abc"}))
    assert (access.server, access.namespace) == ("https://api.example:6443", "models")
    assert await access.headers() == {"authorization": "Bearer abc"}


async def test_a_kubeconfigs_paths_count_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tok").write_text("from-file")
    access = from_kubeconfig(kubeconfig(tmp_path, user={"tokenFile": "tok"}))
    assert await access.headers() == {"authorization": "Bearer from-file"}


async def test_a_user_and_password_are_basic_authentication(tmp_path: Path) -> None:
    access = from_kubeconfig(kubeconfig(tmp_path, user={"username": "me", "password": "p:w"}))
    assert await access.headers() == {"authorization": f"Basic {base64.b64encode(b'me:p:w').decode()}"}


@pytest.mark.parametrize("inline", [True, False])
def test_client_certificates_are_taken_from_files_or_inline(tmp_path: Path, inline: bool) -> None:
    pem, key = certificate()
    if inline:
        user = {"client-certificate-data": base64.b64encode(pem).decode()}
        user["client-key-data"] = base64.b64encode(key).decode()
    else:
        (tmp_path / "crt").write_bytes(pem)
        (tmp_path / "key").write_bytes(key)
        user = {"client-certificate": "crt", "client-key": "key"}
    cluster = {"certificate-authority-data": base64.b64encode(pem).decode(), "tls-server-name": "kube"}
    access = from_kubeconfig(kubeconfig(tmp_path, cluster=cluster, user=user))
    assert isinstance(access.tls, ssl.SSLContext)
    assert access.server_name == "kube"
    assert access.tls.cert_store_stats()["x509"] == 1


def test_a_server_is_trusted_unseen_only_when_the_file_says_so(tmp_path: Path) -> None:
    strict = from_kubeconfig(kubeconfig(tmp_path)).tls
    lax = from_kubeconfig(kubeconfig(tmp_path, cluster={"insecure-skip-tls-verify": True})).tls
    assert isinstance(strict, ssl.SSLContext)
    assert isinstance(lax, ssl.SSLContext)
    assert (strict.verify_mode, lax.verify_mode) == (ssl.CERT_REQUIRED, ssl.CERT_NONE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"root": {"current-context": ""}}, "has no current-context"),
        ({"root": {"current-context": "other"}}, "has no entry 'other' in contexts"),
        ({"root": {"clusters": []}}, "has no entry 'k' in clusters"),
        ({"cluster": {"server": "ftp://x"}}, "no http or https URL"),
        ({"cluster": {"certificate-authority-data": "%%"}}, "certificate-authority-data is not base64"),
        ({"cluster": {"certificate-authority": "missing.crt"}}, r"missing\.crt: No such file"),
        ({"user": {"client-certificate-data": "eA=="}}, "both client-certificate and client-key"),
        ({"user": {"exec": {}}}, "exec has no command"),
    ],
)
def test_what_is_wrong_with_a_kubeconfig_is_said_with_its_path(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = kubeconfig(tmp_path, cluster=change.get("cluster"), user=change.get("user"), **change.get("root", {}))
    with pytest.raises(AccessError, match=words) as caught:
        from_kubeconfig(path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match="config: "):
        from_kubeconfig(path)


def test_a_pods_service_account_comes_before_a_kubeconfig_of_the_surroundings(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path)
    assert find(None, {"KUBECONFIG": str(path)}).server == "https://api.example:6443"
    assert find(path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).server == "https://api.example:6443"
    with pytest.raises(AccessError, match="serviceaccount"):
        find(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": str(path)})
    with pytest.raises(AccessError, match="--kubeconfig"):
        find(None, {"KUBECONFIG": str(tmp_path / "missing")})


PLUGIN = """
import json, os, sys
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
count = int(open({count!r}).read() or 0) + 1 if os.path.exists({count!r}) else 1
open({count!r}, "w").write(str(count))
status = {{"token": f"{{os.environ['WHO']}}-{{count}}", "expirationTimestamp": "2026-01-01T00:00:00Z"}}
print(json.dumps({{"apiVersion": asked["apiVersion"], "kind": "ExecCredential", "status": status}}))
"""


async def test_a_credential_plugin_is_run_again_when_its_token_expires_or_is_refused(tmp_path: Path) -> None:
    now = datetime(2025, 12, 31, tzinfo=UTC).timestamp()
    script = PLUGIN.format(count=str(tmp_path / "count"))
    token = ExecToken(ExecPlugin(sys.executable, ("-c", script), {"WHO": "me"}), wall=lambda: now)
    assert [await token.current(), await token.current()] == ["me-1", "me-1"]
    token.refused()
    assert await token.current() == "me-2"
    now += 2 * 86_400
    assert await token.current() == "me-3"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; sys.exit('not logged in')", "ended with 1: not logged in"),
        ("print('hello')", "no ExecCredential"),
        ("print('{}')", "no ExecCredential"),
    ],
)
async def test_a_credential_plugin_that_fails_is_named_with_its_words(script: str, words: str) -> None:
    with pytest.raises(AccessError, match=words):
        await ExecToken(ExecPlugin(sys.executable, ("-c", script))).current()
    with pytest.raises(AccessError, match=r"No such file.*install it so"):
        await ExecToken(ExecPlugin("/nowhere/plugin", hint="install it so")).current()


async def test_a_credential_plugin_that_hangs_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.discovery.kubernetes.credentials.EXEC_TIMEOUT_S", 0.2)
    with pytest.raises(AccessError, match="no answer within"):
        await ExecToken(ExecPlugin(sys.executable, ("-c", "import time; time.sleep(60)"))).current()
