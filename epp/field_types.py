"""What configuration files of llm-d's router may name and this picker treats in its own way.

Tables only: sections and plugin types that are built in here under another form (a warning says so), and those this
picker does not have (an error says so by name). A type that the registry knows is never looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Reference:
    plugin_ref: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    plugin_ref: str
    extractors: tuple[Reference, ...] = ()


@dataclass(frozen=True, slots=True)
class DataLayer:
    inject_defaults: bool = True
    sources: tuple[Source, ...] = ()
    discovery: Reference | None = None


FeatureGate = Literal["flowControl", "dataLayer", "enableLegacyMetrics", "prepareDataPlugins"]

SECTIONS: Mapping[str, tuple[Any, str]] = {
    "featureGates": (tuple[FeatureGate, ...], "nothing here is behind a gate"),
    "dataLayer": (DataLayer, "workers are scraped by kvsteer itself; see --scrape-interval"),
    "saturationDetector": (Reference, "requests are not refused for saturation"),
    "parser": (Reference, "the parser follows from the request's path"),
    "flowControl": (None, "requests are not queued here: remove the section, or limit load in the gateway"),
}
"""Section -> (its shape, or None when we lack it; what to know)."""

_SCRAPED = "kvsteer scrapes its endpoints by itself"
_PARSED = "kvsteer knows the API from the request's path"
_COUNTED = "kvsteer always counts the requests and tokens it has in flight"

BUILT_IN: Mapping[str, str] = {
    "metrics-data-source": _SCRAPED,
    "core-metrics-extractor": _SCRAPED,
    "model-server-protocol-metrics": _SCRAPED,
    "models-data-source": _SCRAPED,
    "models-data-extractor": _SCRAPED,
    "k8s-notification-source": "kvsteer watches the cluster by itself",
    "endpoint-notification-source": "plugins are always told of endpoints that come and go",
    "inflight-load-producer": _COUNTED,
    "openai-parser": _PARSED,
    "vllmgrpc-parser": _PARSED,
    "passthrough-parser": _PARSED,
    "disagg-headers-handler": "disagg-profile-handler sets the headers",
    "prefill-header-handler": "disagg-profile-handler sets the headers",
    "utilization-detector": "requests are not refused for saturation",
    "concurrency-detector": "requests are not refused for saturation",
}
"""Plugin type -> why it may be named and does nothing."""

_FLOW = "requests are not queued here"
_SLO = "latency is estimated by expected-ttft-scorer; there is no trained predictor"

ABSENT: Mapping[str, str] = {
    "data-parallel-profile-handler": "every port of a host is an endpoint of its own here, so ranks need no handler",
    "latency-scorer": _SLO,
    "slo-headroom-tier-filter": _SLO,
    "predicted-latency-producer": _SLO,
    "latency-slo-admitter": _SLO,
    "probabilistic-admitter": "requests are not refused for saturation",
    "request-attribute-reporter": "usage is in the metrics and the decision log",
    "destination-endpoint-served-verifier": "the endpoint that served is in the decision log",
    "vertexai-parser": "the Vertex AI API is not read",
    "global-strict-fairness-policy": _FLOW,
    "round-robin-fairness-policy": _FLOW,
    "fcfs-ordering-policy": _FLOW,
    "edf-ordering-policy": _FLOW,
    "slo-deadline-ordering-policy": _FLOW,
    "static-usage-limit-policy": _FLOW,
    "priority-then-time-eviction-order-policy": _FLOW,
    "sheddable-eviction-filter": _FLOW,
}
"""Plugin type of llm-d that this picker does not have -> what to know."""
