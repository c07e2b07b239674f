"""Builds the C++ ext_proc server that the picker is held against.

In: `bench/cpp/ext_proc_server.cc` and `proto/ext_proc.proto`, whose messages get Envoy's package name and the service.
Out: a binary under `build/`, kept until a source changes; or `CannotBuild` with what to install.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "bench" / "cpp" / "ext_proc_server.cc"
PROTO = ROOT / "proto" / "ext_proc.proto"
PACKAGES = "g++ pkg-config libgrpc++-dev protobuf-compiler protobuf-compiler-grpc"
SERVICE = """
service ExternalProcessor {
  rpc Process(stream ProcessingRequest) returns (stream ProcessingResponse);
}
"""


class CannotBuild(Exception):
    """The text says why, in one line."""


def build(folder: Path = ROOT / "build" / "bench-cpp") -> Path:
    """Build unless it is there; takes about half a minute. Raises CannotBuild."""
    proto = (
        re.sub(r"^package .*;", "package envoy.service.ext_proc.v3;", PROTO.read_text(), flags=re.MULTILINE) + SERVICE
    )
    sources = hashlib.sha256(proto.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    binary = folder / f"ext_proc_server-{sources}"
    if binary.exists():
        return binary
    missing = [tool for tool in ("g++", "pkg-config", "protoc", "grpc_cpp_plugin") if shutil.which(tool) is None]
    if missing:
        raise CannotBuild(f"no {', '.join(missing)}: on Debian or Ubuntu, apt-get install {PACKAGES}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ext_proc.proto").write_text(proto)
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
    _run("protoc", f"-I{folder}", f"--cpp_out={folder}", f"--grpc_out={folder}", plugin, f"{folder}/ext_proc.proto")
    flags = _run("pkg-config", "--cflags", "--libs", "grpc++", "protobuf").split()
    sources_cc = (str(SOURCE), f"{folder}/ext_proc.pb.cc", f"{folder}/ext_proc.grpc.pb.cc")
    _run("g++", "-O2", "-std=c++17", f"-I{folder}", *sources_cc, "-o", f"{binary}.part", *flags, "-pthread")
    Path(f"{binary}.part").rename(binary)
    return binary


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed (apt-get install {PACKAGES}?): {done.stderr.strip()[:500]}")
    return done.stdout
