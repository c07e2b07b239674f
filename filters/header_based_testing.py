"""`header-based-testing-filter`: the endpoints that a request's header names. For conformance tests only."""

from __future__ import annotations

from collections.abc import Sequence

from epp.plugin import Candidates, Filter, InferenceRequest, NoParameters

HEADER = "test-epp-endpoint-selection"


class HeaderBasedTestingFilter(Filter[NoParameters]):
    """Keeps the endpoints in the comma list of the header `test-epp-endpoint-selection`; without it, none.

    Entries are `ip` or `ip:port`; IPv6 with a port is bracketed. Never use it in production: clients write this header.
    """

    type = "header-based-testing-filter"

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Sequence[bool]:
        wanted = {entry.strip() for entry in request.headers.get(HEADER).split(",")}
        return [e.address in wanted or e.host in wanted or f"[{e.host}]" in wanted for e in candidates]
