"""The Envoy files and the command that prints them: accepted by the real Envoy, equal to what is shipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from epp.cli import main
from epp.discovery.envoy_file import load_assignment
from epp.envoy_options import (
    EndpointsFile,
    EnvoyOptions,
    FailureMode,
    HostPort,
    Mode,
    Profile,
    UnixSocket,
    defaults,
    parse_endpoints,
    parse_picker,
)
from epp.envoy_yaml import NOTES, render

ROOT = Path(__file__).parent.parent
DECODE = "decode-sidecar.yaml"
SHIPPED = sorted((ROOT / "envoy").glob("*.yaml"))
LISTED = (HostPort("127.0.0.1", 8000), HostPort("::1", 8000))


def envoy_config(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["envoy-config", *args])
    return result.exit_code, result.output


def validate(config: Path) -> None:
    envoy = shutil.which("envoy") or f"{sysconfig.get_path('scripts')}/envoy"
    command = [envoy, "--mode", "validate", "--log-level", "error", "-c", str(config)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def find(tree: Any, key: str) -> Iterator[Any]:
    """Every value under `key`, anywhere."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from find(item, key)


def parsed(options: EnvoyOptions) -> Any:
    return yaml.safe_load(render(options))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_file_is_accepted_by_the_real_envoy(path: Path) -> None:
    validate(path)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("profile", Profile)
def test_shipped_file_is_what_the_command_prints_by_default(mode: Mode, profile: Profile) -> None:
    code, output = envoy_config("--mode", mode.value, "--profile", profile.value)
    assert code == 0
    assert (ROOT / "envoy" / f"{mode}-{profile}.yaml").read_text() == output, "run `make envoy-files`"


def test_no_file_is_shipped_that_nothing_writes() -> None:
    assert {p.name for p in SHIPPED} - {DECODE} == {f"{mode}-{profile}.yaml" for mode in Mode for profile in Profile}
    code, output = envoy_config("--mode", "sidecar", "--profile", "fast", "--decode-sidecar")
    assert (code, (ROOT / "envoy" / DECODE).read_text()) == (0, output)


@pytest.mark.parametrize(
    "options",
    [
        defaults(Mode.STANDALONE, Profile.FAST, endpoints=LISTED, usage=True),
        defaults(Mode.STANDALONE, Profile.GATEWAY, endpoints=LISTED, failure_mode=FailureMode.CLOSED),
        defaults(Mode.SIDECAR, Profile.FAST, endpoints=(), usage=True, listen=HostPort("::", 8080)),
        defaults(Mode.STANDALONE, Profile.FAST, endpoints=EndpointsFile("{tmp}/pool.json")),
        defaults(Mode.SIDECAR, Profile.GATEWAY, picker=HostPort("kvsteer.default.svc", 9002), picker_tls=True),
    ],
    ids=["listed", "listed-closed", "unlisted-ipv6", "followed", "picker-by-name-tls"],
)
def test_every_option_gives_a_file_envoy_accepts(options: EnvoyOptions, tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text(load_assignment([("10.0.0.1", 8000), ("fd00::1", 8000)]))
    config = tmp_path / "envoy.yaml"
    config.write_text(render(options).replace("{tmp}", str(tmp_path)))
    validate(config)


def test_the_head_names_the_command_that_prints_the_file_again() -> None:
    options = defaults(
        Mode.STANDALONE,
        Profile.FAST,
        picker=HostPort("::1", 9002),
        endpoints=LISTED,
        usage=True,
        picker_tls=True,
        picker_ca="/etc/ca.pem",
    )
    text = render(options)
    command = text.partition("# Printed by:\n")[2].partition("# Check")[0].replace("\\\n", "").replace("#", "")
    assert command.split()[:2] == ["kvsteer", "envoy-config"]
    assert envoy_config(*command.split()[2:]) == (0, text)


def test_beside_a_decode_worker_who_prefills_is_heard_and_a_hand_over_is_sent_once() -> None:
    tree = parsed(defaults(Mode.SIDECAR, Profile.FAST, decode=True))
    (mutations,) = find(tree, "mutations")
    assert "x-prefiller-host-port" not in {m["remove"] for m in mutations}
    (virtual_hosts,) = find(tree, "virtual_hosts")
    assert list(find(virtual_hosts, "retry_policy")) == []
    with pytest.raises(ValueError, match="must be listed"):
        defaults(Mode.SIDECAR, Profile.FAST, decode=True, endpoints=())
    with pytest.raises(ValueError, match="profile fast"):
        defaults(Mode.SIDECAR, Profile.GATEWAY, decode=True)


def test_every_note_is_printed_somewhere() -> None:
    texts = [render(defaults(mode, profile)) for mode in Mode for profile in Profile]
    text = "\n".join([*texts, render(defaults(Mode.SIDECAR, Profile.FAST, usage=True))])
    text += render(defaults(Mode.SIDECAR, Profile.FAST, endpoints=EndpointsFile("/pool.json")))
    assert [key for key, note in NOTES.items() if f"# {note}\n" not in text] == []


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("profile", Profile)
def test_control_headers_of_clients_are_removed_before_any_filter(mode: Mode, profile: Profile) -> None:
    (mutations,) = find(parsed(defaults(mode, profile)), "mutations")
    assert {m["remove"] for m in mutations} >= {
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-data-parallel-rank",
    }


@pytest.mark.parametrize("profile", Profile)
def test_websockets_are_steered_by_headers_alone(profile: Profile) -> None:
    (upgrades,) = find(parsed(defaults(Mode.SIDECAR, profile)), "upgrade_configs")
    (mode,) = find(upgrades, "processing_mode")
    assert mode["request_body_mode"] == "NONE"
    assert mode["response_header_mode"] == "SKIP"


def test_full_duplex_sends_trailers_because_envoy_refuses_it_without() -> None:
    mode = next(find(parsed(defaults(Mode.SIDECAR, Profile.GATEWAY)), "processing_mode"))
    assert mode["request_body_mode"] == mode["response_body_mode"] == "FULL_DUPLEX_STREAMED"
    assert mode["request_trailer_mode"] == mode["response_trailer_mode"] == "SEND"


def test_a_listed_pool_fails_open_unless_told_otherwise_and_an_unlisted_one_never() -> None:
    assert defaults(Mode.STANDALONE, Profile.FAST, endpoints=LISTED).failure_mode is FailureMode.OPEN
    assert defaults(Mode.STANDALONE, Profile.FAST).failure_mode is FailureMode.CLOSED
    code, output = envoy_config("--failure-mode", "open", "--endpoints", "none")
    assert code == 2
    assert "needs listed endpoints" in output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--picker", "localhost"], "'localhost' is not host:port"),
        (["--picker", "unix:"], "a socket path has 1 to 107 bytes"),
        (["--picker", "unix:/" + "x" * 107], "a socket path has 1 to 107 bytes"),
        (["--picker", "::1:9002"], "in brackets"),
        (["--picker", "[name]:9002"], "not an IPv6 address"),
        (["--listen", "example.com:80"], "a listening address is an IP"),
        (["--listen", "0.0.0.0:0"], "1 to 65535"),
        (["--listen", "0.0.0.0:65536"], "1 to 65535"),
        (["--listen", "0.0.0.0:²"], "1 to 65535"),
        (["--admin", "0.0.0.0:9901"], "must be on loopback"),
        (["--endpoints", "worker-0:8000"], "names workers by ip:port"),
        (["--endpoints", "10.0.0.1:8000,10.0.0.1:8000"], "names an endpoint twice"),
        (["--endpoints", "10.0.0.1:8000,"], "is not host:port"),
        (["--endpoints", "file:pool.json"], "needs an absolute path"),
        (["--profile", "gateway", "--usage"], "usage is for the fast profile"),
        (["--picker-ca", "ca.pem"], "verify nothing"),
    ],
)
def test_a_wrong_option_is_refused_in_words(args: list[str], words: str) -> None:
    code, output = envoy_config(*args)
    assert code == 2
    assert words in output


def test_addresses_are_read_as_written() -> None:
    assert parse_picker("unix:/run/kvsteer.sock") == UnixSocket("/run/kvsteer.sock")
    assert parse_picker("kvsteer:9002") == HostPort("kvsteer", 9002)
    assert parse_endpoints("10.0.0.1:8000, [::1]:8001") == (HostPort("10.0.0.1", 8000), HostPort("::1", 8001))
    assert parse_endpoints("file:/run/pool.json") == EndpointsFile("/run/pool.json")
    assert parse_endpoints("none") == ()


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "envoy_data_plane" or n.startswith("epp.envoy_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "envoy_data_plane", None)
    code, output = envoy_config()
    assert code == 1
    assert "pip install 'kvsteer[envoy]'" in output
