"""Profile handlers: which profiles run for a request, and whose endpoint is the destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epp.plugin import Endpoint, InferenceRequest, NoParameters, ProfileHandler


class SingleProfileHandler(ProfileHandler[NoParameters]):
    """Runs the one profile there is; its endpoint is the destination."""

    type = "single-profile-handler"

    def next_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, Sequence[Endpoint] | None],
    ) -> Sequence[str]:
        return () if results else profiles

    def primary(self, results: Mapping[str, Sequence[Endpoint] | None]) -> str | None:
        return next((name for name, endpoints in results.items() if endpoints), None)
