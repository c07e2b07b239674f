"""How to reach an API server and as whom: from inside a pod, or by a kubeconfig file.

In: the service account's folder, or a kubeconfig. Out: `Access`: the server's URL, its TLS, and the headers of a
request, read again as tokens rotate. Raises `AccessError`, which names the file and what is wrong with it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_API = "client.authentication.k8s.io/v1"
EXEC_TIMEOUT_S = 30.0
MAX_EXEC_BYTES = 1 << 20


class AccessError(Exception):
    """The API server cannot be asked; the text says why, for the user."""


class Token:
    """A bearer token. `current` gives the one to use now; `refused` says that the server does not take it."""

    async def current(self) -> str:
        """ "" for none. Raises AccessError."""
        return ""

    def refused(self) -> None:
        """Get another one for the next request, if there is one to be had."""


class FixedToken(Token):
    def __init__(self, text: str) -> None:
        self._text = text

    async def current(self) -> str:
        return self._text


class FileToken(Token):
    """A token file that the kubelet replaces about hourly: read anew when it changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._text = ""

    async def current(self) -> str:
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                # A few hundred bytes of a memory file system.
                self._text, self._stamp = self.path.read_text().strip(), stamp
        except OSError as error:
            if not self._text:
                raise AccessError(f"{self.path}: {error.strerror or error}") from None
        return self._text

    def refused(self) -> None:
        self._stamp = None


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """The `exec` entry of a kubeconfig user."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    api_version: str = EXEC_API
    hint: str = ""


class ExecToken(Token):
    """A token from a credential plugin, kept until it expires or is refused."""

    def __init__(self, plugin: ExecPlugin, wall: Callable[[], float] = time.time) -> None:
        self.plugin = plugin
        self._wall = wall
        self._text = ""
        self._until = 0.0

    async def current(self) -> str:
        if not self._text or self._wall() >= self._until:
            self._text, self._until = await self._run()
        return self._text

    def refused(self) -> None:
        self._text = ""

    async def _run(self) -> tuple[str, float]:
        plugin = self.plugin
        asks = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
        environment = {**os.environ, **plugin.env, "KUBERNETES_EXEC_INFO": json.dumps(asks)}
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                plugin.command,
                *plugin.args,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_EXEC_BYTES,
            )
            async with asyncio.timeout(EXEC_TIMEOUT_S):
                output, errors = await process.communicate()
        except TimeoutError:  # before OSError, which it is one of
            raise AccessError(f"{plugin.command}: no answer within {EXEC_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise AccessError(f"{plugin.command}: {error.strerror or error}. {plugin.hint}".strip()) from None
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            words = errors.decode(errors="replace").strip()[-300:]
            raise AccessError(f"{plugin.command} ended with {process.returncode}: {words}")
        return self._read(output)

    def _read(self, output: bytes) -> tuple[str, float]:
        try:
            status = json.loads(output)["status"]
            token, expires = str(status["token"]), status.get("expirationTimestamp")
            until = datetime.fromisoformat(str(expires)).timestamp() if expires else float("inf")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise AccessError(f"{self.plugin.command}: its output is no ExecCredential with a token") from None
        return token, until


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is, and as whom it is asked."""

    server: str
    """URL without a slash at its end."""
    tls: ssl.SSLContext | bool = True
    """What the server's certificate is checked with; False: nothing (insecure, or plain HTTP)."""
    token: Token = field(default_factory=Token)
    namespace: str = ""
    """The one that is meant when none is named; "" when nobody says."""
    server_name: str | None = None
    basic: str = ""
    """Value of the header `Authorization` in the place of a token."""

    async def headers(self) -> dict[str, str]:
        if self.basic:
            return {"authorization": self.basic}
        token = await self.token.current()
        return {"authorization": f"Bearer {token}"} if token else {}


def find(kubeconfig: Path | None = None, environment: Mapping[str, str] | None = None) -> Access:
    """The given kubeconfig, else the pod's service account, else `$KUBECONFIG` or `~/.kube/config`."""
    environment = os.environ if environment is None else environment
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig)
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(environment)
    named = environment.get("KUBECONFIG", "").split(os.pathsep)[0]
    path = Path(named) if named else Path.home() / ".kube/config"
    if not path.exists():
        raise AccessError(
            f"no way to the Kubernetes API server: not in a pod, and {path} is not there (--kubeconfig names another)"
        )
    return from_kubeconfig(path)


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access:
    """From inside a pod: its environment, and the token, CA and namespace that are mounted into it."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise AccessError(f"{folder / 'ca.crt'}: {error}") from None
    try:
        namespace = (folder / "namespace").read_text().strip()
    except OSError:
        namespace = ""
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return Access(server, context, FileToken(folder / "token"), namespace)


def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig file."""
    try:
        return _Kubeconfig(path).access()
    except OSError as error:
        raise AccessError(f"{error.filename or path}: {error.strerror or error}") from None
    except (ValueError, ssl.SSLError) as error:
        raise AccessError(f"{path}: {error}") from None


class _Kubeconfig:
    """One file on its way to an `Access`; ValueError for what it lacks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.root = _mapping(yaml.safe_load(path.read_text()), "the file")
        except yaml.YAMLError as error:
            raise ValueError(f"is not YAML: {str(error).splitlines()[0]}") from None

    def access(self) -> Access:
        current = self.root.get("current-context")
        if not current:
            raise ValueError("has no current-context")
        context = self._named("contexts", "context", str(current))
        cluster = self._named("clusters", "cluster", str(context.get("cluster", "")))
        user = self._named("users", "user", str(context["user"])) if context.get("user") else {}
        server = str(cluster.get("server", "")).rstrip("/")
        if not server.startswith(("https://", "http://")):
            raise ValueError(f"the cluster's server {server!r} is no http or https URL")
        basic = ""
        if user.get("username"):
            pair = f"{user['username']}:{user.get('password', '')}".encode()
            basic = f"Basic {base64.b64encode(pair).decode()}"
        return Access(
            server,
            self._tls(cluster, user) if server.startswith("https://") else False,
            self._token(user),
            str(context.get("namespace") or ""),
            str(cluster["tls-server-name"]) if cluster.get("tls-server-name") else None,
            basic,
        )

    def _named(self, section: str, key: str, name: str) -> dict[str, Any]:
        for item in self.root.get(section) or ():
            if isinstance(item, dict) and item.get("name") == name:
                return _mapping(item.get(key) or {}, f"{section} {name}")
        raise ValueError(f"has no entry {name!r} in {section}")

    def _token(self, user: dict[str, Any]) -> Token:
        if user.get("token"):
            return FixedToken(str(user["token"]))
        if user.get("tokenFile"):
            return FileToken(self._path(user["tokenFile"]))
        if user.get("exec") is not None:
            entry = _mapping(user["exec"], "the user's exec")
            command = str(entry.get("command") or "")
            if not command:
                raise ValueError("the user's exec has no command")
            return ExecToken(
                ExecPlugin(
                    str(self._path(command)) if "/" in command else command,
                    tuple(map(str, entry.get("args") or ())),
                    {str(e["name"]): str(e["value"]) for e in entry.get("env") or ()},
                    str(entry.get("apiVersion") or EXEC_API),
                    str(entry.get("installHint") or ""),
                )
            )
        return Token()

    def _tls(self, cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
        authority = self._bytes(cluster, "certificate-authority")
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = self._bytes(user, "client-certificate"), self._bytes(user, "client-key")
        if certificate is not None and key is not None:
            # The module takes files alone; these are gone before anything else can fail.
            with tempfile.TemporaryDirectory(prefix="kvsteer-") as directory:
                pair = Path(directory) / "pair.pem"
                pair.touch(mode=0o600)
                pair.write_bytes(certificate + b"\n" + key)
                context.load_cert_chain(pair)
        elif certificate is not None or key is not None:
            raise ValueError("a user needs both client-certificate and client-key, or neither")
        return context

    def _bytes(self, entry: dict[str, Any], key: str) -> bytes | None:
        if data := entry.get(f"{key}-data"):
            try:
                return base64.b64decode(str(data), validate=True)
            except binascii.Error:
                raise ValueError(f"{key}-data is not base64") from None
        return self._path(entry[key]).read_bytes() if entry.get(key) else None

    def _path(self, text: object) -> Path:
        """Relative paths count from the file's folder."""
        return self.path.parent / str(text)


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no mapping")
    return value
