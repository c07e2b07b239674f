"""proto/ext_proc.proto against Envoy's full definitions, as the `envoy-data-plane` package carries them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filters
from envoy_data_plane.envoy.service.ext_proc import v3 as service
from envoy_data_plane.envoy.type import v3 as types
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from epp.gateway.pb import ext_proc_pb2 as pb

FULL = {name: value for module in (types, core, filters, service) for name, value in vars(module).items()}

SCALARS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_MESSAGE: "message",
    FieldDescriptor.TYPE_ENUM: "enum",
}


def messages() -> list[Descriptor]:
    return list(pb.DESCRIPTOR.message_types_by_name.values())


def enums() -> list[EnumDescriptor]:
    nested = [enum for message in messages() for enum in message.enum_types]
    return nested + list(pb.DESCRIPTOR.enum_types_by_name.values())


def flat_name(descriptor: Any) -> str:
    """The name of a nested type as the dataclasses have it."""
    return f"{descriptor.containing_type.name if descriptor.containing_type else ''}{descriptor.name}"


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.name)
def test_every_field_has_the_number_and_type_of_the_full_definition(message: Descriptor) -> None:
    full = {field.name: field for field in dataclasses.fields(FULL[message.name])}
    for field in message.fields:
        theirs = full[field.name].metadata["betterproto"]
        assert theirs.number == field.number, field.full_name
        assert theirs.proto_type == ("map" if is_map(field) else SCALARS[field.type]), field.full_name
        assert theirs.group == (field.containing_oneof.name if field.containing_oneof else None), field.full_name
        assert theirs.repeated == (field.is_repeated and not is_map(field)), field.full_name
        kind = field.message_type or field.enum_type
        if is_map(field):
            assert [entry.proto_type for entry in theirs.map_meta] == ["string", "message"]
        elif kind is not None:
            # the annotation is "Name", "package.Name", "... | None" or "list[...]"
            annotation = str(full[field.name].type).removesuffix(" | None").removeprefix("list[").removesuffix("]")
            assert annotation.rpartition(".")[2] == flat_name(kind), field.full_name


@pytest.mark.parametrize("enum", enums(), ids=lambda enum: flat_name(enum))
def test_every_enum_value_has_the_number_of_the_full_definition(enum: EnumDescriptor) -> None:
    full = {member.name.replace("_", "").lower(): int(member) for member in FULL[flat_name(enum)]}
    for value in enum.values:
        assert full[value.name.replace("_", "").lower()] == value.number, value.name


def test_the_messages_hold_no_type_that_the_rpc_does_not_reach() -> None:
    reached: set[str] = set()
    waiting = [pb.ProcessingRequest.DESCRIPTOR, pb.ProcessingResponse.DESCRIPTOR]
    while waiting:
        message = waiting.pop()
        if message.name not in reached:
            reached.add(message.name)
            waiting += [field.message_type for field in message.fields if field.message_type is not None]
    assert {message.name for message in messages()} <= reached
