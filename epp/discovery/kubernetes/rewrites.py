"""Which model a worker is asked for, by InferenceModelRewrite. Pure.

Precedence, as the Gateway API Inference Extension has it: a rule that names the model beats one for all models; of two
alike the older object wins, then the order of rules. Among a rule's targets chance decides, by weight; where no weight
is given, all alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from epp.discovery.kubernetes.objects import Rewrite, Rule


class ModelRewrites:
    """The rules in force for one pool."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._exact: dict[str, Rule] = {}
        self._generic: Rule | None = None

    def __len__(self) -> int:
        return len(self._exact) + (self._generic is not None)

    def replace(self, rewrites: Iterable[Rewrite]) -> None:
        """Put these in force and no others."""
        self._exact, self._generic = {}, None
        for rewrite in sorted(rewrites, key=lambda r: (r.created, r.name)):
            for rule in rewrite.rules:
                for model in rule.models:
                    self._exact.setdefault(model, rule)
                if not rule.models and self._generic is None:
                    self._generic = rule

    def target(self, model: str) -> str:
        """The model to ask for in the place of `model`; "" when no rule says."""
        rule = self._exact.get(model) or self._generic
        if rule is None:
            return ""
        if len(rule.targets) == 1:
            return rule.targets[0].model
        weights = [target.weight for target in rule.targets]
        if not any(weights):
            weights = [1] * len(weights)
        return self._random.choices(rule.targets, weights)[0].model
