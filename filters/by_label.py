"""`by-label`: endpoints by the value of one label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from filters.labels import LabelFilter


@dataclass(frozen=True, slots=True)
class ByLabelParameters:
    label: str
    """Name of the label."""
    valid_values: tuple[str, ...] = ()
    """Values that stay."""
    allows_no_label: bool = False
    """Whether endpoints without the label stay."""

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError("label must not be empty")
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("validValues is empty and allowsNoLabel is false: nothing could ever stay")


class ByLabel(LabelFilter[ByLabelParameters]):
    """Keeps endpoints whose label has one of the given values, or lacks the label when that is allowed."""

    type = "by-label"
    Parameters = ByLabelParameters

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.parameters.label)
        return self.parameters.allows_no_label if value is None else value in self.parameters.valid_values
