"""The Go picker's command line, so that its arguments start this one unchanged: same flags, same spelling.

In: arguments as llm-d's and the Gateway API's pickers take them, mixed with our own. Out: arguments of `kvsteer serve`,
and a note for each flag that has no meaning here, with what takes its place. Go's spelling is taken too: one dash
before a long name, `--flag=true`, `-v=2`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from epp.decoding import seconds

_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})
"""What Go's `strconv.ParseBool` takes."""


class FieldFlagError(ValueError):
    """A flag's value is none; the text names the flag."""


@dataclass(frozen=True, slots=True)
class Value:
    """A flag with a value that becomes arguments of ours. `arguments` raises ValueError that says what it wants."""

    arguments: Callable[[str], Sequence[str]]
    meaning: str


@dataclass(frozen=True, slots=True)
class Switch:
    """A boolean flag: what it becomes when on, and when off."""

    on: tuple[str, ...]
    off: tuple[str, ...]
    meaning: str
    note_on: str = ""
    note_off: str = ""
    """Why it has no effect, where that is so."""


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """A flag that has no effect here, and what takes its place."""

    why: str
    boolean: bool = False


Flag = Value | Switch | NotApplicable


@dataclass(frozen=True, slots=True)
class Translated:
    arguments: list[str]
    notes: list[str]


def translate(arguments: Sequence[str], own: Container[str] = ()) -> Translated:
    """Put the field's flags into ours. `own`: names (without dashes) of the options that are ours already.

    Raises FieldFlagError.
    """
    done = Translated([], [])
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            done.arguments.extend([argument, *rest])
            break
        name, equals, text = argument.lstrip("-").partition("=")
        flag = FLAGS.get(name) if argument.startswith("-") else None
        if flag is None or (name == "v" and not equals and not (rest and rest[0].isdecimal())):
            spelled_as_go = argument.startswith("-") and not argument.startswith("--") and name in own
            done.arguments.append(f"-{argument}" if spelled_as_go and len(name) > 1 else argument)
            continue
        value = text if equals else None
        if value is None and not _is_boolean(flag):
            if not rest:
                raise FieldFlagError(f"--{name}: needs a value")
            value = rest.pop(0)
        _apply(name, flag, value, done)
    return done


def _is_boolean(flag: Flag) -> bool:
    return isinstance(flag, Switch) or (isinstance(flag, NotApplicable) and flag.boolean)


def _apply(name: str, flag: Flag, value: str | None, done: Translated) -> None:
    if isinstance(flag, Value):
        try:
            done.arguments.extend(flag.arguments(value or ""))
        except ValueError as error:
            raise FieldFlagError(f"--{name} {value!r}: {error}") from None
        return
    if isinstance(flag, NotApplicable):
        done.notes.append(f"--{name} has no effect: {flag.why}")
        return
    if value is not None and value not in _TRUE | _FALSE:
        raise FieldFlagError(f"--{name}={value}: is neither true nor false")
    on = value is None or value in _TRUE
    done.arguments.extend(flag.on if on else flag.off)
    if note := flag.note_on if on else flag.note_off:
        done.notes.append(f"--{name}{'' if on else '=false'} has no effect: {note}")


def _everywhere(option: str) -> Callable[[str], Sequence[str]]:
    def arguments(value: str) -> Sequence[str]:
        if ":" in value:
            return (option, value)  # our own spelling, of a flag that both have
        if not (value.isascii() and value.isdecimal() and len(value) <= 5 and 0 <= int(value) < 65536):
            raise ValueError("is not a port")
        return (option, f":{value}" if int(value) else "0")

    return arguments


def _duration(option: str) -> Callable[[str], Sequence[str]]:
    def arguments(value: str) -> Sequence[str]:
        duration = seconds(value)
        if duration is None:
            raise ValueError("is not a duration such as 2s or 500ms")
        return (option, repr(duration))

    return arguments


def _scheme(value: str) -> Sequence[str]:
    if value not in ("http", "https"):
        raise ValueError("is neither http nor https")
    return ("--scrape-scheme", value)


def _verbosity(value: str) -> Sequence[str]:
    """Levels of the Go pickers: 2 is their default, 3 verbose, 4 debug, 5 trace."""
    if not (value.isascii() and value.isdecimal() and len(value) <= 3):
        raise ValueError("is not a level")
    level = int(value)
    return () if level <= 2 else ("-v",) if level == 3 else ("-vv",)


_OWN_LOG = NotApplicable("the log is lines of text on standard error; -v and -vv say more")
_GAUGES = NotApplicable(
    "gauges are found by the engine: the pod's label llm-d.ai/engine-type, or what its metrics look like"
)

FLAGS: Mapping[str, Flag] = {
    "grpc-port": Value(_everywhere("--listen"), "`--listen :PORT`"),
    "grpc-health-port": Value(_everywhere("--health-port"), "`--health-port :PORT`"),
    "metrics-port": Value(_everywhere("--admin"), "`--admin :PORT`"),
    "secure-serving": Switch(("--secure-serving",), ("--no-secure-serving",), "the same"),
    "enable-cert-reload": Switch((), (), "always on", note_off="certificate files are always read again on change"),
    "ha-enable-leader-election": Switch(("--leader-election",), ("--no-leader-election",), "`--leader-election`"),
    "metrics-endpoint-auth": Switch(("--metrics-endpoint-auth",), ("--no-metrics-endpoint-auth",), "the same"),
    "disable-endpoint-subset-filter": Switch(("--ignore-subset",), ("--no-ignore-subset",), "`--ignore-subset`"),
    "refresh-metrics-interval": Value(_duration("--scrape-interval"), "`--scrape-interval SECONDS`"),
    "metrics-staleness-threshold": NotApplicable(
        "how old metrics may be is a parameter of the plugins that read them (metricsStalenessThreshold)"
    ),
    "model-server-metrics-scheme": Value(_scheme, "`--scrape-scheme http` or `https`"),
    "model-server-metrics-https-insecure-skip-verify": Switch(
        ("--no-scrape-verify",), ("--scrape-verify",), "`--no-scrape-verify`, `--scrape-verify`"
    ),
    "model-server-metrics-path": NotApplicable(
        "the path follows from the engine: the pod's label llm-d.ai/engine-type, or what answers"
    ),
    "model-server-metrics-port": NotApplicable("metrics are read where requests are sent"),
    "v": Value(_verbosity, "`-v` from 3, `-vv` from 4"),
    "health-checking": NotApplicable("health is always served, on --health-port and beside ext_proc", boolean=True),
    "tracing": NotApplicable(
        "no spans are exported; the decision log (--decision-log) has the stages of each decision", boolean=True
    ),
    "enable-pprof": NotApplicable("there is no profiler on a port; attach py-spy to the process", boolean=True),
    "refresh-prometheus-metrics-interval": NotApplicable("/metrics is made when it is asked for"),
    "total-queued-requests-metric": _GAUGES,
    "total-running-requests-metric": _GAUGES,
    "kv-cache-usage-percentage-metric": _GAUGES,
    "lora-info-metric": _GAUGES,
    "cache-info-metric": _GAUGES,
    "zap-devel": NotApplicable(_OWN_LOG.why, boolean=True),
    "zap-encoder": _OWN_LOG,
    "zap-log-level": _OWN_LOG,
    "zap-stacktrace-level": _OWN_LOG,
    "zap-time-encoding": _OWN_LOG,
}
"""Flag of the Go pickers -> what becomes of it. What is not here is ours under the same name, or unknown."""
