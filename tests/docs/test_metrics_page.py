"""docs/metrics.md has every metric of a picker with its type, and no other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from epp.config import default_text
from epp.discovery.dns import DnsDiscovery
from epp.discovery.file import FileDiscovery
from epp.discovery.kubernetes.cluster import ClusterSettings
from epp.observe.decision_log import LogFile
from epp.serve import Picker, Settings
from epp.shared.redis_stream import parse_url
from epp.sim.tokenizer import SHIPPED
from tests.docs.pages import PAGES

METRICS = next(page for page in PAGES if page.path.name == "metrics.md")

PRECISE = '- {type: precise-prefix-cache-producer, parameters: {bind: "tcp://127.0.0.1:*"}}\n'
KUBECONFIG = """
current-context: c
contexts: [{name: c, context: {cluster: c}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
"""
HOSTS = "endpoints: [{address: 127.0.0.1, ports: 1}]"


async def exposed(folder: Path) -> dict[str, str]:
    """Name -> type of all that a picker with every option shows."""
    (folder / "config.yaml").write_text(
        default_text().replace("plugins:\n", f"models: [{{name: tiny, path: {SHIPPED}}}]\nplugins:\n{PRECISE}", 1)
    )
    (folder / "hosts.yaml").write_text(HOSTS)
    (folder / "kubeconfig").write_text(KUBECONFIG)
    settings = Settings(
        sources=lambda: [FileDiscovery(folder / "hosts.yaml")],
        listen=("127.0.0.1:0",),
        health_listen="",
        admin_listen="",
        config_file=folder / "config.yaml",
        decision_log=LogFile(folder / "decisions.jsonl"),
        envoy_endpoints=folder / "endpoints.yaml",
        shared_state=parse_url("redis://127.0.0.1:1/0"),
        state_file=folder / "state",
        cluster=ClusterSettings(pool="pool", kubeconfig=folder / "kubeconfig", elect_leader=True),
    )
    picker = Picker(settings)
    started = asyncio.Event()
    running = asyncio.create_task(picker.run(lambda _: started.set()))
    try:
        async with asyncio.timeout(10):
            await started.wait()
        for column in ("waiting", "running", "kv_usage"):
            picker.pool.endpoints[0].set(column, 0.5)
        page = picker.metrics.render().decode()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, flags=re.M))
    return types | {f"kvsteer_membership_{name}_total": "counter" for name in DnsDiscovery("workers.test:1").counters}


async def test_the_page_has_every_metric_with_its_type_and_no_other(tmp_path: Path) -> None:
    described = dict(re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", METRICS.text, flags=re.M))
    assert described == await exposed(tmp_path)
