"""`header-based-testing-filter`: the endpoints that a request's header names. For conformance tests only."""

from __future__ import annotations

from collections.abc import Sequence

from epp.plugin import Candidates, Filter, InferenceRequest, NoParameters

HEADER = "test-epp-endpoint-selection"


class HeaderBasedTestingFilter(Filter[NoParameters]):
    """Keeps the endpoints in the comma list of the header `test-epp-endpoint-selection`; without it, none.

    Entries are `ip`, `ip:port` or, for one of several ranks behind a port, `ip:port@rank`; IPv6 with a port is
    bracketed. Never use it in production: clients write this header.
    """

    type = "header-based-testing-filter"

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Sequence[bool]:
        wanted = {entry.strip() for entry in request.headers.get(HEADER).split(",")}
        return [not wanted.isdisjoint((e.key, e.address, e.host, f"[{e.host}]")) for e in candidates]
