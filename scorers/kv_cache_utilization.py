from epp.plugin import Candidates, Floats, InferenceRequest, NoParameters, Scorer


class KVCacheUtilization(Scorer[NoParameters]):
    """Prefers free KV cache: `1 - kv_usage`. An unknown usage counts as the highest known one."""

    type = "kv-cache-utilization-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        return 1.0 - candidates.worst_if_unknown("kv_usage")
