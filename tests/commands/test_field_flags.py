"""The Go pickers' arguments become ours, or are named with what takes their place."""

from __future__ import annotations

import pytest

from epp.field_flags import FLAGS, FieldFlagError, NotApplicable, translate

OWN = frozenset({"pool-name", "config-file", "verbose"})


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--grpc-port 9002", "--listen :9002"),
        ("--grpc-port=9002", "--listen :9002"),
        ("-grpc-port=9002", "--listen :9002"),
        ("--grpc-health-port 9003", "--health-port :9003"),
        ("--metrics-port 0", "--admin 0"),
        ("--metrics-port 127.0.0.1:9090", "--admin 127.0.0.1:9090"),
        ("--secure-serving", "--secure-serving"),
        ("--secure-serving=true", "--secure-serving"),
        ("--secure-serving=F", "--no-secure-serving"),
        ("--refresh-metrics-interval 50ms", "--scrape-interval 0.05"),
        ("--refresh-metrics-interval=1m30s", "--scrape-interval 90.0"),
        ("--ha-enable-leader-election", "--leader-election"),
        ("--disable-endpoint-subset-filter=false", "--no-ignore-subset"),
        ("--model-server-metrics-scheme=https", "--scrape-scheme https"),
        ("--model-server-metrics-https-insecure-skip-verify=true", "--no-scrape-verify"),
        ("--v=2", ""),
        ("--v 4", "-vv"),
        ("-v=3", "-v"),
        ("-v 3", "-v"),
        ("-v", "-v"),
        ("-vv", "-vv"),
        ("-v --pool-name a", "-v --pool-name a"),
        ("-pool-name=a", "--pool-name=a"),
        ("-pool-name a -config-file b", "--pool-name a --config-file b"),
        ("--endpoint 127.0.0.1:1", "--endpoint 127.0.0.1:1"),
        ("--unknown=1", "--unknown=1"),
        ("-- --grpc-port 1", "-- --grpc-port 1"),
    ],
)
def test_arguments_of_the_go_pickers_become_ours(given: str, ours: str) -> None:
    translated = translate(given.split(), OWN)
    assert (" ".join(translated.arguments), translated.notes) == (ours, [])


@pytest.mark.parametrize("name", sorted(name for name, flag in FLAGS.items() if isinstance(flag, NotApplicable)))
def test_a_flag_without_effect_is_taken_with_its_value_and_named(name: str) -> None:
    flag = FLAGS[name]
    assert isinstance(flag, NotApplicable)
    arguments = [f"--{name}"] if flag.boolean else [f"--{name}", "x"]
    translated = translate([*arguments, "--grpc-port", "1"])
    assert translated.arguments == ["--listen", ":1"]
    assert translated.notes == [f"--{name} has no effect: {flag.why}"]


def test_what_is_always_on_is_named_only_when_it_is_to_be_off() -> None:
    assert translate(["--enable-cert-reload"]).notes == []
    assert translate(["--enable-cert-reload=false"]).notes == [
        "--enable-cert-reload=false has no effect: certificate files are always read again on change"
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--grpc-port", "--grpc-port: needs a value"),
        ("--grpc-port x", "--grpc-port 'x': is not a port"),
        ("--grpc-port=70000", "--grpc-port '70000': is not a port"),
        ("--secure-serving=yes", "--secure-serving=yes: is neither true nor false"),
        ("--refresh-metrics-interval 50", "--refresh-metrics-interval '50': is not a duration"),
        ("--v=x", "--v 'x': is not a level"),
    ],
)
def test_a_value_that_is_none_is_refused_by_the_name_of_its_flag(given: str, words: str) -> None:
    with pytest.raises(FieldFlagError, match="^" + words):
        translate(given.split())
