"""Every file of ``configs/`` makes something that runs, and mistakes in what an agent is made of are named.

A configuration is tried as ``train`` and ``compare`` try one: built, its first batch played and scored, its held-out data opened.
"""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from agents import cli, compare, config, training
from agents.compare import PROGRAMS
from segment_env.errors import UserError

FOLDER = config.find_folder()
SMALL = ["train.rows=4", "train.bytes=1024", "data.length=32", "train.device=cpu"]
DIAGNOSTIC = ["diagnostic=delimiter", "rate=none"]
WORDS = ["diagnostic=words", "rate=none"]


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))


def tried(*overrides: str) -> training.Run:
    run = training.Run(config.load([*SMALL, *overrides]))
    if run.learns:
        run.rehearse()
    run.evaluate("validation", 256)
    return run


def test_no_group_is_forgotten() -> None:
    groups = {folder.name for folder in FOLDER.iterdir() if folder.is_dir()}
    assert groups == {"agent", "data", "diagnostic", "experiment", "model", "pooling", "rate", "train"}
    assert options("train") == ["default"]
    assert "compare" in PROGRAMS


GATED = [name for name in options("agent") if "StraightThrough" in str(config.load([f"agent={name}"])["agent"]["_target_"])]


@pytest.mark.parametrize("name", options("agent"))
def test_agents(name: str) -> None:
    if name in GATED:  # a scorer in closed form has no pooling that its loss could reach a gate through
        with pytest.raises(UserError, match="which Delimiter does not read"):
            tried(f"agent={name}", *DIAGNOSTIC)
    run = tried(f"agent={name}", *([] if name in GATED else WORDS if name == "truth" else DIAGNOSTIC))
    if name != "oracle":  # which is one of diagnostic problems
        tried(f"agent={name}", "data=made_up")
    if run.learns:
        learner = run.learner()
        before = [parameter.clone() for parameter in run.agent.parameters()]
        batches = run.batches(learner)
        metrics = [learner.update(next(batches)) for _ in range(2)]
        assert all(value.isfinite().all() for each in metrics for value in each.values())
        assert not all(torch.equal(old, new) for old, new in zip(before, run.agent.parameters(), strict=True))


@pytest.mark.parametrize("name", ["a2c", "ppo", "ppo_kl", "grpo", "rloo"])
def test_agents_on_every_device(name: str, device: torch.device) -> None:
    run = training.Run(config.load([*SMALL, f"agent={name}", "data=made_up", f"train.device={device.type}", "rate=lagrangian"]))
    learner = run.learner()
    metrics = learner.update(next(run.batches(learner)))
    assert {value.device.type for value in metrics.values()} == {device.type}
    assert all(value.isfinite().all() for value in metrics.values())


def test_an_agent_brings_its_pooling() -> None:
    pairs = {name: type(tried(f"agent={name}", "data=made_up").model.pooling).__name__ for name in ("default", *GATED)}
    assert pairs["default"] == "SelectAdd" and pairs["hnet"] == "SelectSmooth" and pairs["gumbel"] == "MeanAdd"
    assert len(GATED) >= 2 and "SelectAdd" not in [pairs[name] for name in GATED]


@pytest.mark.parametrize("name", options("pooling"))
@pytest.mark.parametrize("agent", ["default", "uniform", *GATED])
def test_poolings(name: str, agent: str) -> None:
    """All pairs with all kinds of agents; what would silently learn nothing is refused, whatever the agent's own choice."""
    overrides = [f"pooling={name}", f"agent={agent}", "data=made_up"]
    if (agent in GATED and name == "select") or (agent not in GATED and name == "smoothing"):
        with pytest.raises(UserError, match="(does not read|gives none): use another pooling, or another agent"):
            tried(*overrides)
    else:
        tried(*overrides)


@pytest.mark.parametrize("name", [name for name in options("model") if name != "closed_form"])
@pytest.mark.parametrize("pooling", options("pooling"))
def test_every_size_takes_every_pooling(name: str, pooling: str) -> None:
    with torch.device("meta"):
        model = config.build(config.load([f"model={name}", f"pooling={pooling}"])["model"])
    assert all(parameter.shape[-1] == model.width for parameter in model.pooling.parameters())


@pytest.mark.parametrize("name", options("rate"))
@pytest.mark.parametrize("agent", ["default", "ppo"])
def test_rates(name: str, agent: str) -> None:
    run = tried(f"rate={name}", f"agent={agent}", "data=made_up")
    assert type(run.agent.rate).__name__.lower() == {"none": "free", "pi": "pi"}.get(name, name.replace("_", ""))


@pytest.mark.parametrize("name", options("data"))
def test_data(name: str, tmp_path: Path) -> None:
    """Those of files on what stands for them; those of the hub on a folder laid out like theirs, which the same code opens."""
    column = {"codeparrot": "content"}.get(name, "text")
    documents = [f"{i} " + "Call me Ishmael. " * 300 for i in range(80)]
    if name == "files":
        (tmp_path / "text.txt").write_text(documents[0])
    elif name == "folder":
        for i, document in enumerate(documents):
            (tmp_path / f"{i}.txt").write_text(document)
    elif name in ("parquet", "fineweb"):
        for shard in range(2):
            pyarrow.parquet.write_table(pa.table({column: documents[shard::2]}), tmp_path / f"{shard}.parquet")
        card = {"configs": [{"config_name": "sample-100BT", "data_files": "*.parquet"}]}
        (tmp_path / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    else:
        with gzip.open(tmp_path / "0.json.gz", "wt") as file:
            file.writelines(json.dumps({column: document}) + "\n" for document in documents)
    embedded = name in ("made_up", "moby_dick", "standard_library")
    tried(f"data={name}", *([] if embedded else [f"data.source.path={tmp_path}"]))


@pytest.mark.parametrize("name", options("diagnostic"))
def test_diagnostics(name: str) -> None:
    """The price and the target that a problem is shipped with are those of its docstring."""
    run = tried(f"diagnostic={name}", "agent=oracle")
    assert run.source is not run.model and type(run.source) is type(run.model)
    assert run.agent.price == run.source.default_price
    assert run.settings["target"] == pytest.approx(run.source.rate, abs=1e-4)


@pytest.mark.parametrize("name", options("model"))
def test_models(name: str) -> None:
    if name == "closed_form":
        tried("model=closed_form", *DIAGNOSTIC)
    else:
        with torch.device("meta"):
            model = config.build(config.load([f"model={name}"])["model"])
        assert sum(parameter.numel() for parameter in model.parameters()) > 1e6


PAPER = {"paper_147m_fineweb": ("147M", 11_444), "paper_90m_codeparrot": ("90M", 6_485)}  #: tests/test_paper_runs.py trains them


# experiment=estimators is run by tests/test_variance.py
@pytest.mark.parametrize("name", [name for name in options("experiment") if name != "estimators" and name not in PAPER])
def test_experiments(name: str, tmp_path: Path) -> None:
    """All rows of the first column can be built, and their first batch played."""
    overrides = [f"experiment={name}", "seeds=[0]", *SMALL]
    for column in list(compare.read_grid(overrides).columns)[1:]:
        overrides.append(f"~across.{column}")
    grid = compare.read_grid(overrides)
    assert len(list(compare.compose(grid, overrides, tmp_path))) == len(grid.rows)


@pytest.mark.parametrize("name", PAPER)
def test_runs_of_the_paper(name: str) -> None:
    settings = config.load([f"experiment={name}"])
    size, updates = PAPER[name]
    train, agent = settings["train"], settings["agent"]
    assert settings["model"]["size"] == size and settings["data"]["source"]["_target_"] == "segment_env.streams.HubDocuments"
    assert round(train["bytes"] / (train["rows"] * settings["data"]["length"])) == updates
    assert agent["rate"]["_target_"] == "agents.rates.LogitPressure" and agent["rate"]["target"] == 0.2
    assert list(agent["advantage"]) == ["early_exit", "discounted_return", "batch_relative"]
    assert config.differences(config.load(["agent=paper"])["agent"], agent) == "", "the paper's agent as it is, every value said again"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("data=parquet", "data.source.path has no value: give it one with data.source.path=VALUE"),
        ("data=parquet data.source.path=nowhere", "no file or folder 'nowhere'; give the path of a parquet file or of a folder of them"),
        ("data=jsonl data.source.path=x data.source.workers=-1", "data.source.workers must be a whole number of at least 0, got -1"),
        ("data=folder data.source.path=x +data.source.bufer=3", "takes no keyword 'bufer'; did you mean 'buffer'?"),
        ("agent=ppo agent.lr_scal=3", "there is no key 'agent.lr_scal'; did you mean 'agent.lr_scale'?"),
        ("agent=ppo +agent.lr_scal=3", "agents.loss_module.LossModuleAgent takes no keyword 'lr_scal'; did you mean 'lr_scale'?"),
        ("agent=ppo +agent.objective.clip=3", "ClipPPOLoss takes no keyword 'clip'"),
        ("agent=ppo +agent.objective.critic_coef=3", "ClipPPOLoss takes no keyword 'critic_coef'; did you mean 'critic_coeff'?"),
        (
            "agent=ppo agent.objective._target_=torchrl.objectives.ClipPPOLos",
            "there is no 'ClipPPOLos' in torchrl.objectives; did you mean",
        ),
        ("agent=ppo agent.objective._target_=math.pi", "_target_=math.pi is of type float: it should be a class or a function"),
        ("agent=ppo agent.critic=null", "the advantage step gae needs a critic, and agent.critic is missing"),
        ("agent=a2c agent.critic=null agent.advantage.gae=null", "A2CLoss cannot be built"),
        (
            "agent=grpo agent.samples=3",
            "agent.samples=3 boundary samples per sequence do not fill a share agent.samples_share=1.0 of 4 rows",
        ),
        ("agent=grpo agent.samples=1", "group_relative needs agent.samples of 2 or more and agent.samples_share above 0, got 1 and 1.0"),
        ("agent=ppo agent.encoder_grad=true", "agent.encoder_grad=true needs one epoch on live states, but agent.epochs=4"),
        ("agent=ppo agent.epochs=0", "agent.epochs must be a whole number of at least 1, got 0"),
        ("agent=ppo gamma=1.05", "gamma must lie in [0, 1], got 1.05"),
        ("agent=ppo gamma=abc", "gamma must lie in [0, 1], got abc"),
        ("gamma=null", "gamma must lie in [0, 1], got None"),
        ("agent=ppo agent.objective.loss_critic_type=l3", "the configuration cannot be trained: Unknown loss l3 (NotImplementedError in"),
        ("agent=ppo agent.objective.clip_epsilon=null", "agent.objective ClipPPOLoss cannot be built"),
        ("agent=ppo agent.critic.hidden_units=1.5", "agent.critic.hidden_units must be a whole number from 0 on, got 1.5"),
        ("agent=ppo agent.critic_lr_scale=-1", "agent.critic_lr_scale must be a number and not negative, got -1"),
        ("agent=ppo agent.policy_weight=nan", "agent.policy_weight must be a number and not negative, got nan"),
        ("price=nan", "agent.price must be a number of nats, got nan"),
        ("agent=oracle", "Corpus has no known best policy: the oracle is one of diagnostic=NAME"),
        (
            "agent=grpo ~agent.policy +agent.policy={_target_:agents.rules.IidRandom,rate:0.2}",
            "IidRandom has no parameters to learn: use the agent Given for it",
        ),
        ("agent=hnet agent.soft_cap=6", "there is no key 'agent.soft_cap'"),
        ("agent=hnet +agent.soft_cap=6", "agent.epochs must be 1 and agent.soft_cap null, got 1 and 6"),
        ("agent=hnet pooling=select", "CosineRouting learns through its gate, which SelectAdd does not read: use another pooling"),
        ("pooling=smoothing", "SelectSmooth reads the gate of a policy, and WindowPolicy gives none: use another pooling"),
        ("agent=gumbel diagnostic=delimiter", "GumbelPolicy learns through its gate, which Delimiter does not read"),
        (
            "agent=bpe agent.policy.vocabulary=256",
            "agent.policy.vocabulary must be a whole number above 256, as the bytes are in it, got 256",
        ),
        ("agent=entropy target=1.5", "the rate of agent.policy must lie strictly between 0 and 1 (boundaries per byte), got 1.5"),
        ("agent=exact_random target=0", "a rate must lie strictly between 0 and 1 (boundaries per byte), got 0"),
        ("agent=whitespace +agent.policy.first=true", "agents.text_rules.Whitespace takes no keyword 'first'; did you mean 'first_only'?"),
        ("agent=truth", "Corpus has no known word starts: agent=truth is for data=made_up and diagnostic=words"),
        (
            "agent=spacebyte diagnostic=silence rate=none",
            "SpaceByte is a rule of text, but the data's unit is a sample: choose a rule that needs no text",
        ),
        ("rate=pid", "rate=pid: there is no such rate; did you mean 'pi'?"),
        ("rate=lagrangian rate.step=-1", "a Lagrangian price needs a positive step"),
        ("diagnostic=delay", "diagnostic=delay: there is no such diagnostic; did you mean 'delayed'?"),
        ("experiment=null", "experiment=null: there is no such experiment"),
        ("model=closed_form", "model=closed_form scores the problems of diagnostic=NAME alone, not Corpus: choose another model"),
        ("diagnostic=delimiter agent=iid", "neither the scorer nor the agent has parameters: there is nothing to train"),
    ],
)
def test_a_mistake_gets_one_line(arguments: str, says: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *SMALL, *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(tmp_path.iterdir())
