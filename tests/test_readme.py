"""What the README and the pages of docs/ say holds: code runs, files exist, commands are understood."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from agents import cli, config, training

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}


def _blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_python_code_runs(capsys):
    code, _ = _blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21
    first, last = (float(line.split()[0]) for line in (lines[0], lines[-2]))
    assert last < first, "twenty updates lower the bits per byte"


def test_an_agent_of_ones_own(tmp_path, monkeypatch):
    """The second block, saved as the file that the text names, is found by its dotted path, and learns where words begin."""
    _, code = _blocks("python")
    assert len(code.splitlines()) <= 20
    (tmp_path / "my_agent.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (line,) = (line for line in _commands() if "my_agent" in line)
    small = ["diagnostic=delimiter", "rate=none", "train.bytes=819200", "train.device=cpu"]
    run = training.Run(config.load([*shlex.split(line)[2:], *small]))
    training.train(run, tmp_path, progress=False)
    expected = run.source.scores(run.source.rate, run.agent.price)
    assert run.evaluate("test")["reward"] > 0.95 * expected["oracle"]


def _commands():
    lines = "".join(block for text in PAGES.values() for block in _blocks("bash", text)).splitlines()
    return [line for line in lines if line.startswith("segment-env ")]


@pytest.mark.parametrize("line", _commands())
def test_commands_are_understood(line):
    options = cli._parser().parse_args(shlex.split(line, comments=True)[1:])
    config.load(getattr(options, "overrides", []))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_is_linked_is_there(page):
    named = [name for name in re.findall(r"\]\(([^)#]+)", PAGES[page]) if "://" not in name]
    assert named and all((page.parent / name).exists() for name in named)


def test_make_targets_exist():
    targets = set(re.findall(r"`?make ([a-z-]+)", README))
    assert targets >= {"train", "test"}
    rules = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in targets)


def test_the_file_tree_is_whole():
    tree = README[README.index("## Where things are") :]
    named = set(re.findall(r"^ {4,}(\S+\.py)\b", tree, re.MULTILINE))
    there = {path.name for package in ("segment_env", "models", "agents") for path in (ROOT / package).rglob("*.py")}
    assert named == there - {"__init__.py"}
