"""What passes between the stream that answers a request and the stream that only shows its response."""

from __future__ import annotations

from epp.gateway.ext_proc import BodyMode, ExtProcStream, RequestReady, ResponseData, ResponseDone, Steering
from epp.gateway.pb import ext_proc_pb2 as pb
from tests.gateway.ext_proc_peer import CHAT, OK, Peer

HERE = "10.0.0.1:8000"


def told(steering: Steering, mode: BodyMode, response_mode: BodyMode) -> dict[str, str]:
    """What Envoy gets to know in the namespace `envoy.lb`."""
    envoy = Peer(ExtProcStream(), mode, response_mode, decide=lambda _: steering)
    envoy.request(CHAT, [b"{}"])
    (metadata,) = [reply.dynamic_metadata for reply in envoy.replies if reply.HasField("dynamic_metadata")]
    fields = metadata.fields["envoy.lb"].struct_value.fields
    return {key: value.string_value for key, value in fields.items()}


def test_response_headers_are_told_as_metadata_where_the_response_may_not_be_shown() -> None:
    for headers in ({}, {"x-added": "é"}):
        steering = Steering((HERE,), set_headers=headers, response_headers={"x-session-token": "dG9rZW4="})
        assert told(steering, BodyMode.BUFFERED, BodyMode.NONE) == {
            "x-gateway-destination-endpoint": HERE,
            "x-session-token": "dG9rZW4=",
        }


def test_response_headers_are_no_metadata_where_the_response_is_shown() -> None:
    steering = Steering((HERE,), response_headers={"x-session-token": "dG9rZW4="})
    assert told(steering, BodyMode.FULL_DUPLEX, BodyMode.FULL_DUPLEX) == {"x-gateway-destination-endpoint": HERE}


def test_metadata_cannot_name_another_destination_than_the_header() -> None:
    steering = Steering((HERE,), response_headers={"x-gateway-destination-endpoint": "10.0.0.9:22"})
    assert told(steering, BodyMode.BUFFERED, BodyMode.NONE) == {"x-gateway-destination-endpoint": HERE}


def test_a_flight_told_on_one_stream_comes_back_on_the_stream_that_shows_it() -> None:
    metadata = told(Steering((HERE,), flight="17"), BodyMode.BUFFERED, BodyMode.NONE)
    context = pb.Metadata()
    context.filter_metadata["envoy.lb"].update(metadata)
    envoy = Peer(ExtProcStream(), BodyMode.NONE, BodyMode.STREAMED, observability=True, metadata_context=context)
    envoy.config = None  # Envoy names no modes on such a stream
    envoy.request(CHAT)
    envoy.response(OK, [b"ab"])
    (ready,) = [event for event in envoy.events if isinstance(event, RequestReady)]
    assert (ready.observing, ready.flight) == (True, "17")
    assert envoy.events[0] is ready
    assert b"".join(event.data for event in envoy.events if isinstance(event, ResponseData)) == b"ab"
    assert envoy.events[-1] == ResponseDone(complete=True)
    assert envoy.replies == []
