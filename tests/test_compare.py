import json
import math
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch

from agents import cli, compare, config, training
from agents.statistics import mean_interval, paired_difference, t_factor
from segment_env.errors import UserError

EXPERIMENT = "experiment=default_vs_uniform"
TINY = ["seeds=[3,5]", "data=files", "data.length=64", "train.rows=4", "train.bytes=2048", "train.validations=2", "train.device=cpu"]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A grid of two cells under two seeds, of 8 updates each, on 8 kB of text."""
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text(" ".join("call me ishmael some years ago never mind how long precisely".split() * 140))
    return [EXPERIMENT, *TINY, f"data.source.path={text}"]


@pytest.fixture(scope="module")
def whole(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The table of the grid, run without a break, and the folder of its cells."""
    folder = tmp_path_factory.mktemp("whole")
    return compare.run(overrides, folder), folder


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The configurations of the cells that are run from here on, in order."""
    settings, measure = [], compare.measure
    monkeypatch.setattr(compare, "_draw", lambda *_: [])  # which takes its time
    monkeypatch.setattr(compare, "measure", lambda each: (settings.append(each), measure(each))[1])
    return settings


def keys(overrides: list[str]) -> list[str]:
    """Names of the cell files that a grid would write or read."""
    return [cell.path.name for cell in compare.compose(compare.read_grid(overrides), overrides, Path())]


# --- a grid ---


def test_a_grid_gives_a_table_of_its_cells(whole: tuple[str, Path]) -> None:
    table, folder = whole
    head, _, *rows = [[text.strip() for text in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert head[:6] == ["cell", "bits per byte", "rate", "precision", "recall", "minus uniform (95% t-interval)"]
    assert [row[0] for row in rows] == ["default", "uniform"]
    cells = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert len(cells) == 4
    bits = {}
    for name, row in zip(("Reinforce", "Given"), rows, strict=True):
        mine = sorted(
            (cell for cell in cells if cell["config"]["agent"]["_target_"].endswith(name)), key=lambda cell: cell["config"]["seed"]
        )
        assert [cell["config"]["seed"] for cell in mine] == [3, 5]
        bits[name] = [cell["figures"]["bits_per_byte"] for cell in mine]
        for column, key in enumerate(("bits_per_byte", "rate", "precision", "recall"), 1):
            assert float(row[column]) == pytest.approx(sum(cell["figures"][key] for cell in mine) / 2, abs=5.1e-4)
    first, second = (a - b for a, b in zip(bits["Reinforce"], bits["Given"], strict=True))
    mean, half_width = map(float, rows[0][5].split(" ± "))
    assert mean == pytest.approx((first + second) / 2, abs=5.1e-4)
    assert half_width == pytest.approx(12.7062 * abs(first - second) / 2, abs=6e-4)  # standard error of two values: half their distance
    assert rows[1][5] == "reference"
    assert [row[8:] for row in rows] == [["2,048", "2,048"]] * 2  # decoded and read: one row a sequence in both
    learnt = [cell["calibrated"] for cell in cells if cell["calibrated"]]
    assert len(learnt) == 2 and float(rows[0][6]) == pytest.approx(sum(each["bits_per_byte"] for each in learnt) / 2, abs=5.1e-4)
    assert rows[1][6:8] == ["-", "-"]  # a rule has no logits to calibrate
    assert "sampled, uncapped, noise seed 0" in table and "text.txt (SHA-256 " in table and "seeds 3, 5" in table


def test_a_cell_file_says_what_its_figures_came_from(whole: tuple[str, Path]) -> None:
    for file in whole[1].glob("*.json"):
        cell = json.loads(file.read_text())
        assert not set(compare.GRID_KEYS) & set(cell["config"])
        assert len(cell["data_sha256"]) == 64
        assert cell["versions"]["torch"] == torch.__version__
        assert [line["update"] for line in cell["curve"]] == [4, 8]
        assert all(math.isfinite(line["validation_bits_per_byte"]) for line in cell["curve"])
    run = training.Run(cell["config"])  # it can be trained again from its file alone
    assert run.updates == cell["update"] == 8


def test_a_killed_grid_goes_on_where_it_was(
    whole: tuple[str, Path], overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", *overrides, "--cells", str(tmp_path)]
    train, begun = training.train, []

    def train_the_first(run: training.Run, *arguments, **keywords):
        begun.append((run.settings["seed"], run.settings["agent"]["_target_"].rpartition(".")[2]))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return train(run, *arguments, **keywords)

    monkeypatch.setattr(training, "train", train_the_first)
    assert cli.main(command) == 130
    assert len(list(tmp_path.iterdir())) == 1
    capsys.readouterr()
    assert cli.main(command) == 0
    assert begun == [(3, "Reinforce"), (3, "Given"), (3, "Given"), (5, "Reinforce"), (5, "Given")]
    out, err = capsys.readouterr()
    assert out == whole[0] + "\n"
    assert re.sub(r" \(.*\)", "", err).splitlines()[:-1] == [
        "cell 1 of 4: default, seed 3: done, skipped",
        "cell 2 of 4: uniform, seed 3",
        "cell 3 of 4: default, seed 5",
        "cell 4 of 4: uniform, seed 5",
    ]
    written = [tmp_path / f"default_vs_uniform{end}" for end in (".md", ".csv", "_curves.png", "_rates.png")]
    assert err.splitlines()[-1] == f"written: {', '.join(map(str, written))}"
    assert written[0].read_text() == out and sorted(tmp_path.iterdir()) == sorted([*tmp_path.glob("*.json"), *written])


def test_only_new_cells_of_a_changed_grid_are_run(whole: tuple[str, Path], overrides: list[str], measured: list[dict]) -> None:
    table, folder = whole
    assert compare.run(overrides, folder) == table and measured == []
    compare.run([*overrides, "+grid.every=['agent=every_byte']", "seeds=[3]"], folder)
    assert [settings["agent"]["policy"].get("stride") for settings in measured] == [1]
    changed = "train.optimiser.lr=1e-3"
    compare.run([*overrides, changed, "seeds=[5]"], folder)
    assert [settings["train"]["optimiser"]["lr"] for settings in measured[1:]] == [1e-3, 1e-3]


# --- what a cell's file is named after ---


def test_the_key_is_of_the_configuration_not_of_names_or_the_grid(overrides: list[str]) -> None:
    usual = keys(overrides)
    assert len(set(usual)) == 4
    assert keys([*overrides, "reference=default"]) == usual
    assert keys([*overrides, "+grid.again=['agent=uniform']"])[1:3] == [usual[1]] * 2
    assert not set(keys([*overrides, "train.rows=8"])) & set(usual)


def test_the_key_is_of_the_data_and_of_the_sources(tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules_for_a_key.py").write_text("from agents.rules import UniformStride\n\nclass Mine(UniformStride):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 100)
    grid = [
        *overrides,
        f"data.source.path={text}",
        "+grid.mine=['agent=uniform','agent.policy._target_=my_rules_for_a_key.Mine']",
        "seeds=[0]",
    ]
    before = keys(grid)
    with (tmp_path / "my_rules_for_a_key.py").open("a") as file:
        file.write("# changed\n")
    assert [a == b for a, b in zip(keys(grid), before, strict=True)] == [True, True, False]
    text.write_text("one two three " * 101)
    assert not set(keys(grid)) & set(before)


def test_the_sources_are_all_modules_but_the_programs() -> None:
    modules = compare._own_modules()
    assert {"segment_env.unroll", "segment_env.streams.text", "models.unet", "agents.learner", "agents.training"} <= set(modules)
    assert not {"agents.cli", "agents.compare", "agents.grid", "agents.tables", "agents.plots", "agents.bench"} & set(modules)


# --- columns and a scale ---

CIRCLES = {
    "data/circle.yaml": "{source: {_target_: segment_env.closed_form.CountingStream, period: '${period}'}, length: 128}",
    "model/circle.yaml": "{_target_: segment_env.closed_form.AlignedScorer, period: '${period}'}",
    "experiment/circles.yaml": """# @package _global_
        defaults: [override /data: circle, override /model: circle]
        period: 2
        price: 0.1
        train: {rows: 64, bytes: 16384, validations: 2, device: cpu}
        grid: {random: [agent=iid], often: ['agent=every_byte'], learnt: [agent=default]}
        across: {four: [period=4], eight: [period=8]}
        scale: [random, often]
        seeds: [0, 1]
        notes: ['Counting, whose cycles are the words.']
        """,
}
FEW = ["~across.eight", "~grid.learnt"]


@pytest.fixture(scope="module")
def circles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's configurations and an experiment on scorers without parameters, where a rule has nothing to learn."""
    folder = tmp_path_factory.mktemp("circles") / "configs"
    shutil.copytree(config.find_folder(), folder)
    for name, text in CIRCLES.items():
        (folder / name).write_text(textwrap.dedent(text.replace("# @package _global_\n", " " * 8 + "# @package _global_\n")))
    return folder


@pytest.fixture
def in_circles(circles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_folder", lambda: circles)
    monkeypatch.setattr("agents.data._GENERATED_BYTES", 1 << 13)


def test_rows_across_columns_survive_a_kill_and_train_only_what_learns(
    in_circles: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, trained = training.train, []

    def train_until_the_third(run: training.Run, *arguments, **keywords):
        trained.append((run.settings["seed"], run.settings["period"]))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train(run, *arguments, **keywords)

    monkeypatch.setattr(training, "train", train_until_the_third)
    command = ["compare", "experiment=circles", "--cells", str(tmp_path)]
    assert cli.main(command) == 130
    assert len(list(tmp_path.iterdir())) == 8  # all of seed 0, and of seed 1 the two that learn nothing
    capsys.readouterr()
    assert cli.main(command) == 0
    assert trained == [(0, 4), (0, 8), (1, 4), (1, 4), (1, 8)]
    out, err = capsys.readouterr()
    assert err.splitlines()[7].startswith("cell 8 of 12: four, often, seed 1: done, skipped (")
    assert err.splitlines()[-1] == f"written: {', '.join(str(tmp_path / f'circles{end}') for end in ('.md', '.csv', '_curves.png'))}"
    head, *lines = (tmp_path / "circles.csv").read_text().splitlines()
    assert (
        head.startswith("column,row,seed,update,bytes_read,bytes_decoded,bits_per_byte,rate,") and ",reward," in head and len(lines) == 12
    )
    heads = [[text.strip() for text in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith(("| score", "| often"))]
    assert heads == [["score", "four", "eight"], ["often", "1", "1"], ["often", "1.000", "1.000"]]  # scores, then rates
    assert out.endswith(", cpu.\n\nCounting, whose cycles are the words.\n")
    cells = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    rules = [cell for cell in cells if cell["config"]["agent"]["_target_"] == "agents.agent.Given"]
    assert len(rules) == 8
    for cell in cells:
        assert [line["update"] for line in cell["curve"]] == ([] if cell in rules else [1, 2])
        assert (cell["update"], cell["bytes_decoded"], cell["bytes_read"]) == ((0, 0, 0) if cell in rules else (2, 16384, 16384))
        assert math.isfinite(cell["figures"]["reward"]) and math.isfinite(cell["validation"]["reward"])
        assert not set(compare.GRID_KEYS) & set(cell["config"])


def test_a_table_per_column_without_a_scale(in_circles: None, tmp_path: Path) -> None:
    grid = ["experiment=circles", "~scale", "+reference=random", "~grid.learnt", "seeds=[0]"]
    empty, *tables = compare.run(grid, tmp_path).split("### ")
    assert empty == "" and [text.splitlines()[0] for text in tables] == ["four", "eight"]
    for text in tables:
        assert [line.split()[1] for line in text.splitlines() if line.startswith("|")] == ["cell", "-" * 6, "random", "often"]
    assert sorted(path.name for path in tmp_path.glob("circles*")) == [
        "circles.csv",
        "circles.md",
        "circles_rates.png",
    ]  # nothing has a curve


def test_a_column_without_overrides_names_the_cells_as_no_column_does(overrides: list[str]) -> None:
    assert keys([*overrides, "+across={all:[]}"]) == keys(overrides)


def test_of_overrides_that_disagree_the_row_holds_then_the_column(in_circles: None) -> None:
    grid = ["experiment=circles", "period=3", "train.rows=32", "+grid.odd=['agent=default','train.rows=8']"]
    grid += ["~across.eight", "across.four=['period=4','train.rows=16']", "seeds=[7]"]
    cells = {cell.name: cell.settings for cell in compare.compose(compare.read_grid(grid), grid, Path())}
    assert {settings["period"] for settings in cells.values()} == {4}
    assert {name: settings["train"]["rows"] for name, settings in cells.items()} == {"random": 16, "often": 16, "learnt": 16, "odd": 8}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            [*FEW, "+grid.odd=['period=5']"],
            "cell 'odd' of column 'four' reads other data than the reference 'random': they cannot be paired",
        ),
        ([*FEW, "+grid.odd=['price=0.2']"], "cell 'odd' of column 'four' pays agent.price=0.2 where 'random' pays 0.1: their rewards"),
        ([*FEW, "+grid.odd=['agent=papper']"], "cell 'odd' of column 'four': agent=papper: there is no such agent"),
        ([*FEW, "+across.none=['period=1']"], "cell 'random' of column 'none': segment_env.closed_form.CountingStream cannot be built"),
        (["~across", "+across=[four]"], "across must map names of columns to lists of overrides, at least one, got ['four']"),
        (["across.four=period"], "across.four must be a list of overrides"),
        (["across.four=['seed=2']"], "seed=2: every cell is run with each of the experiment's seeds"),
        (["scale=random"], "scale must name two different cells of the grid, those of score 0 and 1, as in [random,oracle]"),
        (["scale=[random,random]"], "scale must name two different cells"),
        (["scale=[random,oracel]"], "scale=oracel is no cell of the grid; choose from random, often, learnt"),
        (["~scale"], "the experiment has a grid but no 'reference': give it one with +reference=VALUE"),
        (["+reference=none"], "reference=none is no cell of the grid"),
        (["notes=one line"], "notes must be a list of lines, got 'one line'"),
        (["~across", "+accross={four:[]}"], "the experiment has a key 'accross'; did you mean 'across'?"),
    ],
)
def test_a_mistake_in_columns_or_scale_is_one_line(
    wrong: list[str], message: str, in_circles: None, tmp_path: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "experiment=circles", *wrong, "--cells", str(tmp_path / "cells")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert measured == [] and not (tmp_path / "cells").exists()


# --- pairing ---


@pytest.mark.parametrize("agent", ["uniform", "iid", "every_byte", "paper"])
def test_models_of_one_seed_begin_alike_whatever_the_agent(agent: str) -> None:
    def initial(agent: str, seed: int) -> dict[str, torch.Tensor]:
        return training.Run(config.load([f"agent={agent}", f"seed={seed}", "train.device=cpu"])).model.state_dict()

    default, other, reseeded = initial("default", 1), initial(agent, 1), initial(agent, 2)
    assert default.keys() == other.keys()
    assert all(torch.equal(default[key], other[key]) for key in default)
    assert not all(torch.equal(reseeded[key], other[key]) for key in default)


# Two-sided, from printed tables of Student's t (95% and 99%).
@pytest.mark.parametrize(
    ("degrees", "at_95", "at_99"),
    [(1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604), (5, 2.571, 4.032), (9, 2.262, 3.250)]
    + [(10, 2.228, 3.169), (30, 2.042, 2.750), (120, 1.980, 2.617), (100_000, 1.960, 2.576)],
)
def test_t_factors_are_those_of_the_tables(degrees: int, at_95: float, at_99: float) -> None:
    assert t_factor(0.95, degrees) == pytest.approx(at_95, abs=5.1e-4)
    assert t_factor(0.99, degrees) == pytest.approx(at_99, abs=5.1e-4)


def test_t_factors_of_one_and_two_degrees_have_closed_forms() -> None:
    for confidence in (1e-3, 0.5, 0.9, 0.95, 0.9999):
        assert t_factor(confidence, 1) == pytest.approx(math.tan(math.pi * confidence / 2), rel=1e-9)
        assert t_factor(confidence, 2) == pytest.approx(confidence * math.sqrt(2 / (1 - confidence**2)), rel=1e-9)


def test_a_paired_difference_by_hand() -> None:
    mean, half_width = paired_difference([2.0, 3.0, 5.0], [1.0, 1.0, 2.0])  # 1, 2, 3: standard deviation 1
    assert mean == 2
    assert half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert paired_difference([1.5, 2.5], [1.0, 2.0]) == (0.5, 0)
    assert mean_interval([1.0, 2.0, 3.0]) == (mean, half_width)


def test_a_single_pair_has_no_interval() -> None:
    mean, half_width = paired_difference([2.0], [1.5])
    assert mean == 0.5 and math.isnan(half_width)


@pytest.mark.parametrize(("values", "reference"), [([], []), ([1.0], [1.0, 2.0])])
def test_unpaired_values_are_refused(values: list[float], reference: list[float]) -> None:
    with pytest.raises(ValueError, match="pairs need"):
        paired_difference(values, reference)
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])


def test_one_seed_gives_a_table_without_an_interval(whole: tuple[str, Path], overrides: list[str]) -> None:
    table = compare.run([*overrides, "seeds=[3]"], whole[1])
    assert ", no interval |" in table and "±" not in table and "seed 3 alone" in table and "nan" not in table


# --- mistakes ---


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "compare needs an experiment, as in experiment=NAME; choose from ablations, agents, default_vs_uniform, "),
        ([EXPERIMENT, "~grid"], "experiment=default_vs_uniform has no grid to compare"),
        ([EXPERIMENT, "~reference"], "no 'reference': give it one with +reference=VALUE"),
        ([EXPERIMENT, "grid=null"], "grid must map names of cells to lists"),
        ([EXPERIMENT, "grid.uniform=[{agent:uniform}]"], "grid.uniform must be a list of overrides such as"),
        ([EXPERIMENT, "reference=paper"], "reference=paper is no cell of the grid; choose from default, uniform"),
        ([EXPERIMENT, "seeds=[]"], "seeds must be a list of different whole numbers, at least one, got []"),
        ([EXPERIMENT, "seeds=3"], "seeds must be a list"),
        ([EXPERIMENT, "seeds=[1,1]"], "seeds must be a list of different"),
        ([EXPERIMENT, "seed=1"], "seed=1: every cell is run with each of the experiment's seeds"),
        ([EXPERIMENT, "+grid.third=['agent=papper']"], "cell 'third': agent=papper: there is no such agent; did you mean 'paper'?"),
        ([EXPERIMENT, "+grid.third=['agent=paired','train.rows=3']"], "cell 'third': agent.samples=2 boundary samples"),
        ([EXPERIMENT, "+grid.third=['data=made_up']"], "cell 'third' reads other data than the reference 'uniform'"),
        ([EXPERIMENT, "agent=nothing"], "there is no such agent"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_run(
    wrong: list[str], message: str, tmp_path: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", *wrong, "--cells", str(tmp_path / "cells")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err
    assert measured == [] and not (tmp_path / "cells").exists()


def test_a_damaged_cell_file_is_named(
    overrides: list[str], tmp_path: Path, measured: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / keys(overrides)[-1]
    damaged.write_text('{"figures": {"bits_per')
    assert cli.main(["compare", *overrides, "--cells", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert err == f"segment-env: cell file '{damaged}' is damaged: remove it to run its cell anew\n" and out == ""
    assert measured == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": 1}', '{"figures": {"bits_per_byte": 2.0}}'])
def test_a_file_that_is_no_whole_cell_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "cell.json").write_text(text)
    with pytest.raises(UserError, match="cell.json' is damaged"):
        compare._read(tmp_path / "cell.json")


@pytest.mark.parametrize("part, key", [("figures", "reward"), ("versions", "torch"), ("validation", "rate")])
def test_a_cell_that_lacks_a_number_is_damaged(part: str, key: str, whole: tuple[str, Path], tmp_path: Path) -> None:
    cell = json.loads(next(whole[1].glob("*.json")).read_text())
    del cell[part][key]
    (tmp_path / "cell.json").write_text(json.dumps(cell))
    with pytest.raises(UserError, match="cell.json' is damaged"):
        compare._read(tmp_path / "cell.json")


def test_a_folder_of_cells_that_cannot_be_is_refused(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["compare", *overrides, "--cells", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"segment-env: cannot write to the folder of cells '{tmp_path / 'file'}': ")
