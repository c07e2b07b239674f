"""A hundred thousand damaged conversations: no exception, no leak, every session closed exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from epp.gateway import http2_frames as f
from epp.gateway.http2_frames import ErrorCode, Setting
from epp.gateway.http2_limits import Limits
from tests.gateway.wire import GREETING, Peer, data, fields, headers, message, rst

INPUTS = 100_000
SHARDS = 4
LIMITS = Limits(streams=4, stream_backlog=200, connection_backlog=400, backlog_ceiling=2_000, partial_ceiling=2_000)

INDEXED = b"\x40" + f.literal(b"content-type", b"application/grpc")[1:]
SEEDS: list[list[bytes]] = [
    [GREETING, headers(1), data(1, message(b"one")), data(1, message(b"two"), end=True)],
    [GREETING, headers(1, fields()[:20], 1), f.frame(f.CONTINUATION, 4, 1, fields()[20:]), headers(3), rst(3)],
    [GREETING, f.settings({Setting.INITIAL_WINDOW_SIZE: 7}), headers(1), data(1, message(b"x" * 60)),
     f.window_update(1, 9), f.settings({Setting.INITIAL_WINDOW_SIZE: 3}), f.window_update(1, 70)],
    [GREETING, headers(1), data(1, message(b"!finish")), data(1, b"late"), headers(1, b"", 5), headers(3),
     data(3, message(b"!stay"), end=True), f.window_update(3, 5)],
    [GREETING, headers(1, fields(content_type=None) + INDEXED, 5), headers(3, fields(content_type=None) + b"\xbe"),
     f.frame(f.DATA, f.PADDED, 3, b"\x02" + message(b"pad") + b"\0\0"), f.frame(f.PRIORITY, 0, 3, bytes(5))],
    [GREETING, headers(1), data(1, message(b"!raise")), headers(3, fields(grpc_timeout="1S")),
     f.frame(f.PING, 0, 0, bytes(8)), f.goaway(0, ErrorCode.NO_ERROR), data(3, message(b"x" * 90)[:50])],
]  # fmt: skip


def mutate(rng: random.Random, pieces: list[bytes]) -> bytes:
    """One to three damages: frames dropped, doubled, swapped or borrowed; bytes flipped, cut or inserted."""
    pieces = list(pieces)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(pieces))
        match rng.randrange(8):
            case 0 if len(pieces) > 1:
                del pieces[at]
            case 1:
                pieces.insert(at, pieces[rng.randrange(len(pieces))])
            case 2:
                other = rng.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 3:
                pieces.insert(at, rng.choice(rng.choice(SEEDS)))
            case 4:
                pieces[at] = pieces[at][: rng.randrange(len(pieces[at]) + 1)]
            case 5:
                cut = rng.randrange(len(pieces[at]) + 1)
                pieces[at] = pieces[at][:cut] + rng.randbytes(rng.randint(1, 9)) + pieces[at][cut:]
            case _ if pieces[at]:
                damaged = bytearray(pieces[at])
                # Headers of frames are where damage means something.
                damaged[rng.randrange(min(len(damaged), rng.choice((9, 40, 1 << 30))))] = rng.randrange(256)
                pieces[at] = bytes(damaged)
    return b"".join(pieces)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_damaged_input_ends_cleanly_and_leaks_nothing(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.gateway.grpc.log.exception", lambda *_: None)  # sessions are asked to fail here
    rng = random.Random(shard)
    errors = sessions = 0
    for _ in range(INPUTS // SHARDS):
        sent = mutate(rng, rng.choice(SEEDS))
        cut = rng.randrange(len(sent) + 1)
        peer = Peer(LIMITS, greet=False)
        steps: list[Callable[[], object]] = [
            lambda peer=peer, part=sent[:cut]: peer.send(part),  # type: ignore[misc]
            lambda peer=peer: peer.connection.tick(1.0),  # type: ignore[misc]
            lambda peer=peer, part=sent[cut:]: peer.send(part),  # type: ignore[misc]
        ]
        for step in steps:
            step()
            assert len(peer.connection.take()) < 10_000
        connection = peer.connection
        assert len(connection.streams) <= LIMITS.streams
        assert peer.counters.streams_open == len(connection.streams)
        assert connection.backlog <= LIMITS.backlog_ceiling
        assert connection.partial_bytes <= LIMITS.partial_ceiling + 200
        errors += sum(peer.counters.connection_errors.values())
        connection.shut()
        sessions += len(peer.ledger.sessions)
        assert all(count == 1 for count in peer.ledger.closings)
        assert (connection.backlog, connection.partial_bytes, peer.counters.streams_open) == (0, 0, 0)
        assert not connection._backlogged
        assert not connection._starved
    assert errors > 5_000  # the damage did reach the protocol ...
    assert sessions > 10_000  # ... and not only its first bytes
