"""`kvsteer check --tokens` finds where our ids and a worker's part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from click.testing import CliRunner, Result

from epp.check_tokens import first_difference
from epp.commands.check import command
from epp.kvcache.tokens import Tokens
from epp.model_config import ModelConfig
from epp.request import Api, InferenceRequest
from tests.kvcache.tokens import models, templates

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "def main(): return 42"}]}).encode()


class Worker:
    """Answers every render with `ids`."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                answer = json.dumps({"token_ids": outer.ids}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    thread = Thread(target=worker.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield worker
    finally:
        worker.server.shutdown()
        thread.join()
        worker.server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.write(tmp_path / "model", models.shipped().tokenizer_json, template=templates.CHATML)
    (tmp_path / "request.json").write_bytes(BODY)
    return tmp_path


def ids(folder: Path) -> list[int]:
    request = InferenceRequest("r", Api.CHAT, model="m", prompts=(b"x",))
    made = Tokens([ModelConfig("m", path=str(folder / "model"))]).work(request, BODY)()
    return list(made.ids[0].tolist())


def check(folder: Path, worker: str, *more: str) -> Result:
    return CliRunner().invoke(command, ["--tokens", str(folder / "request.json"), "--worker", worker, *more])


def test_equal_ids_are_told_with_their_number(folder: Path, worker: Worker) -> None:
    worker.ids = ids(folder)
    result = check(folder, worker.url, "--model-path", str(folder / "model"))
    assert result.exit_code == 0, result.output
    assert "tokenizer: tiktoken; in pieces" in result.output
    assert f"prompt 0: equal, {len(worker.ids)} tokens" in result.output


def test_the_first_difference_is_shown_with_the_text_around_it(folder: Path, worker: Worker) -> None:
    worker.ids = ids(folder)
    worker.ids[5] += 1
    result = check(folder, worker.url, "--model-path", str(folder / "model"))
    assert result.exit_code == 1
    assert "prompt 0: DIFFERENT from token 5 on" in result.output
    assert "<|im_start|>user" in result.output


def test_the_model_comes_from_the_configuration_without_a_path(folder: Path, worker: Worker) -> None:
    worker.ids = ids(folder)
    config = folder / "config.yaml"
    config.write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nmodels: [{name: m, path: model}]\n")
    result = check(folder, worker.url, str(config))
    assert result.exit_code == 0, result.output
    assert f"model m: tokenised by auto from {folder / 'model'}" in result.output


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "must be a JSON object with messages or a prompt"),
        (b'{"messages": []}', "model: is required"),
        (b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "multimodal"),
    ],
)
def test_a_request_that_cannot_be_compared_says_why(folder: Path, body: bytes, message: str) -> None:
    (folder / "request.json").write_bytes(body)
    result = check(folder, "http://127.0.0.1:1", "--model-path", str(folder / "model"))
    assert result.exit_code == 1
    assert message in result.output


def test_a_worker_that_does_not_answer_and_missing_options_say_so(folder: Path) -> None:
    result = check(folder, "http://127.0.0.1:1", "--model-path", str(folder / "model"))
    assert "render-unreachable" in result.output
    assert "needs --model-path" in check(folder, "http://127.0.0.1:1").output
    result = CliRunner().invoke(command, ["--tokens", str(folder / "request.json")])
    assert "--tokens and --worker go together" in result.output
    assert "is not a folder" in check(folder, "http://127.0.0.1:1", "--model-path", str(folder / "absent")).output


def test_one_list_that_begins_the_other_differs_at_its_end() -> None:
    def array(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array(values, dtype=np.uint32)

    assert first_difference(array(1, 2), array(1, 2, 3)) == 2
    assert first_difference(array(1, 2), array(1, 2)) is None
    assert first_difference(array(1, 2, 3), array(1, 9, 3)) == 1
