"""Who may read the admin port, asked of the API server: TokenReview, then SubjectAccessReview.

In: a request's `Authorization` and path. Out: nothing, or the status to refuse it with. As the field's pickers do:
the caller needs `get` on the non-resource URL, for example `/metrics`. Answers are kept for a while, in a bounded
table under a hash of the token; an API server that does not answer lets nobody in.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from epp.discovery.kubernetes.client import ApiClient, ApiError
from epp.discovery.kubernetes.credentials import AccessError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})
"""What probes ask, and what tells nothing."""
GRANTED_S, DENIED_S = 60.0, 10.0
MAX_KEPT = 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Authenticator:
    """Asks the API server, and remembers."""

    def __init__(self, client: ApiClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    async def refusal(self, authorization: str, path: str) -> int:
        """0: let in; else 401 (nobody known), 403 (not allowed) or 503 (the API server cannot say)."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return 401
        key = hashlib.sha256(f"{path}\0{token}".encode()).digest()
        known = self._kept.get(key)
        if known is not None and self._clock() < known[1]:
            return known[0]
        try:
            status = await self._ask(token, path)
        except (ApiError, AccessError) as error:
            log.warning("the API server cannot say who may read %s: %s", path, error)
            return 503
        self._kept[key] = status, self._clock() + (DENIED_S if status else GRANTED_S)
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return status

    async def _ask(self, token: str, path: str) -> int:
        review = await self._create("authentication.k8s.io", "TokenReview", {"token": token})
        if review.get("authenticated") is not True:
            return 401
        user = review.get("user")
        user = user if isinstance(user, dict) else {}
        subject = {name: user.get(name) for name in ("groups", "extra", "uid") if user.get(name)}
        subject["user"] = user.get("username", "")
        attributes = {"path": path, "verb": "get"}
        spec = {**subject, "nonResourceAttributes": attributes}
        answer = await self._create("authorization.k8s.io", "SubjectAccessReview", spec)
        return 0 if answer.get("allowed") is True else 403

    async def _create(self, group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        """The `status` of a review."""
        body = {"apiVersion": f"{group}/v1", "kind": kind, "spec": spec}
        answer = await self._client.request("POST", f"/apis/{group}/v1/{kind.lower()}s", body=body)
        status = answer.get("status")
        return status if isinstance(status, dict) else {}


_WORDS = {
    401: "a bearer token that the cluster knows is needed",
    403: "this account may not get this path",
    503: "the cluster cannot be asked who may read this; see the picker's log",
}


def middleware(authenticator: Authenticator) -> Any:
    """Lets requests through whose caller may; probes always pass."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        status = await authenticator.refusal(request.headers.get("authorization", ""), request.path)
        if not status:
            return await handler(request)
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        return web.Response(text=f"{_WORDS[status]}\n", status=status, headers=headers)

    return guard
