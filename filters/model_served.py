"""`model-served`: endpoints that serve the model a request will be asked for."""

from __future__ import annotations

import numpy as np

from epp.plugin import Candidates, Filter, InferenceRequest, Mask, NoParameters


class ModelServed(Filter[NoParameters]):
    """Keeps endpoints whose list of models and adapters has the request's target model, or is not known yet.

    When no endpoint has it all stay: the worker's own answer (404, or loading the adapter) is better than ours.
    """

    type = "model-served"

    def filter(self, request: InferenceRequest, candidates: Candidates) -> Mask:
        model = request.target_model
        if model:
            mask = np.array([e.models is None or model in e.models for e in candidates])
            if mask.any():
                return mask
        return np.ones(len(candidates), dtype=np.bool_)
