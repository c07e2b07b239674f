"""KV events are decoded in every layout workers have used, and one that is broken costs only itself."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache.events.decoder import (
    END_OF_REPLAY,
    Cleared,
    MalformedMessage,
    Removed,
    Stored,
    decode_batch,
    read_message,
)
from epp.kvcache.tier import Tier

DATA = Path(__file__).parents[2] / "data" / "kv_events"
CAPTURES = sorted(p for p in DATA.glob("*.jsonl") if not p.name.endswith(".replay.jsonl"))
PAYLOADS = sorted(DATA.glob("*.msgpack"))
encode = msgspec.msgpack.encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "medium": "GPU",
}


def batch(*events: Any) -> bytes:
    return encode([1.5, list(events), 0])


def only(payload: bytes) -> Any:
    (event,) = decode_batch(payload).events
    return event


def number(value: Any) -> int:
    return int.from_bytes(bytes.fromhex(value["__bytes__"])[-8:], "big") if isinstance(value, dict) else int(value)


def check(event: Any, told: dict[str, Any]) -> None:
    """The decoded event says what the capture's own decoding says."""
    match event:
        case Stored():
            assert told["type"] == "BlockStored"
            assert event.hashes.tolist() == [number(h) for h in told["block_hashes"]]
            assert event.parent == (None if told["parent_block_hash"] is None else number(told["parent_block_hash"]))
            assert event.ids.tolist() == told["token_ids"]
            assert (event.block_size, event.adapter) == (told["block_size"], told.get("lora_name") or "")
            assert (event.tier, event.group) == (Tier.of(told.get("medium") or ""), told.get("group_idx") or 0)
            extras = told.get("extra_keys")
            wanted = [[x for x in e or [] if x != event.adapter] for e in extras or []]
            assert [list(e) for e in event.extras] == (wanted if any(wanted) else [])
        case Removed():
            assert told["type"] == "BlockRemoved"
            assert event.hashes.tolist() == [number(h) for h in told["block_hashes"]]
            assert event.tier == Tier.of(told.get("medium") or "")
        case _:
            assert isinstance(event, Cleared)
            assert told["type"] == "AllBlocksCleared"


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda p: p.stem)
def test_every_captured_message_says_what_its_capture_says(capture: Path) -> None:
    lines = [json.loads(line) for line in capture.read_text().splitlines()]
    assert lines
    for line in lines:
        message = read_message([bytes.fromhex(f) for f in line["frames"]])
        assert (message.topic, message.seq) == (line["topic"], line["seq"])
        decoded = decode_batch(message.payload)
        ts, events, rank = line["batch"]
        assert (decoded.ts, decoded.rank, decoded.skipped) == (ts, rank, Counter())
        for event, told in zip(decoded.events, events, strict=True):
            check(event, told)


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda p: p.stem)
def test_every_captured_payload_says_what_its_capture_says(path: Path) -> None:
    decoded = decode_batch(path.read_bytes())
    for event, told in zip(decoded.events, json.loads(path.with_suffix(".json").read_text())["batch"][1], strict=True):
        check(event, told)


@pytest.mark.parametrize("name", ["sha256_cbor_int", "sha256_cbor_bytes"])
def test_a_replay_carries_the_live_payloads_and_an_end(name: str) -> None:
    live = [json.loads(line)["frames"][2] for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    replay = [json.loads(line) for line in (DATA / f"{name}.replay.jsonl").read_text().splitlines()]
    messages = [read_message([bytes.fromhex(f) for f in frames]) for frames in replay]
    assert [m.seq for m in messages] == [*range(messages[0].seq, messages[0].seq + len(messages) - 1), END_OF_REPLAY]
    assert [m.payload.hex() for m in messages[:-1]] == live[messages[0].seq :][: len(messages) - 1]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b"kv@a", (7).to_bytes(8, "big"), b"p"], ("kv@a", 7)),
        ([b"", (7).to_bytes(8, "big"), b"p"], ("", 7)),
        ([b"", b"kv@a", (7).to_bytes(8, "big"), b"p"], ("kv@a", 7)),
        ([(7).to_bytes(8, "big"), b"p"], ("", 7)),
        ([b"", b"", b"\xff" * 8, b""], ("", END_OF_REPLAY)),
        ([b"", b"\xff" * 8, b""], ("", END_OF_REPLAY)),
    ],
)
def test_messages_of_two_to_four_frames_are_read(frames: list[bytes], expected: tuple[str, int]) -> None:
    message = read_message(frames)
    assert (message.topic, message.seq) == expected


@pytest.mark.parametrize(
    "frames", [[], [b"x"], [b"a", b"short", b"p"], [b"a", b"b", b"c", b"d", b"e"], [b"", b"", b""]]
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        read_message(frames)


@pytest.mark.parametrize("fields", range(5, 13))
def test_positional_events_may_leave_out_trailing_fields(fields: int) -> None:
    whole = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, 1, "CPU", "ad", [["ad"], ["img", "ad"]], 3, "mamba", 64]
    event = only(batch(whole[:fields]))
    assert (event.hashes.tolist(), event.parent, event.ids.tolist(), event.block_size) == (
        [11, 12],
        10,
        [1, 2, 3, 4],
        2,
    )
    assert event.tier is (Tier.CPU if fields > 6 else Tier.GPU)
    assert event.adapter == ("ad" if fields > 7 else "")
    assert event.extras == (((), ("img",)) if fields > 8 else ())
    assert event.group == (3 if fields > 9 else 0)
    assert (event.kind, event.window) == ("mamba" if fields > 10 else "", 64 if fields > 11 else 0)


def test_fields_beyond_the_known_are_ignored() -> None:
    later = {**STORED, "locality": "local", "ownership": 3, "session_id": "s", "new": {"a": [1]}}
    array = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, "full_attention", None, 9, "x"]
    for event in (only(batch(later)), only(batch(array))):
        assert event.hashes.tolist() == [11, 12]


def test_a_batch_may_be_a_map_and_lack_its_rank() -> None:
    assert decode_batch(encode({"ts": 1.0, "events": [STORED], "later": 1})).rank is None
    assert decode_batch(encode([1.0, [STORED]])).rank is None
    assert decode_batch(encode([1.0, [STORED], 3])).rank == 3


@pytest.mark.parametrize(
    ("hash_", "folded"),
    [
        (5, 5),
        (-1, (1 << 64) - 1),
        ((1 << 64) - 2, (1 << 64) - 2),
        (bytes(range(32)), int.from_bytes(bytes(range(24, 32)), "big")),
        (b"\x01\x02", 0x0102),
        (b"", 0),
    ],
)
def test_hashes_are_signed_or_unsigned_integers_or_bytes(hash_: Any, folded: int) -> None:
    event = only(batch({**STORED, "block_hashes": [hash_, 1], "parent_block_hash": hash_}))
    assert (event.hashes.tolist(), event.parent) == ([folded, 1], folded)


def test_an_unknown_or_broken_event_costs_only_itself() -> None:
    decoded = decode_batch(
        batch(
            {"type": "BlockDreamt"},
            ["BlockWished", 1],
            {"type": "BlockStored", "block_hashes": "no"},
            [7],
            {"no": "type"},
            "text",
            {**STORED, "token_ids": [1, 2, 3]},
            {**STORED, "token_ids": [-1, 2, 3, 4]},
            STORED,
        )
    )
    assert len(decoded.events) == 1
    assert decoded.skipped == {"unknown": 2, "malformed": 5, "sparse": 1}


def test_hashes_without_tokens_are_an_announcement_by_hash_alone() -> None:
    event = only(batch({"type": "BlockStored", "block_hashes": [1, 2], "block_size": 0, "medium": "CPU"}))
    assert (event.tier, len(event.ids), event.parent) == (Tier.CPU, 0, None)


def test_a_salt_named_like_the_adapter_stays() -> None:
    event = only(batch({**STORED, "lora_name": "a1", "extra_keys": [["a1", "a1"], ["a1"]]}))
    assert event.extras == (("a1",), ())


def test_sglangs_metadata_in_the_adapters_place_is_no_adapter() -> None:
    assert only(batch(["BlockStored", [11], None, [1, 2], 2, None, "GPU", {"cache_salt": "s"}])).adapter == ""


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except MalformedMessage:
        pass


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.text(max_size=8)
        | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(list(STORED)), inner, max_size=6),
        max_leaves=30,
    ),
    st.sampled_from(list(STORED)),
)
def test_a_field_of_any_type_never_raises(value: Any, name: str) -> None:
    decoded = decode_batch(batch({**STORED, name: value}, STORED))
    assert decoded.events
    assert all(
        e.ids.dtype == np.uint32 and e.hashes.dtype == np.uint64 for e in decoded.events if isinstance(e, Stored)
    )
