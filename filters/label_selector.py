"""`label-selector-filter`: endpoints by a Kubernetes label selector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from filters.labels import LabelFilter


@dataclass(frozen=True, slots=True)
class Requirement:
    """One expression: `{key: zone, operator: In, values: [a, b]}`."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise ValueError(f"operator {self.operator} takes {'no ' if self.values else ''}values")

    def holds(self, labels: Mapping[str, str]) -> bool:
        """As Kubernetes has it: `NotIn` holds for a label that is absent."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class LabelSelector:
    match_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that must be present with these values."""
    match_expressions: tuple[Requirement, ...] = ()
    """Expressions that must all hold."""


class LabelSelectorFilter(LabelFilter[LabelSelector]):
    """Keeps endpoints that a Kubernetes label selector matches; an empty selector keeps all."""

    type = "label-selector-filter"
    aliases = ("by-label-selector",)
    Parameters = LabelSelector

    def matches(self, labels: Mapping[str, str]) -> bool:
        wanted = self.parameters
        return all(labels.get(key) == value for key, value in wanted.match_labels.items()) and all(
            requirement.holds(labels) for requirement in wanted.match_expressions
        )
