"""One request at the decode worker's sidecar: who is asked, in what order, and what becomes of failures. Sans-IO.

In: the client's request; how the prefill leg went; `now` on a monotonic clock. Out: what to do next: `Call` (ask a
prefill worker), `Proceed` (let the request go to the local vLLM) or `Refuse` (answer the client).

    start -> Call -> answered 2xx --------------------------------> Proceed with the answer's kv_transfer_params
                  -> answered 4xx --------------------------------> Refuse: it is the client's
                  -> 502, 503, 504, no connection, reset, timeout -> Call the next one named, then Proceed alone
                  -> another 5xx, or nothing handed over ---------> Proceed alone

*Lease guard*: a prefill worker keeps the blocks for a lease, and vLLM answers 200 from whatever lies in them when the
decode leg comes later. `Proceed.not_after` is the last safe moment; the driver that is later calls `late`, which has
the prompt computed again, once, and then decodes alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from epp.api.errors import BadRequest
from epp.api.paths import api_of
from epp.disagg.headers import PREFILLER
from epp.disagg.sidecar import bodies

MAX_NAMED = 8
"""Prefillers that a request may name."""
REQUEST_ID = "x-request-id"
NEXT = frozenset({502, 503, 504})


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator sets."""

    allowed: Callable[[str], bool]
    """Whether `ip:port` may be asked."""
    lease_s: float = 30.0
    """`kv_lease_duration` of the prefill workers."""
    margin_s: float = 5.0
    """Before the lease's end; blocks are not counted on any more."""
    prefill_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Call:
    """POST to a prefill worker, with the client's own path and headers."""

    address: str
    body: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Proceed:
    """Let the request go on to the local worker."""

    body: bytes
    outcome: str
    """`prefill-decode`, or `decode-only`."""
    why: str = ""
    """Why it is decoded alone, where a prefiller was named."""
    cached_tokens: int | None = None
    """What the prefill worker had cached: what the client's usage should tell."""
    not_after: float | None = None
    """Last moment at which it may be sent."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the client."""

    status: int
    body: bytes
    content_type: str = "application/json"


Action = Call | Proceed | Refuse


class Exchange:
    """One request. `start` once, then what the driver saw of each `Call`."""

    def __init__(self, rules: Rules, path: str, headers: Mapping[str, str], body: bytes) -> None:
        self._rules = rules
        self._api = api_of(path)
        self._named = _addresses(headers.get(PREFILLER, ""))
        self._left = list(self._named)
        self._body = body
        self._leg = b""
        self._last = ""
        self._again = 1
        """How often the prompt may be computed again for a lease that ran out."""

    def start(self) -> Action:
        if not self._named:
            return self._alone("")
        if self._api not in bodies.TOKENS:
            return self._alone("path")
        if len(self._named) > MAX_NAMED:
            return _refuse(400, f"more than {MAX_NAMED} prefillers are named")
        for address in self._named:
            if not self._rules.allowed(address):
                return _refuse(403, "the prefiller that is named is not one of this pool")
        try:
            self._leg = bodies.prefill_body(self._body, self._api)
        except BadRequest:
            return self._alone("unreadable")  # the worker says what is wrong with it
        return self._next("")

    def answered(self, status: int, body: bytes, content_type: str, now: float) -> Action:
        """The prefill worker answered the last `Call`."""
        if status in NEXT:
            return self._next(f"prefill-{status}")
        if 400 <= status < 500:
            return Refuse(status, body, content_type or "application/json")
        if not 200 <= status < 300:
            return self._alone("prefill-5xx")
        handed = bodies.handed_over(body)
        if handed is None:
            return self._alone("nothing-handed-over")
        params, cached = handed
        not_after = now + self._rules.lease_s - self._rules.margin_s
        return Proceed(bodies.decode_body(self._body, params), "prefill-decode", "", cached, not_after)

    def failed(self, kind: str) -> Action:
        """The last `Call` came to nothing: `unreachable`, `reset`, `timeout`."""
        return self._next(f"prefill-{kind}")

    def late(self) -> Action:
        """The request could not be sent by `Proceed.not_after`: its blocks may be another prompt's by now."""
        if self._again:
            self._again -= 1
            return self._call(self._last)
        return self._alone("lease")

    def _next(self, why: str) -> Action:
        return self._call(self._left.pop(0)) if self._left else self._alone(why)

    def _call(self, address: str) -> Call:
        self._last = address
        return Call(address, self._leg, self._rules.prefill_timeout_s)

    def _alone(self, why: str) -> Proceed:
        return Proceed(bodies.decode_body(self._body, None), "decode-only", why)


def _addresses(text: str) -> list[str]:
    """`ip:port,...`, each once, as they are compared: IPv6 in brackets and in its shortest form."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        host, _, port = part.rpartition(":")
        try:
            ip = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            found.append(part)  # nobody's address; refused with the others that are not allowed
            continue
        found.append(f"[{ip.compressed}]:{port}" if ip.version == 6 else f"{ip}:{port}")
    return list(dict.fromkeys(found))


def _refuse(status: int, message: str) -> Refuse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    text = f'{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":"{status}"}}}}'
    return Refuse(status, text.encode())
