"""Every command that a page shows exists, with every option that it is given."""

from __future__ import annotations

import ast
import re
import shlex

import click
import pytest

from doc_pages import PAGES, ROOT, Block, blocks, prose, shell_commands
from tokenspeed.cli.main import cli

_SHELL = blocks("sh", "shell", "bash", "console")


def tokenspeed_commands() -> list[tuple[str, str]]:
    """(where, command line) for every call of `tokenspeed` in shell blocks and in inline code."""
    shown = [
        (str(block), command)
        for block in _SHELL
        for command in shell_commands(block)
        if re.match(r"(\.venv/bin/)?tokenspeed\s", command)
    ]
    mentioned = [
        (str(page.relative_to(ROOT)), code)
        for page in PAGES
        for code in re.findall(r"`(tokenspeed [a-z][^`]*)`", prose(page))
    ]
    return shown + mentioned


def _options(command: click.Command) -> set[str]:
    """Every spelling of every option, and those that all commands have."""
    spelled = {"--help", "-h", "--version"}
    for parameter in command.params:
        spelled |= {*parameter.opts, *parameter.secondary_opts}
    return spelled


@pytest.mark.parametrize(("where", "line"), tokenspeed_commands())
def test_command_exists(where: str, line: str) -> None:
    words = shlex.split(line.split(">")[0].split("<")[0])[1:]
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        inner = command.get_command(context, words[0])
        assert inner is not None, f"{where}: no command {words[0]!r} in {line!r}"
        command, words = inner, words[1:]
    given = {word.split("=")[0] for word in words if word.startswith("-")}
    assert given <= _options(command), f"{where}: {line!r} has unknown options {given - _options(command)}"


def test_commands_are_found() -> None:
    """The extraction itself works: a page that everybody reads has commands."""
    assert sum(where.startswith("README.md") for where, _ in tokenspeed_commands()) >= 5


def nox_sessions() -> set[str]:
    """The names of all sessions, read from noxfile.py without running it."""
    names = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if "session" in ast.unparse(decorator):
                    keywords = {k.arg: k.value for k in decorator.keywords} if isinstance(decorator, ast.Call) else {}
                    name = keywords.get("name")
                    names.add(name.value if isinstance(name, ast.Constant) else node.name)
                    assert ast.get_docstring(node), f"session {node.name} has no line in the menu"
    return names


def test_nox_sessions_exist() -> None:
    named = {(str(p.relative_to(ROOT)), name) for p in PAGES for name in re.findall(r"nox -s ([\w-]+)", p.read_text())}
    assert named
    assert {name for _, name in named} <= nox_sessions(), named


@pytest.mark.parametrize("block", [b for b in _SHELL if "pip install" in b.text], ids=str)
def test_our_names_are_never_looked_up_in_an_index(block: Block) -> None:
    """A public index has another project's `tokenspeed`: pages install folders, all in one command."""
    for command in shell_commands(block):
        if "pip install" in command:
            ours = [word for word in shlex.split(command) if word.lstrip("./").startswith("tokenspeed")]
            assert ours
            assert all(word.startswith("./tokenspeed-") for word in ours), command
            assert "./tokenspeed-core" in {word.split("[")[0] for word in ours}, command


def test_named_files_exist() -> None:
    """Files and folders of the repository that pages name in inline code are there."""
    for page in PAGES:
        for name in re.findall(r"`((?:tests|docs|scripts|tokenspeed-[a-z-]+|\.ci)/[\w./-]*)`", prose(page)):
            assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"
