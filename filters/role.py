"""`prefill-filter`, `decode-filter`, `encode-filter`: endpoints by the stage of a request they serve.

The role is the label `llm-d.ai/role`, with the values of llm-d: single stages, joined ones (`prefill-decode`), and the
older `both` for `prefill-decode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from epp.plugin import ROLE_LABEL, NoParameters
from filters.labels import LabelFilter


class RoleFilter(LabelFilter[NoParameters]):
    """What the three filters share."""

    stage: ClassVar[str]
    without_role: ClassVar[bool] = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        role = labels.get(ROLE_LABEL)
        if role is None:
            return self.without_role
        known = ("prefill", "decode", "encode", "encode-prefill", "prefill-decode", "encode-prefill-decode")
        role = "prefill-decode" if role == "both" else role
        return role in known and self.stage in role.split("-")


class PrefillFilter(RoleFilter):
    """Keeps endpoints that prefill: roles prefill, encode-prefill, prefill-decode (or both), encode-prefill-decode."""

    type = "prefill-filter"
    stage = "prefill"


class DecodeFilter(RoleFilter):
    """Keeps endpoints that decode: roles decode, prefill-decode (or both), encode-prefill-decode, or none."""

    type = "decode-filter"
    stage = "decode"
    without_role = True


class EncodeFilter(RoleFilter):
    """Keeps endpoints that encode media: roles encode, encode-prefill, encode-prefill-decode."""

    type = "encode-filter"
    stage = "encode"
