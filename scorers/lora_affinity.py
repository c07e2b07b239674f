import numpy as np

from epp.plugin import Candidates, Endpoint, Floats, InferenceRequest, NoParameters, Scorer


class LoraAffinity(Scorer[NoParameters]):
    """Prefers endpoints where the adapter is loaded.

    1.0 the target model is among the running adapters; else 0.8 an adapter slot is free (running + waiting below the
    maximum); else 0.6 it is among the waiting adapters; else 0. An endpoint that tells nothing of adapters scores 0.
    """

    type = "lora-affinity-scorer"

    def score(self, request: InferenceRequest, candidates: Candidates) -> Floats:
        model = request.target_model or request.model
        return np.array([_affinity(model, e) for e in candidates], dtype=np.float64)


def _affinity(model: str, endpoint: Endpoint) -> float:
    lora = endpoint.lora
    if lora is None:
        return 0.0
    if model in lora.running:
        return 1.0
    if len(lora.running) + len(lora.waiting) < lora.max_adapters:
        return 0.8
    return 0.6 if model in lora.waiting else 0.0
