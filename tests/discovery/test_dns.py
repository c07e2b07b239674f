"""Endpoints from DNS, asked of a name server of our own on loopback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from epp.discovery.dns import DnsDiscovery, DnsTarget, parse_dns
from epp.discovery.membership import Membership
from epp.endpoint import Pool


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`, (name, type) -> texts; `fail` is a response code, or None for silence."""

    transport: asyncio.DatagramTransport

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl = 0
        self.rcode: dns.rcode.Rcode | None = dns.rcode.NOERROR
        self.failing: tuple[str, ...] = ("A", "AAAA", "SRV")
        self.asked: list[str] = []

    def datagram_received(self, data: bytes, address: tuple[str | object, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(kind)
        response = dns.message.make_response(query)
        if self.rcode != dns.rcode.NOERROR and kind in self.failing:
            if self.rcode is None:
                return
            response.set_rcode(self.rcode)
        elif texts := self.records.get((name, kind)):
            response.answer.append(dns.rrset.from_text_list(question.name, self.ttl, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(response.to_wire(), address)


@asynccontextmanager
async def resolving(
    server: NameServer, target: str, min_ttl_s: float = 0.01, max_ttl_s: float = 60.0
) -> AsyncIterator[tuple[Pool, DnsDiscovery]]:
    server.transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: server, local_addr=("127.0.0.1", 0)
    )
    port = server.transport.get_extra_info("sockname")[1]
    source = DnsDiscovery(
        target, nameserver=f"127.0.0.1:{port}", min_ttl_s=min_ttl_s, max_ttl_s=max_ttl_s, timeout_s=0.3
    )
    pool = Pool()
    members = Membership(pool, clock=lambda: 100.0)
    await members.start([source])
    try:
        yield pool, source
    finally:
        await members.stop()
        server.transport.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def addresses(pool: Pool) -> list[str]:
    return sorted(endpoint.address for endpoint in pool.endpoints)


def test_a_target_is_a_name_with_ports_or_an_srv_name() -> None:
    assert parse_dns("w.example:8000-8001=zone=a") == DnsTarget("w.example", (8000, 8001), {"zone": "a"})
    assert parse_dns("_http._tcp.w.example") == DnsTarget("_http._tcp.w.example")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("w.example", "write HOST:PORT"),
        ("w.example:x", "'x' is not a port"),
        ("w..example:1", "not a DNS name"),
        ("w" * 64 + ":1", "not a DNS name"),
        ("_http._tcp.w.example:80", "SRV records bring their ports"),
        ("w.example:1=name=x", "have their address for a name"),
        ("w.example:1=role=x", "the role 'x' is none of"),
    ],
)
def test_a_target_that_cannot_be_read_says_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="DNS target ") as error:
        parse_dns(text)
    assert reason in str(error.value)


async def test_every_address_of_a_name_with_every_port_is_an_endpoint() -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.2", "127.0.0.1"], ("w.example", "AAAA"): ["fd00::1"]}
    async with resolving(server, "w.example:8000-8001=role=decode") as (pool, source):
        await until(lambda: source.synced)
        assert addresses(pool) == [
            "127.0.0.1:8000",
            "127.0.0.1:8001",
            "127.0.0.2:8000",
            "127.0.0.2:8001",
            "[fd00::1]:8000",
            "[fd00::1]:8001",
        ]
        endpoint = pool.by_key["127.0.0.1:8001"]
        assert (endpoint.rank, endpoint.labels) == (1, {"llm-d.ai/role": "decode"})


async def test_ranks_behind_a_port_are_endpoints() -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.1"]}
    async with resolving(server, "w.example:8000=dp=2") as (pool, source):
        await until(lambda: source.synced)
        assert sorted(pool.by_key) == ["127.0.0.1:8000@0", "127.0.0.1:8000@1"]


async def test_srv_records_bring_their_ports() -> None:
    server = NameServer()
    server.records = {
        ("_http._tcp.w.example", "SRV"): ["0 5 8001 a.example.", "0 5 8000 a.example.", "1 0 9000 b.example."],
        ("a.example", "A"): ["127.0.0.1"],
        ("b.example", "AAAA"): ["fd00::2"],
    }
    async with resolving(server, "_http._tcp.w.example") as (pool, source):
        await until(lambda: source.synced)
        assert {e.address: e.rank for e in pool.endpoints} == {
            "127.0.0.1:8000": 0,
            "127.0.0.1:8001": 1,
            "[fd00::2]:9000": 0,
        }
        server.records["_http._tcp.w.example", "SRV"] = ["0 0 0 ."]
        await until(lambda: len(pool) == 0)


async def test_a_changed_answer_changes_the_pool_and_keeps_what_stayed() -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.1", "127.0.0.2"]}
    async with resolving(server, "w.example:8000") as (pool, source):
        await until(lambda: source.synced)
        stayed = pool.by_key["127.0.0.2:8000"]
        server.records["w.example", "A"] = ["127.0.0.2", "127.0.0.3"]
        await until(lambda: "127.0.0.3:8000" in pool.by_key)
        assert addresses(pool) == ["127.0.0.2:8000", "127.0.0.3:8000"]
        assert pool.by_key["127.0.0.2:8000"] is stayed


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, None])
async def test_a_resolver_that_fails_keeps_the_last_answer_and_says_so(
    rcode: dns.rcode.Rcode | None, caplog: pytest.LogCaptureFixture
) -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.1"]}
    async with resolving(server, "w.example:8000") as (pool, source):
        await until(lambda: source.synced)
        with caplog.at_level(logging.WARNING):
            server.rcode = rcode
            await until(lambda: source.counters["dns_failures"] >= 2)
        assert addresses(pool) == ["127.0.0.1:8000"]
        assert caplog.text.count("cannot be resolved, the endpoints known before stay") == 1
        server.rcode = dns.rcode.NOERROR
        server.records["w.example", "A"] = ["127.0.0.2"]
        await until(lambda: addresses(pool) == ["127.0.0.2:8000"])


async def test_before_the_first_answer_it_is_not_synced() -> None:
    server = NameServer()
    server.rcode = dns.rcode.SERVFAIL
    async with resolving(server, "w.example:8000") as (_, source):
        await until(lambda: source.counters["dns_failures"] >= 1)
        assert not source.synced


async def test_a_server_that_fails_for_ipv6_alone_does_not_hide_ipv4() -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.1"], ("w.example", "AAAA"): ["fd00::1"]}
    async with resolving(server, "w.example:8000") as (pool, source):
        await until(lambda: source.synced)
        server.rcode, server.failing = dns.rcode.SERVFAIL, ("AAAA",)
        server.records["w.example", "A"] = ["127.0.0.2"]
        await until(lambda: addresses(pool) == ["127.0.0.2:8000", "[fd00::1]:8000"])


async def test_a_name_that_is_no_more_empties_the_pool() -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.1"]}
    async with resolving(server, "w.example:8000") as (pool, source):
        await until(lambda: source.synced)
        server.records = {}
        await until(lambda: len(pool) == 0)
        assert source.counters["dns_failures"] == 0


async def test_the_ttl_of_an_answer_is_kept_within_the_bounds() -> None:
    server = NameServer()
    server.records = {("w.example", "A"): ["127.0.0.1"]}
    server.ttl = 3600
    async with resolving(server, "w.example:8000", max_ttl_s=60.0) as (_, source):
        await until(lambda: source.synced)
        await asyncio.sleep(0.1)
        assert server.asked.count("A") == 1
    capped = NameServer()
    capped.records, capped.ttl = server.records, 3600
    async with resolving(capped, "w.example:8000", max_ttl_s=0.01):
        await until(lambda: capped.asked.count("A") >= 3)
