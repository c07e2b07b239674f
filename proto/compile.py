"""Compile proto/*.proto into epp/gateway/pb (generated, never committed). Run by the build and by `make`.

usage: python proto/compile.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto"
TARGET = ROOT / "epp" / "gateway" / "pb"


def compile_protos(target: Path = TARGET) -> list[Path]:
    """Write one `NAME_pb2.py` (and `.pyi`) per .proto file; imports among them are made relative to their package."""
    from grpc_tools import protoc  # a build requirement only

    target.mkdir(parents=True, exist_ok=True)
    (target / "__init__.py").write_text('"""Generated from proto/*.proto by proto/compile.py."""\n')
    protos = sorted(SOURCE.glob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{SOURCE}", f"-I{include}", f"--python_out={target}", f"--pyi_out={target}"]
    if protoc.main([*arguments, *(str(p) for p in protos)]):
        raise SystemExit("protoc failed")
    written = []
    for proto in protos:
        for suffix in (".py", ".pyi"):
            path = target / f"{proto.stem}_pb2{suffix}"
            path.write_text(re.sub(r"^import (\w+_pb2)", r"from . import \1", path.read_text(), flags=re.MULTILINE))
            written.append(path)
    return written


if __name__ == "__main__":
    for written_path in compile_protos():
        sys.stdout.write(f"{written_path.relative_to(ROOT)}\n")
