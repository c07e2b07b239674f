"""The Kubernetes API over HTTP: a request and its JSON answer, a collection listed and watched.

In: an `Access`. Out: answers, `ApiError` for refusals, and `follow`, which drives a `ListWatch` over real sockets.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from epp.discovery.kubernetes.credentials import Access, AccessError
from epp.discovery.kubernetes.listwatch import List, ListWatch, Wait, Watch

log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_S = 30.0
"""Within which an answer begins and, but for a watch, ends."""
SILENCE_S = 150.0
"""A watch that brings nothing for so long is asked for anew: a bookmark comes about once a minute, and a connection
that died without a word looks like silence."""
MAX_ANSWER_BYTES = 64 << 20


class ApiError(Exception):
    """The API server refused, or (`status` None) could not be asked."""

    def __init__(self, status: int | None, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Collection:
    """What to list: `path` as `/api/v1/namespaces/default/pods`, and selectors in Kubernetes' spelling."""

    path: str
    label_selector: str = ""
    field_selector: str = ""

    def query(self, **more: str) -> dict[str, str]:
        pairs = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector, **more}
        return {key: value for key, value in pairs.items() if value}


class ApiClient:
    """One API server. Close it at the end."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One request and its answer. Raises ApiError; a token that is refused is read anew, once."""
        data = msgspec.json.encode(body) if body is not None else None
        for last in (False, True):
            try:
                async with self._ask(method, path, query, data, content_type) as response:
                    if response.status == 401 and not last:
                        self.access.token.refused()
                        continue
                    await _refuse(response)
                    text = await _whole(response)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise ApiError(None, f"{type(error).__name__}: {error}") from None
            break
        try:
            answer = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ApiError(None, "the answer is no JSON object")
        return answer

    def _ask(
        self, method: str, path: str, query: Mapping[str, str] | None, data: bytes | None, content_type: str
    ) -> _Asking:
        return _Asking(self, method, path, query, data, content_type)

    def session(self) -> aiohttp.ClientSession:
        """The session, made when it is first needed: it takes the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_kept_alive)
            timeout = aiohttp.ClientTimeout(total=None, connect=ANSWER_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True)
        return self._session

    async def follow(
        self,
        collection: Collection,
        machine: ListWatch[T],
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """List and watch for ever; `changed` is called after each change of what `machine` knows or of its trouble."""
        told: tuple[int, object, bool] | None = None
        while True:
            action = machine.step(clock())
            if isinstance(action, Wait):
                await asyncio.sleep(max(action.until - clock(), 0.0))
                continue

            def tell() -> None:
                nonlocal told
                state = (machine.version, machine.trouble, machine.synced)
                if state != told:
                    told = state
                    changed()

            try:
                if isinstance(action, List):
                    page = {"limit": str(action.limit), "continue": action.continue_token}
                    machine.listed(await self.request("GET", collection.path, query=collection.query(**page)), clock())
                else:
                    properly = await self._watch(collection, action, machine, tell)
                    machine.watch_ended(clock(), properly=properly)
            except ApiError as error:
                machine.failed(error.status, clock(), retry_after_s=error.retry_after_s)
            except AccessError as error:
                log.warning("%s", error)
                machine.failed(None, clock())
            tell()

    async def _watch(
        self, collection: Collection, action: Watch, machine: ListWatch[T], tell: Callable[[], None]
    ) -> bool:
        """One watch, to its end; whether the server ended it properly."""
        query = collection.query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=action.version,
            timeoutSeconds=str(int(action.timeout_s)),
        )
        try:
            async with self._ask("GET", collection.path, query, None, "") as response:
                if response.status == 401:
                    self.access.token.refused()
                await _refuse(response)
                machine.watching()
                tell()
                while data := await _more(response):
                    if not machine.received(data):
                        break
                    tell()
            return True
        except (TimeoutError, aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError):
            return False  # silent, or cut in the middle; what was seen so far holds
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(None, f"{type(error).__name__}: {error}") from None


class _Asking:
    """One request with the headers of the moment, as an asynchronous context."""

    def __init__(
        self,
        client: ApiClient,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        data: bytes | None,
        content_type: str,
    ) -> None:
        self._client, self._method, self._path, self._query = client, method, path, query
        self._data, self._content_type = data, content_type
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        access = self._client.access
        headers = {"accept": "application/json", **await access.headers()}
        if self._data is not None:
            headers["content-type"] = self._content_type
        asking = self._client.session().request(
            self._method,
            access.server + self._path,
            params=self._query,
            data=self._data,
            headers=headers,
            ssl=access.tls,
            server_hostname=access.server_name,
            allow_redirects=False,
        )
        async with asyncio.timeout(ANSWER_S):
            self._response = await asking
        return self._response

    async def __aexit__(self, *exc: object) -> None:
        if self._response is not None:
            # A watch that is left early has bytes on its way: its connection is of no use to anyone.
            self._response.close() if self._response.content.at_eof() is False else self._response.release()


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise ApiError for what is no 2xx, with the server's own words."""
    if 200 <= response.status < 300:
        return
    async with asyncio.timeout(ANSWER_S):
        text = (await response.content.read(65_536)).decode(errors="replace")
    try:
        message = str(msgspec.json.decode(text)["message"])
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        message = text.strip()[:300]
    after = response.headers.get("retry-after", "")
    retry_after_s = float(after) if after.isascii() and after.isdecimal() and len(after) < 6 else None
    raise ApiError(response.status, message or f"status {response.status}", retry_after_s)


async def _more(response: aiohttp.ClientResponse) -> bytes:
    """What a watch brings next; b"" at its end."""
    async with asyncio.timeout(SILENCE_S):
        return await response.content.readany()


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async with asyncio.timeout(ANSWER_S):
        while data := await response.content.readany():
            body += data
            if len(body) > MAX_ANSWER_BYTES:
                raise ApiError(None, f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def _kept_alive(address: Any) -> socket.socket:
    """A socket that notices within a minute that the other side is gone, though nothing is sent."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family=family, type=kind, proto=protocol)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock
