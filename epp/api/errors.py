"""BadRequest: what is wrong with a request, and where; the gateway answers it with status 400."""

from __future__ import annotations


class BadRequest(ValueError):
    """A request that cannot be read.

    `path` names the place inside the body (`messages[3].content`; empty: the body as a whole), `reason` says what is
    wrong in a sentence fragment. Neither repeats anything of the body but names of this project's own choosing.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else f"request body {reason}")
        self.path = path
        self.reason = reason
