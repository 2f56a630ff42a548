import dataclasses
import functools
import re
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st

from agents import config
from segment_env.errors import UserError

FILES = {
    "config.yaml": """
        defaults: [{data: text}, {agent: plain}, {train: short}, _self_, {experiment: null}]
        seed: 0
        out: runs/${agent.name}
        """,
    "data/text.yaml": "length: 512",
    "data/speech.yaml": "length: 2048",
    "agent/plain.yaml": "{name: plain, gamma: 0.99, steps: [centre, normalise]}",
    "agent/paired/loo.yaml": "{name: loo, gamma: 0.9}",
    "train/short.yaml": "{steps: 10, rate: {target: 0.2}, seed: '${seed}'}",
    "train/unset.yaml": "steps: ???",
    "train/broken.yaml": "{steps: '${nothing.here}'}",
    "train/malformed.yaml": "{steps: [1",
    "experiment/long.yaml": """
        # @package _global_
        defaults: [{override /agent: paired/loo}]
        seed: 7
        train: {steps: 1000}
        grid: {agent.gamma: [0.9, 0.99]}
        """,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("configs")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("\n".join(line[8:] if line.startswith(" " * 8) else line for line in text.splitlines()))
    return root


def refusal(call, *arguments, **keywords) -> str:
    """The message of the mistake that the call is, which has to be one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **keywords)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# --- the library's own configurations ---


def test_the_default_configuration_composes() -> None:
    loaded = config.load([])
    assert loaded["seed"] == 0
    assert {"data", "model", "agent", "train"} <= set(loaded)


@pytest.mark.parametrize("file", sorted(config.find_folder().glob("*/**/*.yaml")), ids=lambda file: file.stem)
def test_every_option_of_every_group_composes(file: Path) -> None:
    group, *option = file.relative_to(config.find_folder()).with_suffix("").parts
    try:
        assert config.load([f"{group}={'/'.join(option)}"])
    except UserError as error:
        assert "has no value: give it one with" in str(error)  # such as the paths of one's own files


# --- load ---


def test_load_gives_plain_containers_with_interpolations_resolved(folder: Path) -> None:
    loaded = config.load(folder=folder)
    assert loaded == {
        "data": {"length": 512},
        "agent": {"name": "plain", "gamma": 0.99, "steps": ["centre", "normalise"]},
        "train": {"steps": 10, "rate": {"target": 0.2}, "seed": 0},
        "seed": 0,
        "out": "runs/plain",
    }
    assert type(loaded) is type(loaded["train"]["rate"]) is dict and type(loaded["agent"]["steps"]) is list


def test_overrides_pick_change_add_and_remove(folder: Path) -> None:
    loaded = config.load(["agent=paired/loo", "train.rate.target=1e-1", "+train.note='a=b, c'", "~train.steps", "seed=1", "seed=2"], folder)
    assert loaded["agent"] == {"name": "loo", "gamma": 0.9}
    assert loaded["train"] == {"rate": {"target": 0.1}, "note": "a=b, c", "seed": 2}
    assert loaded["out"] == "runs/loo"


def test_an_experiment_overrides_globally_and_the_command_line_overrides_it(folder: Path) -> None:
    loaded = config.load(["experiment=long"], folder)
    assert (loaded["seed"], loaded["train"]["steps"], loaded["agent"]["name"]) == (7, 1000, "loo")
    assert loaded["grid"] == {"agent.gamma": [0.9, 0.99]}
    loaded = config.load(["train.steps=5", "agent=plain", "experiment=long"], folder)
    assert (loaded["seed"], loaded["train"]["steps"], loaded["agent"]["name"]) == (7, 5, "plain")


def test_load_leaves_an_outer_hydra_as_it_was(folder: Path, tmp_path: Path) -> None:
    assert not GlobalHydra.instance().is_initialized()
    config.load(folder=folder)
    assert not GlobalHydra.instance().is_initialized()
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        outer = GlobalHydra.instance().hydra
        config.load(folder=folder)
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agnet=plain", "agnet=plain: there is no key 'agnet'; did you mean 'agent'?"),
        ("agent=plian", "agent=plian: there is no such agent; did you mean 'plain'?"),
        ("agent=nothing_like_it", "agent=nothing_like_it: there is no such agent; choose from paired/loo, plain"),
        ("agent=null", "agent=null: there is no such agent; choose from paired/loo, plain"),
        ("agent=3", "agent=3: there is no such agent; choose from paired/loo, plain"),
        ("experiment=other", "experiment=other: there is no such experiment; choose from long"),
        ("~agent", "~agent: a group can only be given another option, as in agent=NAME"),
        ("+agent=plain", "+agent=plain: a group can only be given another option, as in agent=NAME"),
        ("train.stpes=3", "train.stpes=3: there is no key 'train.stpes'; did you mean 'train.steps'?"),
        ("train.zzz=3", "train.zzz=3: there is no key 'train.zzz'; choose from train.rate, train.seed, train.steps"),
        ("train.rate.q=3", "train.rate.q=3: there is no key 'train.rate.q'; choose from train.rate.target"),
        ("train.steps.q=3", "train.steps.q=3: there is no key 'train.steps.q'; did you mean 'train.steps'?"),
        ("trian.steps=3", "trian.steps=3: there is no key 'trian.steps'; did you mean 'train.steps'?"),
        ("gamma=1", "gamma=1: there is no key 'gamma'; did you mean 'agent.gamma'?"),
        ("zzz=3", "zzz=3: there is no key 'zzz'; choose from agent, data, diagnostic, experiment, out, seed, train"),
        ("~zzz", "~zzz: there is no key 'zzz'; choose from agent, data, diagnostic, experiment, out, seed, train"),
        ("train.steps", "cannot read 'train.steps': it should be KEY=VALUE"),
        ("", "cannot read '': it should be KEY=VALUE"),
        ("out=a=b", """cannot read 'out=a=b': it should be KEY=VALUE; a value with special characters needs quotes, as in KEY='"a=b"'"""),
        ("train.steps=[1,2", "cannot read 'train.steps=[1,2': it should be KEY=VALUE; a value with special characters needs quotes"),
        ("train.steps=1,2", "'train.steps=1,2' gives several values where one is needed; a list is written in brackets, as in KEY=[1,2]"),
        ("hydra.run.dir=x", "'hydra.run.dir=x' would configure hydra, which only composes configurations here"),
        ("train=unset", "train.steps has no value: give it one with train.steps=VALUE"),
        ("train.steps=???", "train.steps has no value: give it one with train.steps=VALUE"),
        ("train=broken", "the configuration does not compose: Interpolation key 'nothing.here' not found full_key: train.steps"),
        ("train=malformed", "the configuration does not compose: while parsing a flow sequence"),
        ("seed=${oc.env:NOT_SET}", "the configuration does not compose: KeyError raised while resolving interpolation"),
    ],
)
def test_a_mistake_in_an_override_is_one_line(folder: Path, override: str, message: str) -> None:
    assert refusal(config.load, ["agent.gamma=0.5", override], folder).startswith(message)


def test_an_unknown_key_is_named_beside_a_chosen_option_and_experiment(folder: Path) -> None:
    assert "did you mean 'agent.gamma'" in refusal(config.load, ["experiment=long", "agent.gama=1"], folder)


def test_a_folder_without_configurations_is_refused(tmp_path: Path) -> None:
    assert refusal(config.load, [], tmp_path).endswith("is no folder of configurations: it has no config.yaml")


# --- build ---

OWN = """
import dataclasses
from torch import nn
@dataclasses.dataclass
class Step:
    weight: float = 1.0
@dataclasses.dataclass
class Agent:
    gamma: float
    steps: list = dataclasses.field(default_factory=list)
    model: object = None
    def __post_init__(self):
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma should lie in [0, 1],\\nnot {self.gamma}")
def anything(**given): return given
def pair(first, second): return first, second
def refuses():
    from segment_env.errors import UserError
    raise UserError("refused")
def breaks(): raise RuntimeError("a fault, not a mistake")
class Meta(type):
    def __call__(cls, *given, **named): return super().__call__(*given, **named)
class Hidden(metaclass=Meta):
    def __init__(self, width): self.width = width
constant = 3
"""


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A researcher's own files, in the folder where the program is started."""
    (tmp_path / "own_agent.py").write_text(OWN)
    (tmp_path / "own_typo.py").write_text("x = (")
    (tmp_path / "own_fault.py").write_text("\n1 / 0")
    (tmp_path / "own_import.py").write_text("import not_installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in __import__("sys").path if entry])
    for name in ("own_agent", "own_typo", "own_fault", "own_import"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)


def test_build_makes_nested_objects_of_a_file_in_the_current_folder() -> None:
    node = {"_target_": "own_agent.Agent", "gamma": 0.5, "steps": [{"_target_": "own_agent.Step"}, {"plain": [1, None]}]}
    agent = config.build(node)
    assert type(agent).__name__ == "Agent" and agent.gamma == 0.5
    assert dataclasses.asdict(agent.steps[0]) == {"weight": 1.0}
    assert agent.steps[1] == {"plain": [1, None]} and type(agent.steps) is list and type(agent.steps[1]) is dict


def test_build_hands_extra_arguments_on_untouched() -> None:
    model = {"live": object()}
    agent = config.build({"_target_": "own_agent.Agent", "gamma": 0.5}, model=model, gamma=0.25)
    assert agent.model is model and agent.gamma == 0.25
    assert config.build({"_target_": "own_agent.anything", "a": 1}, b=2) == {"a": 1, "b": 2}


def test_build_knows_positions_and_partial_objects() -> None:
    assert config.build({"_target_": "own_agent.pair", "_args_": [1, 2]}) == (1, 2)
    later = config.build({"_target_": "own_agent.pair", "_partial_": True, "first": 1})
    assert isinstance(later, functools.partial) and later(second=2) == (1, 2)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"gamma": 1}, "there is nothing to build here, '_target_' is missing beside gamma"),
        ({"_target_": "Agent"}, "_target_=Agent is no dotted path such as package.module.Name"),
        ({"_target_": "own..Agent"}, "_target_=own..Agent is no dotted path such as package.module.Name"),
        ({"_target_": 3}, "_target_=3 is no dotted path such as package.module.Name"),
        ({"_target_": "nowhere.Agent"}, "_target_=nowhere.Agent cannot be imported: No module named 'nowhere'"),
        (
            {"_target_": "own_agent.Agnet"},
            "_target_=own_agent.Agnet cannot be imported: there is no 'Agnet' in own_agent; did you mean 'Agent'?",
        ),
        ({"_target_": "own_agent.Step.fly"}, "_target_=own_agent.Step.fly cannot be imported: "),
        ({"_target_": "own_import.Agent"}, "_target_=own_import.Agent cannot be imported: No module named 'not_installed'"),
        (
            {"_target_": "own_typo.Agent"},
            "_target_=own_typo.Agent cannot be imported: SyntaxError: '(' was never closed (own_typo.py, line 1)",
        ),
        (
            {"_target_": "own_fault.Agent"},
            "_target_=own_fault.Agent cannot be imported: ZeroDivisionError: division by zero (own_fault.py, line 2)",
        ),
        ({"_target_": "own_agent.constant"}, "_target_=own_agent.constant is of type int: it should be a class or a function"),
        ({"_target_": "own_agent.Agent", "gama": 1}, "own_agent.Agent takes no keyword 'gama'; did you mean 'gamma'?"),
        ({"_target_": "own_agent.Step", "q": 1}, "own_agent.Step takes no keyword 'q'; choose from weight"),
        ({"_target_": "own_agent.Agent"}, "own_agent.Agent needs a value for 'gamma', and was given none"),
        ({"_target_": "own_agent.Hidden", "widht": 1}, "own_agent.Hidden takes no keyword 'widht'; did you mean 'width'?"),
        (
            {"_target_": "own_agent.anything", "steps": [{"_target_": "own_agent.Step", "wieght": 1}]},
            "own_agent.Step takes no keyword 'wieght'; did you mean 'weight'?",
        ),
        ({"_target_": "own_agent.Agent", "gamma": 2}, "own_agent.Agent cannot be built: gamma should lie in [0, 1], not 2"),
        (
            {"_target_": "own_agent.anything", "inner": {"_target_": "own_agent.Agent", "gamma": 2}},
            "own_agent.Agent cannot be built: gamma",
        ),
        ({"_target_": "own_agent.refuses"}, "refused"),
        ({"_target_": "own_agent.anything", "inner": {"_target_": "own_agent.refuses"}}, "refused"),
        ({"_target_": "own_agent.Agent", "gamma": "x"}, "own_agent.Agent cannot be built: '<=' not supported between"),
    ],
)
def test_a_mistake_in_a_node_is_one_line(node: dict, message: str) -> None:
    assert refusal(config.build, node).startswith(message)


def test_a_fault_in_a_constructor_is_not_called_a_mistake() -> None:
    for node in ({"_target_": "own_agent.breaks"}, {"_target_": "own_agent.anything", "inner": {"_target_": "own_agent.breaks"}}):
        with pytest.raises(RuntimeError, match="a fault"):
            config.build(node)


# --- save and read ---

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_characters="$?\\", codec="ascii")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(re.compile(r"[a-z_]{1,8}", re.ASCII), fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(re.compile(r"[a-z_]{1,8}", re.ASCII), fullmatch=True), values, max_size=4))
def test_a_saved_configuration_reads_back(tmp_path_factory: pytest.TempPathFactory, saved: dict) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.yaml"
    config.save(saved, path)
    assert config.read(path) == saved


def test_a_composed_configuration_reads_back(folder: Path, tmp_path: Path) -> None:
    loaded = config.load(["experiment=long", "+train.tiny=1e-5", "+train.word='1e-5'", "+train.path=../x y"], folder)
    config.save(loaded, tmp_path / "config.yaml")
    assert config.read(tmp_path / "config.yaml") == loaded


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    assert "cannot read the configuration" in refusal(config.read, tmp_path / "nowhere.yaml")
    for text in (b"a: [1", b"- 1", b"\xff\xfe\x00", b"a: 1\n  b: 2"):
        (tmp_path / "bad.yaml").write_bytes(text)
        assert "bad.yaml is not a configuration" in refusal(config.read, tmp_path / "bad.yaml")
