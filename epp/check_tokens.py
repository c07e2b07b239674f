"""`kvsteer check --tokens`: are our token ids of a request those of the worker?

In: a request's body in a file, a worker, and the model's folder. Out: equal or not, and where they part for the first
time, with the text around it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import click

from epp.api.errors import BadRequest
from epp.api.requests import parse_request
from epp.kvcache.tokens import ModelFolderError, Tokens
from epp.kvcache.tokens.pieces import Ids
from epp.kvcache.tokens.render import RenderClient, Rendered, RenderError
from epp.model_config import ModelConfig
from epp.request import Api, Headers, InferenceRequest, RequestHead

TIMEOUT_S = 60.0
AROUND = 8
"""Tokens shown before and after a difference."""

PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Member of a body -> the path it is meant for."""


def check_tokens(request_file: Path, worker: str, model_path: str, models: Sequence[ModelConfig]) -> bool:
    """Print the comparison; True when all ids are equal. Raises click.ClickException when it cannot be made."""
    try:
        body = request_file.read_bytes()
    except OSError as error:
        raise click.ClickException(f"{request_file}: cannot be read: {error.strerror or error}") from None
    request = _parse(request_file, body)
    if model_path:
        models = [ModelConfig(request.model, path=model_path)]
    try:
        tokens = Tokens(models)
    except ModelFolderError as error:
        raise click.ClickException(str(error)) from None
    ours = tokens.work(request, body)()
    if not ours.prompts:
        raise click.ClickException(f"{request_file}: no token ids here: {ours.reason}: {ours.detail or '-'}")
    local = tokens.local(tokens.base_of(request)[0])
    if local is not None:
        click.echo(
            f"tokenizer: {'tiktoken' if not local.encoder.slow_because else 'tokenizers'}"
            f"{_because(local.encoder.slow_because)}; "
            f"{'in pieces' if local.encoder.exact_pieces else 'whole'}{_because(local.encoder.whole_because)}"
        )
    try:
        theirs = asyncio.run(_ask(worker, request.api, body))
    except RenderError as error:
        raise click.ClickException(f"{error.reason}: {error}") from None
    if len(ours.ids) != len(theirs):
        click.echo(f"DIFFERENT: we have {len(ours.ids)} prompts, the worker {len(theirs)}")
        return False
    equal = True
    for number, (mine, its) in enumerate(zip(ours.ids, theirs, strict=True)):
        equal = _compare(number, mine, its.ids, tokens, request) and equal
    return equal


def first_difference(ours: Ids, theirs: Ids) -> int | None:
    """Index of the first id that differs, the length of the shorter where one begins the other; None: equal."""
    length = min(len(ours), len(theirs))
    different = (ours[:length] != theirs[:length]).nonzero()[0]
    if len(different):
        return int(different[0])
    return None if len(ours) == len(theirs) else length


def _compare(number: int, ours: Ids, theirs: Ids, tokens: Tokens, request: InferenceRequest) -> bool:
    at = first_difference(ours, theirs)
    if at is None:
        click.echo(f"prompt {number}: equal, {len(ours)} tokens")
        return True
    click.echo(f"prompt {number}: DIFFERENT from token {at} on; we have {len(ours)} tokens, the worker {len(theirs)}")
    local = tokens.local(tokens.base_of(request)[0])
    for name, ids in (("ours", ours), ("worker's", theirs)):
        window = ids[max(at - AROUND, 0) : at + AROUND].tolist()
        text = json.dumps(local.encoder.decode(window), ensure_ascii=False) if local else ""
        click.echo(f"  {name:9}{window}\n           {text}")
    return False


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _parse(file: Path, body: bytes) -> InferenceRequest:
    try:
        members = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise click.ClickException(f"{file}: is not JSON: {error}") from None
    path = next((path for name, path in PATHS.items() if isinstance(members, dict) and name in members), None)
    if path is None:
        raise click.ClickException(f"{file}: must be a JSON object with messages or a prompt")
    try:
        return parse_request(RequestHead("POST", path, Headers()), body, "check")
    except BadRequest as error:
        raise click.ClickException(f"{file}: {error}") from None


async def _ask(worker: str, api: Api, body: bytes) -> list[Rendered]:
    client = RenderClient()
    try:
        url = worker.rstrip("/") if "://" in worker else f"http://{worker}"
        return await client.render(url, api, body, TIMEOUT_S)
    finally:
        await client.close()
