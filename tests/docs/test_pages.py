"""What the pages name exists: commands, flags, make targets, files, links, and every page is in the index."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress

import click
import pytest

from epp.cli import main
from epp.field_flags import FLAGS
from tests.docs.pages import PAGES, ROOT, Page

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.path) for page in PAGES])

FOREIGN = {
    "--enable-prefix-caching": "vLLM",
    "--enable-prompt-tokens-details": "vLLM",
    "--max-num-seqs": "vLLM",
    "--kv-events-config": "vLLM",
    "--kv-transfer-config": "vLLM",
    "--log-level": "envoy",
    "--mode": "envoy",
    "--base-id": "envoy",
    "--strict": "mypy",
}
"""Flags of other programs that the pages speak of."""


def words(line: str) -> list[str]:
    """The words of one command, without comment, redirection and what follows."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        found.append(word)
    return found


def commands(page: Page) -> list[list[str]]:
    """Every `kvsteer ...` of a page, as words."""
    lines = [line.strip() for line in page.shell()] + page.code()
    return [words(line)[1:] for line in lines if re.match(r"kvsteer( |$)", line)]


def options(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None, f"there is no `kvsteer {name}`"
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}


@each_page
def test_every_command_of_a_page_can_be_given_as_written(page: Page) -> None:
    for name, *arguments in filter(None, commands(page)):
        if name.startswith("-"):
            continue
        command = main.get_command(click.Context(main), name)
        assert command is not None, f"there is no `kvsteer {name}`"
        with suppress(click.exceptions.Exit, click.MissingParameter):  # --help; named without its arguments
            try:
                command.make_context(name, arguments)
            except click.BadOptionUsage as error:
                if "requires an argument" not in error.message:  # named without its value
                    raise


@each_page
def test_every_flag_of_a_page_exists(page: Page) -> None:
    ours = set().union(*(options(name) for name in main.list_commands(click.Context(main))))
    ours |= {f"--{name}" for name in FLAGS}
    named = {flag for code in page.code() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)}
    assert named - ours - FOREIGN.keys() == set()


@each_page
def test_every_make_target_of_a_page_exists(page: Page) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = {m for code in (*page.code(), *page.shell()) for m in re.findall(r"^make ([a-z-]+)", code.strip())}
    assert named - targets == set()


@each_page
def test_every_file_of_a_page_exists(page: Page) -> None:
    pattern = r"(?<![\w./-])(?:epp|scorers|filters|proto|envoy|bench|tests|docs)/[\w./-]*"
    named = {path for code in page.code() for path in re.findall(pattern, code)}
    assert {path for path in named if not (ROOT / path).exists()} == set()


@each_page
def test_every_relative_link_of_a_page_resolves(page: Page) -> None:
    for link in page.links():
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page.path).parent / path if path else ROOT / page.path
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, link


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    (index,) = (page for page in PAGES if page.path.parts == ("docs", "README.md"))
    named = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in index.links()}
    assert {(ROOT / page.path).resolve() for page in PAGES} - named == {(ROOT / index.path).resolve()}


def test_the_page_on_migrating_has_every_flag_of_the_go_pickers() -> None:
    (page,) = (page for page in PAGES if page.path.name == "migrate.md")
    assert {f"--{name}" for name in FLAGS} - set(page.code()) == set()
