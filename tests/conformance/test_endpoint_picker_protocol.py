"""Each MUST of the endpoint-picker protocol of the Gateway API Inference Extension, driven from outside.

The text is `docs/proposals/004-endpoint-picker-protocol` (v1.0.0). `kvsteer serve` runs as a process; the client is
plain grpcio that plays a gateway. What a gateway must do (follow the pick, tell who served, fail open or closed) is
shown with the shipped Envoy configuration in `tests/e2e` (`test_steering`, `test_envoy_settings`, `test_outages`,
`test_fallbacks`); what follows is the picker's side alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.conformance.protocol import DESTINATION, POST, PROMPT, SUBSET, Gateway, gateway, subset
from tests.e2e.backend import Worker, running_worker
from tests.e2e.serving import Picker, running_picker, write_endpoints
from tests.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

SELECTION = "test-epp-endpoint-selection"
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: random-picker
  parameters: {maxNumOfEndpoints: 3}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: random-picker
"""
STEERED = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: header-based-testing-filter
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 3}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: header-based-testing-filter
  - pluginRef: max-score-picker
"""
NOBODY = "10.255.255.1:8000"
"""An address that is in no pool here."""


class Side:
    """A picker, the gateway that asks it, and the pool."""

    def __init__(self, gateway: Gateway, picker: Picker, workers: list[Worker]) -> None:
        self.gateway = gateway
        self.picker = picker
        self.pool = [w.address for w in workers]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def side(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Side]:
    """Four workers and a picker that names three of them at random."""
    async with running_worker("a") as a, running_worker("b") as b, running_worker("c") as c, running_worker("d") as d:
        workers = [a, b, c, d]
        listen = f"127.0.0.1:{free_port()}"
        told = [f"--endpoint={w.address}" for w in workers]
        directory = tmp_path_factory.mktemp("picker")
        async with (
            running_picker(directory, listen, *told, "--config-text", CONFIG) as picker,
            gateway(listen) as asking,
        ):
            yield Side(asking, picker, workers)


async def test_the_pick_is_in_the_header_and_in_the_metadata_and_they_are_equal(side: Side) -> None:
    for chunks in (None, (PROMPT,), (PROMPT[:9], PROMPT[9:]), (b"",)):
        fields: Any = POST if chunks is not None and chunks != (b"",) else ((":method", b"GET"), (":path", b"/health"))
        told = await side.gateway.ask(chunks, fields=fields)
        assert told.status == 0
        assert told.header == told.dynamic
        assert set(told.header) <= set(side.pool)


async def test_the_list_is_in_order_without_repetition_and_of_one_pool(side: Side) -> None:
    for _ in range(20):
        told = await side.gateway.ask()
        assert len(told.header) == len(set(told.header)) == 3
        assert set(told.header) <= set(side.pool)


async def test_without_a_hint_the_whole_pool_is_in_question(side: Side) -> None:
    picked = {(await side.gateway.ask()).header[0] for _ in range(60)}
    assert picked == set(side.pool)


@pytest.mark.parametrize("form", ["list", "spaces", "string", "with strangers", "one"])
async def test_with_a_hint_every_endpoint_named_is_inside_it(side: Side, form: str) -> None:
    inside = side.pool[1:3]
    hint: Any = {
        "list": inside,
        "spaces": [f" {address} " for address in inside],
        "string": ",".join(inside),
        "with strangers": [NOBODY, *inside],
        "one": inside[:1],
    }[form]
    for _ in range(20):
        told = await side.gateway.ask(metadata=subset(hint))
        assert set(told.header) <= set(inside)
        assert told.header == told.dynamic


@pytest.mark.parametrize("hint", [[], [NOBODY], "", [""]])
async def test_a_hint_that_leaves_nobody_is_503(side: Side, hint: Any) -> None:
    told = await side.gateway.ask(metadata=subset(hint))
    assert told.status == 503
    assert DESTINATION not in told.headers


async def test_metadata_of_other_names_is_no_hint(side: Side) -> None:
    metadata = subset([NOBODY])
    metadata.filter_metadata["envoy.lb"].update({SUBSET: [NOBODY]})
    del metadata.filter_metadata["envoy.lb.subset_hint"]
    assert (await side.gateway.ask(metadata=metadata)).status == 0


async def test_a_clients_own_destination_is_overruled(side: Side) -> None:
    told = await side.gateway.ask(fields=(*POST, (DESTINATION, NOBODY.encode())))
    assert NOBODY not in told.header
    assert told.header == told.dynamic


async def test_the_body_goes_on_unchanged_and_ends_once(side: Side) -> None:
    body = b'{"model": "m", "prompt": "' + b"Hello \xc3\xa9 " * 50_000 + b'"}'
    for size in (1_000, 65_536, len(body)):
        told = await side.gateway.ask([body[i : i + size] for i in range(0, len(body), size)])
        assert told.body == body
        assert told.ends == 1


async def test_the_endpoint_that_served_is_taken_from_the_response(side: Side) -> None:
    """A gateway that fell back says so; the picker counts the request where it was served."""
    other = side.pool[3]
    picked_others = 0
    for _ in range(20):
        told = await side.gateway.ask(served=other)
        picked_others += told.header[0] != other
    counted = await side.picker.gauges("kvsteer_reasons_total")
    assert counted['kvsteer_reasons_total{reason="served-elsewhere"}'] == picked_others > 0


@pytest.mark.parametrize("name", ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness"])
async def test_health_is_told_by_the_names_of_the_field(side: Side, name: str) -> None:
    assert await side.gateway.health(name) == 1


async def test_a_health_name_that_nobody_knows_is_not_found(side: Side) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await side.gateway.health("nobody")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_nobody_ready_is_503_and_the_picker_not_ready_but_alive(tmp_path: Path) -> None:
    endpoints, listen = tmp_path / "endpoints.yaml", f"127.0.0.1:{free_port()}"
    async with running_worker("a") as worker:
        write_endpoints(endpoints, [worker.address])
        async with running_picker(tmp_path, listen, "--endpoints-file", str(endpoints)) as _, gateway(listen) as asking:
            assert (await asking.ask()).header == [worker.address]
            write_endpoints(endpoints, [])
            while await asking.health("readiness") != 2:
                pass
            told = await asking.ask()
            assert told.status == 503
            assert await asking.health("liveness") == 1
            write_endpoints(endpoints, [worker.address])
            while await asking.health("readiness") != 1:
                pass
            assert (await asking.ask()).header == [worker.address]


async def test_a_request_that_no_endpoint_may_take_is_429(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with (
        running_worker("a") as a,
        running_picker(tmp_path, listen, f"--endpoint={a.address}", "--config-text", STEERED) as _,
        gateway(listen) as asking,
    ):
        told = await asking.ask()
        assert told.status == 429
        assert told.immediate is not None
        names = {o.header.key.lower() for o in told.immediate.headers.set_headers}
        assert "x-llm-d-request-dropped-reason" in names


async def test_the_ranks_of_a_pod_are_endpoints_of_their_own(tmp_path: Path) -> None:
    """The gateway's conformance with data parallelism: any rank of a pod, one rank alone, some ranks of several."""
    listen = f"127.0.0.1:{free_port()}"
    ports = {"127.0.0.2": "3000-3002", "127.0.0.3": "3000-3002", "127.0.0.4": "3000-3002"}
    told = [f"--endpoint={host}:{span}" for host, span in ports.items()]
    async with (
        running_picker(tmp_path, listen, *told, "--config-text", STEERED, "--scrape-interval", "60") as _,
        gateway(listen) as asking,
    ):
        any_rank = [f"127.0.0.2:{port}" for port in (3000, 3001, 3002)]
        for wanted, allowed in (
            (["127.0.0.2"], any_rank),
            (["127.0.0.2:3001"], ["127.0.0.2:3001"]),
            (["127.0.0.2", "127.0.0.3:3002"], [*any_rank, "127.0.0.3:3002"]),
            (["127.0.0.4:3000", "127.0.0.4:3002"], ["127.0.0.4:3000", "127.0.0.4:3002"]),
        ):
            answer = await asking.ask(fields=(*POST, (SELECTION, ",".join(wanted).encode())))
            assert answer.status == 0
            assert set(answer.header) <= set(allowed)
            assert len(answer.header) == min(3, len(allowed))
            assert answer.header == answer.dynamic
