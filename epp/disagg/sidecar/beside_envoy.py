"""The sidecar behind an Envoy of its own (`envoy/decode-sidecar.yaml`): Envoy is the data path, this answers ext_proc.

In: ext_proc messages with a request's head and body. Out: the body for the local worker, or the client's refusal, once
the prefill legs are done. The answer's bytes never come here: generated tokens cost this process nothing. Envoy ends
the stream of a client that leaves, which ends the leg that runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from uuid import uuid4

from epp.disagg.headers import CONTROL, PREFILLER
from epp.disagg.sidecar.caller import TOLD, Caller, onward, told
from epp.disagg.sidecar.exchange import REQUEST_ID, Exchange, Proceed, Refuse
from epp.gateway import errors
from epp.gateway.errors import Rejection
from epp.gateway.ext_proc import ExtProcStream
from epp.gateway.ext_proc_events import Event, Limits, ProtocolFault, RequestReady, Steering
from epp.gateway.session import GrpcStatus, Writer
from epp.request import RequestHead

log = logging.getLogger(__name__)

REMOVED = (*CONTROL, TOLD)


class Beside:
    """A `Session` (see `epp.gateway.session`): one HTTP request as Envoy tells it."""

    def __init__(self, caller: Caller, limits: Limits, writer: Writer) -> None:
        self._caller = caller
        self._writer = writer
        self._stream = ExtProcStream(limits)
        self._legs: asyncio.Task[None] | None = None

    def receive(self, message: bytes) -> Sequence[bytes]:
        for event in self._stream.receive(message):
            self._handle(event)
        return self._stream.take()

    def half_closed(self) -> bool:
        self.closed()
        return True

    def closed(self) -> None:
        self._stream.closed()
        if self._legs is not None:
            self._legs.cancel()
            self._legs = None

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReady():
                self._request(event)
            case ProtocolFault():
                self._writer.finish(GrpcStatus.INVALID_ARGUMENT, event.reason)
                self.closed()

    def _request(self, ready: RequestReady) -> None:
        head, caller = ready.head, self._caller
        if caller.draining and head.path.partition("?")[0] == "/health":
            self._stream.reject(errors.unavailable("draining", "the sidecar is about to end"))
        elif ready.body is None:  # a tunnel
            if PREFILLER in head.headers:
                caller.outcomes["decode-only", "body-not-shown"] += 1
            self._stream.steer(Steering((), remove_headers=REMOVED))
        else:
            self._legs = asyncio.get_running_loop().create_task(self._settle(ready, ready.body))

    async def _settle(self, ready: RequestReady, body: bytes) -> None:
        head = ready.head
        try:
            with self._caller.counted():
                exchange = Exchange(self._caller.settings.rules, *_named(ready), body)
                pairs = [
                    (name, value.decode("utf-8", "replace"))
                    for name in head.headers
                    if not name.startswith(":")
                    for value in head.headers.get_all(name)
                ]
                headers = onward(pairs)
                identity = headers.setdefault(REQUEST_ID, str(uuid4()))
                action = await self._caller.settle(exchange, head.path, headers)
            self._answer(action, body, identity, head)
        except Exception:
            log.exception("a request failed; its RPC ends with INTERNAL")
            self._writer.finish(GrpcStatus.INTERNAL, "internal error")
        else:
            self._writer.send(self._stream.take())

    def _answer(self, action: Proceed | Refuse, body: bytes, identity: str, head: RequestHead) -> None:
        if isinstance(action, Refuse):
            headers = {"content-type": action.content_type}
            self._stream.reject(Rejection(action.status, action.body, headers, "disaggregation"))
            return
        self._stream.steer(
            Steering(
                (),
                set_headers={} if REQUEST_ID in head.headers else {REQUEST_ID: identity},
                remove_headers=REMOVED,
                body=None if action.body == body else action.body,
                response_headers={TOLD: told(action)} if TOLD in head.headers else {},
            )
        )


def _named(ready: RequestReady) -> tuple[str, dict[str, str]]:
    headers = ready.head.headers
    return ready.head.path.partition("?")[0], {name: headers.get(name) for name in headers}
