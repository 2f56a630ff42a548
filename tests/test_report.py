"""The report of small trained runs: all there, all escaped, nothing from outside; and mistakes in one line."""

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser

import pytest
from reports import HOSTILE, train

from agents import cli
from agents.report import MAPS

SECTIONS = ["Figures", "How the segmentation grew", "Training", "Segments", "Rate by class of byte", "Configuration"]
ELEMENTS = """html head meta title style body header main footer section div h1 h2 h3 p b small span bdi br code pre details summary
    table caption thead tbody tr th td ul ol li figure figcaption svg path rect circle text""".split()
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements and texts of a page; fails where elements are not nested."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def count(self, tag: str, of_class: str | None = None) -> int:
        return sum(name == tag and (of_class is None or of_class in (given.get("class") or "").split()) for name, given in self.elements)


def check(text: str) -> Page:
    """It stands alone, runs nothing, and is made of the elements that templates hold."""
    page = Page(text)
    assert Counter(tag for tag, _ in page.elements).keys() <= set(ELEMENTS)
    attributes = {name for _, given in page.elements for name in given}
    assert not attributes & {"src", "href", "srcset", "action", "data"} and not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|url\(|@import", text)
    (policy,) = (given["content"] for _, given in page.elements if given.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "script-src" not in policy
    assert all(given.get("aria-label") or given.get("aria-hidden") for tag, given in page.elements if tag == "svg")
    assert all(given.get("scope") for tag, given in page.elements if tag == "th")
    assert not re.search(r"[\x00-\x08\u2028\u202a-\u202e]", text), "nothing that cannot be printed, nothing that turns directions"
    return page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A learned run, a rule, a run of sound-like samples, and one of a made-up language that is not causal."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "learned": train(folder / "learned"),
        "uniform": train(folder / "uniform", "agent=uniform", updates=4),
        "sound": train(folder / "sound", "diagnostic=silence", "data.length=256", updates=2),
        "bpe": train(folder / "bpe", "data=made_up", "agent=bpe", "agent.policy.vocabulary=270", updates=2),
    }


@pytest.fixture
def report(tmp_path, capsys):
    def write(*arguments):
        out = tmp_path / "report.html"
        assert cli.main(["report", *map(str, arguments), "--out", str(out), "--bytes", "2048"]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        return out.read_text(encoding="utf-8")

    return write


def test_one_run(runs, report, tmp_path):
    text = report(runs["learned"], "--png", tmp_path / "growth.png")
    page = check(text)
    assert page.texts["h2"] == SECTIONS
    assert page.count("figure", "chart") == 8 and page.count("figure", "histogram") == 1
    assert page.count("div", "heat") == page.count("figure", "map") == MAPS + 1
    assert page.count("table", "classes") == 1
    assert any("<script>document.title" in heat for heat in page.texts["div"]), "shown"
    assert "{{ 7*7 }}" in "".join(page.texts["main"]) and "\\u202e" in "".join(page.texts["main"])
    figures = dict(zip([th.split("\n")[0] for th in page.texts["th"] if th], page.texts["td"], strict=False))
    assert "609" in figures.values() and "sampled, uncapped, seed 0" in figures.values()
    assert f"{MAPS} of 8 checkpoints" in text
    assert {"segment-env train as it was asked for", f"segment-env report {runs['learned']} --bytes 2048 --seed 0"} <= set(
        page.texts["pre"]
    )
    assert any("policy_weight: 0.3" in pre for pre in page.texts["pre"])
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_heat_maps_hold_the_same_text_before_and_after(runs, report):
    page = check(report(runs["learned"]))
    cells = [given for tag, given in page.elements if tag == "span" and (given.get("class") or "").split()[:1] == ["c"]]
    hovers = [given["title"] for given in cells if "title" in given]
    size = len(hovers) // (MAPS + 1)
    first, last = hovers[:size], hovers[-size:]
    assert [hover.split(";")[0] for hover in first] == [hover.split(";")[0] for hover in last] and first != last
    shown = bytes.fromhex("".join(hover.split(": ")[1].split(";")[0] for hover in first))
    assert shown in HOSTILE * 3


def test_several_runs(runs, report):
    page = check(report(runs["learned"], runs["uniform"]))
    assert page.texts["h2"] == SECTIONS
    assert page.count("figure", "chart") == 8 and page.count("figure", "histogram") == page.count("table", "classes") == 2
    assert page.count("div", "heat") == MAPS + 1 + 1, "a rule cuts the same at every checkpoint"
    main = "".join(page.texts["main"])
    assert "not logged: uniform" in main and "Where they differ" in main and "agent._target_" in main
    assert "cannot be compared" not in main
    heads = ["learned", "uniform"]
    assert [th for th in page.texts["th"] if th in heads][:2] == heads


def test_other_data(runs, report):
    page = check(report(runs["sound"], runs["bpe"], runs["learned"]))
    main = "".join(page.texts["main"])
    assert "their bits per byte cannot be compared" in main
    assert "bpe: NOT CAUSAL: boundaries depend on what comes after them" in main
    assert "224–255" in main or "0–31" in main, "samples have ranges, not letters"


def test_the_figures_are_those_of_eval(runs, report, capsys):
    text = report(runs["learned"] / "checkpoints" / "00000004")
    assert cli.main(["eval", str(runs["learned"] / "checkpoints" / "00000004")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_bytes"] < 2048, "all of them"
    assert f"<td>{figures['bits_per_byte']:.3f}</td>" in text and f"<td>{figures['rate']:.3f}</td>" in text
    assert "update 4," in text and "update 5," not in text and "4 of 4 checkpoints" in text


def test_what_is_missing_is_said(runs, report, tmp_path):
    run = shutil.copytree(runs["learned"], tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]))
    newest = sorted((run / "checkpoints").iterdir())
    for pruned in newest[:4]:
        shutil.rmtree(pruned)
    (newest[5] / "model.safetensors").write_bytes(b"")
    config = run / "config.yaml"
    config.write_text(config.read_text().split("\n", 1)[1])
    text = report(run)
    page = check(text)
    main = "".join(page.texts["main"])
    assert "a broken line of metrics.jsonl is left out" in main
    assert "checkpoint 6 is passed over: model.safetensors is not what was written" in main
    assert "3 of 3 checkpoints" in main and page.count("div", "heat") == 4
    (run / "metrics.jsonl").unlink()
    assert "it has no metrics.jsonl to draw curves from" in report(run) and "Nothing was logged" in report(run)


@pytest.fixture
def mistake(capsys):
    def run(*arguments):
        assert cli.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("reading ")]
        assert out == "" and len(lines) == 1 and lines[0].startswith("segment-env: ")
        return lines[0]

    return run


def test_mistakes(runs, mistake, tmp_path):
    learned = runs["learned"]
    assert "no run folder" in mistake("report", tmp_path)
    assert "the same run is given twice" in mistake("report", learned, learned)
    assert "a whole number of at least 1 is needed, got '0'" in mistake("report", learned, "--bytes", "0")
    (tmp_path / "config.yaml").write_text((learned / "config.yaml").read_text())
    assert "has no checkpoint yet" in mistake("report", learned, tmp_path)
    assert "has no checkpoint yet" in mistake("segment", tmp_path, "text", "--html", tmp_path / "x.html")
    for command in (["report", learned, "--out"], ["report", learned, "--png"], ["segment", learned, "x", "--html"]):
        assert f"cannot write '{tmp_path}': it is a folder" in mistake(*command, tmp_path)
        assert f"there is no folder '{tmp_path / 'no'}'" in mistake(*command, tmp_path / "no" / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


def test_texts_too_long_to_look_at(runs, mistake, tmp_path, monkeypatch):
    monkeypatch.setattr("agents.pages.MOST", 4)
    assert "a page shows at most 4 characters, got 5" in mistake("segment", runs["uniform"], "abcde", "--html", tmp_path / "x.html")
    monkeypatch.setattr("agents.pictures.MOST", 4)
    assert "a picture holds at most 4 characters, got 5" in mistake("segment", runs["uniform"], "abcde", "--png", tmp_path / "x.png")


def test_a_file_that_cannot_be_written_in_the_end(runs, mistake, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agents.durable.write", full)
    out = tmp_path / "x.html"
    assert f"cannot write '{out}': No space left on device" in mistake("report", runs["uniform"], "--out", out, "--bytes", "512")


def test_segment_draws_heat_maps(runs, tmp_path, capsysbinary):
    text = HOSTILE.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    files = ["--html", str(tmp_path / "x.html"), "--png", str(tmp_path / "x.png")]
    assert cli.main(["segment", str(runs["learned"]), text, *files]) == 0
    assert capsysbinary.readouterr().out.startswith(b"|")
    page = check((tmp_path / "x.html").read_text())
    assert page.count("div", "heat") == 1 and "<script>document.title" in page.texts["div"][0]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["segment", str(runs["learned"]), "", *files]) == 0
    check((tmp_path / "x.html").read_text())
