"""How a scrape ended: what the scraper tells health."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a scrape ended."""

    GOOD = "good"
    REFUSED = "refused"
    """No connection, or it was lost before an answer."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """An HTTP status other than 200."""
    UNREADABLE = "unreadable"
    """Not HTTP, too long, or none of the known metrics on the page."""
