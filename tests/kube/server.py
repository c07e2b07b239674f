"""The API server: HTTP over a `Store`, as far as list-watch clients, leader election and kubectl go.

    async with running_api() as api:
        api.store.put("Pod", {...})
        api.faults.refuse["watch", "pods"] = 503

`python -m tests.kube.server --port N` runs one to try by hand. Time is the event loop's, so that it may be virtual.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.kube import openapi, selectors
from tests.kube.faults import Faults
from tests.kube.resources import Resource
from tests.kube.store import Json, Predicate, Refused, Store, both, events, expired, in_namespace
from tests.kube.tables import table

EPOCH = 1_764_547_200.0
"""The time of day when the loop's clock was 0."""
KUBELET_S = 0.2
"""What a pod takes to end."""


class Api:
    """A running server."""

    def __init__(self, *, window: int = 1000, with_crds: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.store = Store(lambda: EPOCH + loop.time(), window=window, with_crds=with_crds)
        self.faults = Faults()
        self.requests: Counter[tuple[str, str]] = Counter()
        """(verb, resource) -> how often it was asked for."""
        self.users: dict[str, Json] = {}
        """Token -> user, for TokenReview: `{"username": ..., "groups": [...]}`."""
        self.allowed: set[tuple[str, str]] = set()
        """(user, path) that SubjectAccessReview allows."""
        self.kubelet_s = KUBELET_S
        self.port = 0
        self._changed = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self._ended = 0
        self._kubelet: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._tls: ssl.SSLContext | None = None
        self.store.changed = self._wake
        self.store.terminating = self._terminate

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def watches(self) -> int:
        """Watches that are open now."""
        return len(self._watches)

    def kubeconfig(self, path: Path, *, namespace: str = "default", user: Json | None = None) -> Path:
        """Write a kubeconfig for it, and give its path."""
        context = {"cluster": "kube", "user": "user", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "kube",
            "contexts": [{"name": "kube", "context": context}],
            "clusters": [{"name": "kube", "cluster": {"server": self.url}}],
            "users": [{"name": "user", "user": user or {}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    # Running

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a loopback port; again on the same one after `stop`."""
        app = web.Application(client_max_size=4 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        self._tls = tls or self._tls
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Go away: connections are cut, new ones refused. What is stored stays."""
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        for task in self._kubelet:
            task.cancel()
        await self.stop()

    def cut_watches(self) -> None:
        """Break the connection of every watch."""
        for task in list(self._watches):
            task.cancel()

    def end_watches(self) -> None:
        """End every watch properly, as a server does that goes down by plan."""
        self._ended += 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _terminate(self, resource: Resource, pod: Json) -> None:
        async def end() -> None:
            await asyncio.sleep(self.kubelet_s)
            self.store.finish(resource, pod["metadata"]["namespace"], pod["metadata"]["name"])

        task = asyncio.create_task(end())
        self._kubelet.add(task)
        task.add_done_callback(self._kubelet.discard)

    # Answering

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            await self._admit(request)
            return await self._route(request)
        except Refused as refused:
            headers = {"retry-after": after} if (after := refused.details.get("retryAfter")) else {}
            return _json(refused.status(), refused.code, headers)

    async def _admit(self, request: web.Request) -> None:
        """Who asks, and what is wrong today."""
        if self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s)
        if self.faults.once:
            code, after = self.faults.once.popleft()
            raise Refused(code, _REASONS.get(code, "InternalError"), "as the test wants it", retryAfter=after)
        tokens = self.faults.tokens
        if tokens is not None and request.headers.get("authorization", "").removeprefix("Bearer ") not in tokens:
            raise Refused(401, "Unauthorized", "Unauthorized")

    async def _route(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts[0] == "version":
            return _json({"major": "1", "minor": "32", "gitVersion": "v1.32.0", "platform": "linux/amd64"})
        if parts[0] in ("healthz", "readyz", "livez"):
            return web.Response(text="ok")
        if parts[0] == "openapi":
            return self._openapi(request.path)
        if parts[0] == "api" and len(parts) <= 2:
            return _json(self._core() if len(parts) == 1 else self._resource_list("", parts[1]))
        if parts[0] == "apis" and len(parts) <= 3:
            if len(parts) == 3:
                return _json(self._resource_list(parts[1], parts[2]))
            if len(parts) == 2:
                return _json(self._group(parts[1]))
            return _json({"kind": "APIGroupList", "apiVersion": "v1", "groups": self._groups()})
        if parts[0] == "api":
            return await self._resource_request(request, "", parts[1], parts[2:])
        if parts[0] == "apis":
            return await self._resource_request(request, parts[1], parts[2], parts[3:])
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    async def _resource_request(
        self, request: web.Request, group: str, version: str, parts: list[str]
    ) -> web.StreamResponse:
        if parts[0] in ("tokenreviews", "subjectaccessreviews"):
            self._count("create", parts[0])
            return _json(self._review(parts[0], await _body(request)), 201)
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        resource = self.store.resource(group, version, parts[0])
        name, subresource = (*parts[1:], "", "")[:2]
        if subresource not in ("", "status") or (subresource and not resource.has_status):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        verb = self._verb(request, name)
        self._count(verb, resource.plural)
        if verb == "watch":
            return await self._watch(request, resource, namespace, name)
        if verb in ("get", "list"):
            return self._read(request, resource, namespace, name)
        return await self._write(request, verb, resource, namespace, name, subresource == "status")

    def _verb(self, request: web.Request, name: str) -> str:
        if request.method == "GET":
            if request.query.get("watch") in ("1", "true"):
                return "watch"
            return "get" if name else "list"
        verbs = {
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete" if name else "deletecollection",
        }
        if (verb := verbs.get(request.method)) is None or (bool(name) == (request.method == "POST")):
            raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        return verb

    def _count(self, verb: str, plural: str) -> None:
        self.requests[verb, plural] += 1
        for key in ((verb, plural), (verb, "*"), ("*", plural), ("*", "*")):
            if code := self.faults.refuse.get(key):
                raise Refused(code, _REASONS.get(code, "InternalError"), f"{verb} {plural}: as the test wants it")

    def _takes(self, request: web.Request, resource: Resource, namespace: str, name: str = "") -> Predicate:
        try:
            by_label = selectors.labels(request.query.get("labelSelector", ""))
            by_field = selectors.fields(request.query.get("fieldSelector", ""), resource.plural)
        except ValueError as error:
            raise Refused(400, "BadRequest", str(error)) from None
        named = (lambda obj: obj["metadata"]["name"] == name) if name else (lambda obj: True)
        return both(in_namespace(namespace), by_label, by_field, named)

    def _read(self, request: web.Request, resource: Resource, namespace: str, name: str) -> web.StreamResponse:
        asked = request.query.get("resourceVersion", "")
        if asked not in ("", "0") and int(asked) > self.store.version:
            raise _too_large(asked, self.store.version)
        if name:
            obj = self.store.get(resource, namespace, name)
            return _json(table(resource, [obj], "") if _as_table(request) else obj)
        limit = 0 if self.faults.no_limit else int(request.query.get("limit") or 0)
        takes = self._takes(request, resource, namespace)
        token = request.query.get("continue", "")
        items, version, after = self.store.page(resource, namespace, takes, limit=limit, token=token)
        if _as_table(request):
            return _json(table(resource, items, version, after))
        metadata = {"resourceVersion": version} | ({"continue": after} if after else {})
        shape = {"kind": f"{resource.kind}List", "apiVersion": resource.group_version, "metadata": metadata}
        bare = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in items]
        return _json(shape | {"items": items if resource.schema is not None else bare})

    async def _write(
        self, request: web.Request, verb: str, resource: Resource, namespace: str, name: str, status: bool
    ) -> web.StreamResponse:
        store = self.store
        if verb == "create":
            return _json(store.create(resource, namespace, await _body(request)), 201)
        if verb == "update":
            obj = await _body(request)
            if (obj.get("metadata") or {}).get("name") != name:
                raise Refused(400, "BadRequest", "the name of the object does not match the name on the URL")
            return _json(store.update(resource, namespace, obj, status=status))
        if verb == "patch":
            kind = request.headers.get("content-type", "").partition(";")[0]
            return _json(store.patch(resource, namespace, name, kind, await _parsed(request), status=status))
        options = await _body(request) if request.can_read_body else {}
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        grace = None if grace is None else int(grace)
        if verb == "deletecollection":
            takes = self._takes(request, resource, namespace)
            found = [obj for obj in store.all(resource, namespace) if takes(obj)]
            for obj in found:
                store.delete(resource, obj["metadata"].get("namespace", ""), obj["metadata"]["name"], grace_s=grace)
            return _json({"kind": f"{resource.kind}List", "apiVersion": resource.group_version, "items": found})
        uid = str((options.get("preconditions") or {}).get("uid") or "")
        obj = store.delete(resource, namespace, name, grace_s=grace, uid=uid)
        if resource.plural == "pods":
            return _json(obj)
        details = {"name": name, "kind": resource.plural, "uid": obj["metadata"]["uid"]}
        return _json({"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}, "details": details})

    # Watching

    async def _watch(self, request: web.Request, resource: Resource, namespace: str, name: str) -> web.StreamResponse:
        takes = self._takes(request, resource, namespace, name)
        asked = request.query.get("resourceVersion", "")
        initial: list[Json] = []
        version = self.store.version
        if asked in ("", "0"):
            initial = [obj for obj in self.store.all(resource, namespace) if takes(obj)]
        elif int(asked) > self.store.version:
            raise _too_large(asked, self.store.version)
        else:
            version = int(asked)
            if version < self.store.compacted and not self.faults.expired_as_event:
                raise expired()
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        try:
            await response.prepare(request)
            stream = _Stream(response, resource, self.faults, as_table=_as_table(request))
            for obj in initial:
                await stream.send("ADDED", obj)
            await self._follow(request, resource, takes, version, stream)
            await response.write_eof()
        except (_Cut, asyncio.CancelledError):
            # Not a proper end: the connection breaks where it is.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._watches.discard(task)
        return response

    async def _follow(
        self, request: web.Request, resource: Resource, takes: Predicate, version: int, stream: _Stream
    ) -> None:
        loop = asyncio.get_running_loop()
        asked_s = float(request.query.get("timeoutSeconds") or 1800)
        until = loop.time() + min(asked_s, self.faults.watch_limit_s)
        bookmarks = request.query.get("allowWatchBookmarks") in ("1", "true")
        bookmark_at = loop.time() + self.faults.bookmark_s
        ended = self._ended
        while (now := loop.time()) < until and ended == self._ended:
            changed = self._changed
            if not self.faults.mute:
                if self.store.version < version:
                    return  # restored from a backup: a new process knows nothing of this watch
                try:
                    news = self.store.since(resource, version)
                except Refused as refused:
                    await stream.error(refused)
                    return
                for at, kind, obj in events(news, takes):
                    await stream.send(kind, obj)
                    version = at
                version = max(version, self.store.version)
                if bookmarks and now >= bookmark_at:
                    await stream.bookmark(version)
                    bookmark_at = now + self.faults.bookmark_s
                if resource not in self.store.resources:
                    return
            try:
                async with asyncio.timeout(min(until, bookmark_at if bookmarks else until) - now):
                    await changed.wait()
            except TimeoutError:
                bookmark_at = bookmark_at if not self.faults.mute else loop.time() + self.faults.bookmark_s

    # Reviews

    def _review(self, plural: str, body: Json) -> Json:
        spec = body.get("spec") or {}
        if plural == "tokenreviews":
            user = self.users.get(str(spec.get("token")))
            status: Json = {"authenticated": user is not None} | ({"user": user} if user is not None else {})
        else:
            path = (spec.get("nonResourceAttributes") or {}).get("path")
            status = {"allowed": (spec.get("user"), path) in self.allowed}
        return {**body, "status": status}

    # Discovery

    def _core(self) -> Json:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}

    def _groups(self) -> list[Json]:
        names = {r.group for r in self.store.resources if r.group}
        return [self._group(name) for name in sorted(names)]

    def _group(self, group: str) -> Json:
        versions = sorted({r.version for r in self.store.resources if r.group == group})
        if not versions:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        known = [{"groupVersion": f"{group}/{v}", "version": v} for v in versions]
        return {"kind": "APIGroup", "apiVersion": "v1", "name": group, "versions": known, "preferredVersion": known[-1]}

    def _resource_list(self, group: str, version: str) -> Json:
        found = [r for r in self.store.resources if (r.group, r.version) == (group, version)]
        if not found:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        entries: list[Json] = []
        for r in found:
            names = {"name": r.plural, "singularName": r.kind.lower(), "shortNames": list(r.short_names)}
            entries.append({**names, "namespaced": r.namespaced, "kind": r.kind, "verbs": verbs})
            if r.has_status:
                status = {"name": f"{r.plural}/status", "singularName": "", "namespaced": r.namespaced}
                entries.append({**status, "kind": r.kind, "verbs": ["get", "patch", "update"]})
        group_version = f"{group}/{version}" if group else version
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": entries}

    def _openapi(self, path: str) -> web.Response:
        if path == "/openapi/v3":
            return _json(openapi.index(self.store.resources))
        document = openapi.document(self.store.resources, path.removeprefix("/openapi/v3/"))
        if document is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return _json(document)


class _Cut(Exception):
    """The connection is to break now."""


class _Stream:
    """The events of one watch, a line each."""

    def __init__(self, response: web.StreamResponse, resource: Resource, faults: Faults, *, as_table: bool) -> None:
        self._response, self._resource, self._faults, self._as_table = response, resource, faults, as_table
        self._first = True

    async def send(self, kind: str, obj: Json) -> None:
        if self._faults.padding:
            annotations = {**(obj["metadata"].get("annotations") or {}), "padding": "p" * self._faults.padding}
            obj = {**obj, "metadata": {**obj["metadata"], "annotations": annotations}}
        if self._as_table:
            obj = table(self._resource, [obj], obj["metadata"]["resourceVersion"], columns=self._first)
            self._first = False
        await self._line({"type": kind, "object": obj})

    async def bookmark(self, version: int) -> None:
        metadata = {"resourceVersion": str(version), "creationTimestamp": None}
        shape = {"kind": self._resource.kind, "apiVersion": self._resource.group_version, "metadata": metadata}
        if self._as_table:
            shape = table(self._resource, [], str(version), columns=False)
        await self._line({"type": "BOOKMARK", "object": shape})

    async def error(self, refused: Refused) -> None:
        await self._line({"type": "ERROR", "object": refused.status()})

    async def _line(self, event: Json) -> None:
        line = json.dumps(event).encode() + b"\n"
        if (cut := self._faults.cut_after) is not None:
            if len(line) > cut:
                self._faults.cut_after = None
                await self._response.write(line[:cut])
                raise _Cut
            self._faults.cut_after = cut - len(line)
        await self._response.write(line)


_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


def _too_large(asked: str, current: int) -> Refused:
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Too large resource version: {asked}, current: {current}"
    return Refused(504, "Timeout", message, causes=causes, retryAfterSeconds=1)


def _as_table(request: web.Request) -> bool:
    return "as=Table" in request.headers.get("accept", "")


def _json(body: Any, code: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=json.dumps(body), status=code, content_type="application/json", headers=headers)


async def _parsed(request: web.Request) -> Any:
    try:
        return yaml.safe_load(await request.text()) if "yaml" in request.content_type else await request.json()
    except ValueError:
        raise Refused(400, "BadRequest", "the object provided is unrecognized") from None


async def _body(request: web.Request) -> Json:
    body = await _parsed(request)
    if not isinstance(body, dict):
        raise Refused(400, "BadRequest", "the object provided is unrecognized")
    return body


@asynccontextmanager
async def running_api(
    *, window: int = 1000, with_crds: bool = True, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Api]:
    """A server on a free loopback port."""
    api = Api(window=window, with_crds=with_crds)
    await api.start(tls=tls)
    try:
        yield api
    finally:
        await api.close()


async def _serve(port: int, until: Callable[[], Awaitable[Any]]) -> None:
    api = Api()
    await api.start(port)
    path = api.kubeconfig(Path(f"kubeconfig-{api.port}"))
    print(f"{api.url}; KUBECONFIG={path.resolve()}", flush=True)
    try:
        await until()
    finally:
        await api.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small Kubernetes API server for tests.")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_serve(parser.parse_args().port, asyncio.Event().wait))
