import base64
from collections.abc import Mapping

import numpy as np

from epp.plugin import Candidates, Endpoint, Floats, InferenceRequest, NoParameters, Scorer

HEADER = "x-session-token"


class SessionAffinity(Scorer[NoParameters]):
    """Keeps a session where it was: 1 for the endpoint the client's `x-session-token` names, 0 for the others.

    Every response carries the header; a client that sends it back stays. The token is the base64 of the endpoint's name
    (with `#rank` after it when one host has several), so it survives a restart of the picker. A token that names nobody
    in the pool scores 0 everywhere and the other scorers decide.
    """

    type = "session-affinity-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        wanted = request.headers.get(HEADER)
        if not wanted:
            return np.zeros(len(candidates))
        return np.array([token(e) == wanted for e in candidates], dtype=np.float64)

    def response_headers(self, request: InferenceRequest, endpoints: Mapping[str, Endpoint]) -> Mapping[str, str]:
        """The endpoint that decodes holds the session; a profile of another name counts where it is the only one."""
        endpoint = endpoints.get("decode") or next(iter(endpoints.values()), None)
        return {HEADER: token(endpoint)} if endpoint is not None else {}


def token(endpoint: Endpoint) -> str:
    name = f"{endpoint.name}#{endpoint.rank}" if endpoint.rank else endpoint.name
    return base64.b64encode(name.encode()).decode("ascii")
