"""Tiers: where a block lies at its holder."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """From fast to slow; the value is the row in arrays by tier."""

    GPU = 0
    CPU = 1
    DISK = 2
    PEER = 3

    @classmethod
    def of(cls, medium: str) -> Tier:
        """The tier an event's `medium` names; "" is the device. Whatever is none of the known is storage."""
        return _MEDIA.get(medium.upper(), cls.DISK)


_MEDIA = {"": Tier.GPU, "GPU": Tier.GPU, "DEVICE": Tier.GPU, "CPU": Tier.CPU, "HOST": Tier.CPU, "PEER": Tier.PEER}
