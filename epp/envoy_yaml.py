"""An Envoy bootstrap as YAML that a person can read: a commented head, a note at each setting that matters.

In: `EnvoyOptions`. Out: text, the same for the same options, so that shipped files can be compared byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from betterproto2 import Casing

from epp.envoy_config import bootstrap
from epp.envoy_options import (
    Endpoints,
    EndpointsFile,
    EnvoyOptions,
    FailureMode,
    HostPort,
    Mode,
    PickerAddress,
    Profile,
)

NOTES = {
    "layered_runtime": "Half-close a finished ext_proc stream; Envoy's default is a RST_STREAM for every request.",
    "early_header_mutation_extensions": "A client must not steer: removed before the picker sees the request.",
    "stream_idle_timeout": "A long prefill or an unstreamed answer is silent for minutes; Envoy's default is 5.",
    "request_body_buffer_limit": "What a retry, or a BUFFERED body, may hold; a larger BUFFERED body is answered 413.",
    "headers": "No retry of a request with trailers: Envoy would send its full-duplex body twice (envoy issue 45470).",
    "retry_policy": "Tried again only if the request has not left: one that kills a worker must not kill the next.",
    "retry_host_predicate": "A retry goes to the next endpoint of the picker's list, not to the one that failed.",
    "response_headers_to_add": "What the picker left in the metadata for the client, if it left anything.",
    "failure_mode_allow": "true: serve without the picker (fail-open); false: an error without it (fail-closed).",
    "status_on_error": "To a client, a picker that is gone is a 503, not the 500 of Envoy's default.",
    "message_timeout": "Envoy's default is 200 ms. Not enforced while a full-duplex body is held.",
    "receiving_namespaces": "Without this the picker's metadata is dropped in silence.",
    "observability_mode": "Shows the response to the picker and never waits for it.",
    "upgrade_configs": "A websocket's body has no end to wait for: it is steered by its headers.",
    "health_checks": "A picker that drains or hangs is left within seconds: the failure mode applies at once.",
    "healthy_panic_threshold": "0: never send to an unhealthy picker.",
    "circuit_breakers": "Envoy's default of 1,024 is the most requests in flight: the next one gets a 500.",
    "idle_timeout": "Below the 5 s after which uvicorn closes an idle connection: no request meets a closing one.",
    "original_dst_lb_config": "The pool is not listed: connect to the first address that the picker named.",
    "eds_cluster_config": "The pool as `kvsteer serve --envoy-endpoints` keeps it; Envoy starts only if it is there.",
    "load_balancing_policy": "The picker's ordered list, of endpoints listed here; round robin without an answer.",
}
"""Setting -> why it is there. Printed above its first appearance."""

_STATED: dict[str, dict[str, Any]] = {
    "ExternalProcessor": {"@type": "", "failure_mode_allow": False},
    "processing_mode": {
        "request_header_mode": "SEND",
        "request_body_mode": "NONE",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SEND",
        "response_body_mode": "NONE",
        "response_trailer_mode": "SKIP",
    },
    "healthy_panic_threshold": {"value": 0},
}
"""Defaults that protobuf leaves out of its JSON and a reader should see, in reading order, by message type or key."""

_INT64 = {"max_active_downstream_connections", "host_selection_retry_max_attempts"}
"""Fields that protobuf's JSON wraps in strings."""

_FLOW_WIDTH = 70
"""Longest value, in characters, that is written on one line."""


def render(options: EnvoyOptions) -> str:
    """The bootstrap for `options` as YAML."""
    message = bootstrap(options).to_dict(casing=Casing.SNAKE)
    tree = {key: message.pop(key) for key in ("admin", "layered_runtime", "overload_manager")} | message
    text = yaml.dump(_readable(tree), Dumper=_Dumper, sort_keys=False, width=1000, default_flow_style=False)
    return "\n".join([*_head(options), *_annotated(text)]) + "\n"


def command_line(options: EnvoyOptions) -> str:
    """The command that prints this bootstrap, every choice spelt out."""
    words = ["kvsteer envoy-config", f"--mode {options.mode}", f"--profile {options.profile}"]
    words.append(f"--listen {show(options.listen)}")
    words.append(f"--picker {show(options.picker)}")
    words.append(f"--admin {show(options.admin)}")
    words.append(f"--endpoints {_show_endpoints(options.endpoints)}")
    words.append(f"--failure-mode {options.failure_mode}")
    if options.decode:
        words.append("--decode-sidecar")
    if options.usage:
        words.append("--usage")
    if options.picker_tls:
        words.append("--picker-tls")
    if options.picker_ca:
        words.append(f"--picker-ca {options.picker_ca}")
    return " ".join(words)


def show(address: PickerAddress) -> str:
    """As the command line takes it: `ip:port`, `[ipv6]:port`, `unix:/path`."""
    if isinstance(address, HostPort):
        return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
    return f"unix:{address.path}"


def _show_endpoints(endpoints: Endpoints) -> str:
    if isinstance(endpoints, EndpointsFile):
        return f"file:{endpoints.path}"
    return ",".join(map(show, endpoints)) or "none"


def _head(options: EnvoyOptions) -> Iterator[str]:
    modes = {
        Mode.STANDALONE: "standalone: this Envoy is the gateway; the picker finds the workers.",
        Mode.SIDECAR: "sidecar: this Envoy and the picker share a pod or a host.",
    }
    profiles = {
        Profile.GATEWAY: "gateway: bodies go full duplex through the picker both ways, as with an InferencePool.",
        Profile.FAST: "fast: the request is buffered for the picker, the response passes it by.",
    }
    failures = {
        FailureMode.OPEN: "open: without the picker, requests go round robin to the listed endpoints.",
        FailureMode.CLOSED: "closed: without the picker, requests are answered with an error.",
    }
    if options.decode:
        yield "# Beside a decode worker: the picker below is `kvsteer sidecar --ext-proc`, as docs/sidecar.md says."
    yield "# Envoy in front of LLM workers steered by kvsteer. Every setting is explained in docs/envoy.md."
    yield "#"
    yield f"#   mode     {modes[options.mode]}"
    yield f"#   profile  {profiles[options.profile]}"
    yield f"#   failure  {failures[options.failure_mode]}"
    if options.usage:
        yield "#   usage    the response is shown to the picker by a second filter that never waits."
    if options.picker_tls and not options.picker_ca:
        yield "#   tls      the picker's certificate is not verified; --picker-ca FILE verifies it."
    yield "#"
    yield "# Printed by:"
    yield "#   " + re.sub(r" (--(?:picker|endpoints) )", r" \\\n#     \1", command_line(options))
    yield "# Check it with `envoy --mode validate -c FILE`, run it with `envoy -c FILE`."


def _readable(tree: Any, name: str = "") -> Any:
    """A copy with the stated defaults in, and with integers for the integers that JSON wraps in strings."""
    if isinstance(tree, list):
        return [_readable(item) for item in tree]
    if not isinstance(tree, dict):
        return int(tree) if name in _INT64 else tree
    stated = _STATED.get(str(tree.get("@type", name)).rpartition(".")[2], {})
    return stated | {key: _readable(value, key) for key, value in tree.items()}


def _annotated(text: str) -> Iterator[str]:
    """The lines, each noted setting with its note above where it first appears."""
    left = dict(NOTES)
    for line in text.splitlines():
        match = re.match(r"( *)(?:- )?([a-z0-9_]+):", line)
        note = left.pop(match[2], None) if match else None
        if match and note:
            yield f"{match[1]}# {note}"
        yield line


class _Dumper(yaml.SafeDumper):
    """Block style, but small values on one line unless a note would be lost inside them."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = _fits(mapping)
        return node

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = _fits(sequence)
        return node


_Dumper.add_representer(dict, _Dumper.represent_dict)


def _fits(value: Any) -> bool:
    return len(str(value)) <= _FLOW_WIDTH and not _noted(value)


def _noted(value: Any) -> bool:
    if isinstance(value, dict):
        return any(key in NOTES or (key == "@type" and len(value) > 1) or _noted(item) for key, item in value.items())
    return isinstance(value, list) and any(_noted(item) or isinstance(item, dict) for item in value)
