"""The command line: what it prints, and that a mistake gets one clear line and exit status 2."""

import json
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from agents import cli

TINY = ["data.length=64", "train.rows=4", "train.bytes=1536", "train.validation_bytes=512", "train.optimiser.precision=float32"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder of six updates of `nano`."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert cli.main(["train", *TINY, "--run", str(folder)]) == 0
    return folder


@pytest.fixture
def mistake(capsys):
    """Run a command that must fail as a user's mistake: -> its one line."""

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert err.startswith("segment-env: ") and err.count("\n") == 1, err
        return err

    return run


def test_training_says_what_came_of_it(tmp_path, capsys):
    folder = tmp_path / "run"
    assert cli.main(["train", *TINY, "--run", str(folder)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("held-out bits per byte ") and "at rate 0." in lines[0]
    assert lines[1].startswith("starts after whitespace: recall 0.") and "precision 0." in lines[1]
    before, after = (line.split(maxsplit=1)[1] for line in lines[2:4])
    assert before.replace("|", "") == after.replace("|", "")
    assert lines[4].split() == ["run", str(folder)]
    assert "6/6" in err and "bits/byte=" in err and "rate=" in err
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["bytes_decoded"] == 1536
    assert logged[-1]["bytes_read"] == 6 * 64 * 4


def test_training_on_a_problem_with_a_known_answer_says_how_far_it_came(tmp_path, capsys):
    small = ["diagnostic=period", "rate=none", "train.bytes=409600", "train.validations=0", "train.device=cpu"]
    assert cli.main(["train", *small, "--run", str(tmp_path / "run")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("score "))
    assert 0.6 < float(line.split()[1].rstrip(",")) < 1.1


def test_evaluation_names_how_boundaries_were_drawn(finished, capsys):
    assert cli.main(["eval", str(finished), "--split", "validation", "--seed", "3"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_bytes"] == 60_934
    assert (figures["boundaries"], figures["seed"], figures["split"]) == ("sampled, uncapped", 3, "validation")
    assert 0.1 < figures["rate"] < 0.3


def test_evaluation_at_a_rate(finished, capsys):
    assert cli.main(["eval", str(finished), "--split", "validation", "--rate", "0.1"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rate"] == pytest.approx(0.1, abs=0.02) and figures["offset"] < 0
    assert figures["boundaries"] == "sampled, uncapped, calibrated to 0.1 on validation bytes"


def test_what_is_not_causal_says_so_wherever_it_appears(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", *TINY, "agent=bpe", "agent.policy.vocabulary=300", "data=made_up", "--run", str(run)]) == 0
    assert "sampled, uncapped; NOT CAUSAL: boundaries depend on what comes after them, seed 0" in capsys.readouterr().out
    assert cli.main(["eval", str(run)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["causal"] is False and "NOT CAUSAL" in figures["boundaries"]
    assert cli.main(["segment", str(run), "Call me"]) == 0
    out, err = capsys.readouterr()
    assert out.replace("|", "") == "Call me\n" and err == "NOT CAUSAL: boundaries depend on what comes after them\n"


def test_no_validation_bytes_for_a_threshold(tmp_path, mistake):
    (tmp_path / "short.txt").write_text("Call me I")
    arguments = ("agent=entropy", "data=files", f"data.source.path={tmp_path / 'short.txt'}", "data.length=4")
    assert "the threshold of agent.policy has no validation bytes to be calibrated on" in mistake("train", *arguments)
    assert not (tmp_path / "runs").exists()


def test_segmenting_keeps_the_text(finished, capsysbinary):
    assert cli.main(["segment", str(finished), "Call me Ishmael."]) == 0
    assert capsysbinary.readouterr().out.replace(b"|", b"") == b"Call me Ishmael.\n"


def test_segmenting_reads_standard_input():
    # A process of its own: standard input is bytes, and the exit status is the shell's. An empty folder is no run.
    done = subprocess.run([sys.executable, "-m", "agents.cli", "segment", ".", "-"], input=b"x", capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr


def test_generation_goes_on_from_the_prompt(finished, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"Call me \xff")
    arguments = ["generate", str(finished), "--prompt-file", str(tmp_path / "prompt.txt"), "--bytes", "40", "--seed", "3"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("Call me \\xff") and text.endswith("\n") and len(text) > 40
    assert cli.main([*arguments, "--num-samples", "2"]) == 0
    first, second = capsys.readouterr().out.split("--- 2 of 2\n")
    assert first == f"--- 1 of 2\n{text}" and second.startswith("Call me \\xff") and second != text
    assert cli.main([*arguments, "--segments"]) == 0
    assert capsys.readouterr().out.startswith("|C")


def test_generation_with_boundaries_at_a_rate(finished, capsys):
    arguments = ["generate", str(finished), "--prompt", "Call me ", "--bytes", "30", "--temperature", "0", "--segments"]
    shown = []
    for drawn in ([], ["--boundaries", "thresholded"], ["--rate", "0.001"]):
        assert cli.main([*arguments, *drawn]) == 0
        shown.append(capsys.readouterr().out)
    assert len(set(shown)) == 3 and shown[2].count("|") < 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", ""], "the prompt has no bytes"),
        (["--prompt-file", "nowhere.txt"], "cannot read the prompt 'nowhere.txt': No such file"),
        (["--prompt-file", "."], "cannot read the prompt '.': Is a directory"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--temperature", "-1"], "the temperature must be a number from 0"),
        (["--temperature", "warm"], "invalid float value: 'warm'"),
        (["--top-p", "0"], "top-p must lie above 0 and be at most 1"),
        (["--top-p", "1.5"], "top-p must lie above 0 and be at most 1"),
        (["--bytes", "0"], "bytes to generate must be at least 1, got 0"),
        (["--num-samples", "0"], "the number of samples must be at least 1"),
        (["--bytes", str(10**15)], "no room for 1 x 1,000,000,000,000,000 bytes of text: ask for fewer"),
        (["--bytes", str(10**30)], "bytes of text: ask for fewer"),
        (["--num-samples", str(10**15)], "no room for 1,000,000,000,000,000 x 256 bytes of text"),
        (["--rate", "2"], "strictly between 0 and 1"),
        (["--seed", "-1"], "a seed is a whole number"),
        (["--boundaries", "guessed"], "invalid choice: 'guessed'"),
    ],
)
def test_generation_mistakes(finished, mistake, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in mistake("generate", finished, *arguments)


def test_generation_without_a_checkpoint_and_by_what_is_not_causal(finished, tmp_path, mistake, capsys):
    shutil.copy(finished / "config.yaml", tmp_path)
    assert "has no checkpoint yet" in mistake("generate", tmp_path, "--prompt", "a")
    assert cli.main(["train", *TINY, "agent=exact_random", "--run", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert "ExactRandom is not causal" in mistake("generate", tmp_path / "run")
    assert "ExactRandom is not causal" in mistake("generate", tmp_path / "run", "--boundaries", "thresholded")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "data=files", "data.source.path=nowhere.txt"], "no file or folder 'nowhere.txt'"),
        (["train", "data=files", "data.source.path=empty.txt"], "empty"),
        (["train", "data=files", "data.source.path=short.txt"], "shorter than one crop of 512"),
        (["train", "data=files", "data.source.path=binaries"], "holds no text"),
        (["train", "data=files"], "data.source.path has no value"),
        (["train", "--fast"], "unrecognized arguments: --fast"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "agnet=paper"], "did you mean 'agent'"),
        (["train", "agent=papre"], "paper"),
        (["train", "train.lenght=3"], "train.lenght"),
        (["train", "target=0"], "strictly between 0 and 1"),
        (["train", "target=1"], "strictly between 0 and 1"),
        (["train", "agent=iid", "target=1.5"], "strictly between 0 and 1"),
        (["train", "data.length=0"], "data.length must be a whole number of at least 1"),
        (["train", "train.rows=many"], "train.rows must be a whole number"),
        (["train", "agent.samples=3"], "do not fill"),
        (["train", "agent=paired", "agent.samples=1"], "leave_one_out needs agent.samples of 2"),
        (["train", "train.optimiser.precision=fp8"], "no precision 'fp8'"),
        (["train", "train.device=tpu"], "no device 'tpu'"),
        (["train", "train.wandb=loud"], "train.wandb"),
        (["train", "model.size=12M"], "no model size '12M'"),
        (["train", "model.size=18"], "no model size 18"),
        (["train", "seed=99999999999999999999"], "seed must be a whole number"),
        (["train", "train.checkpoint_every=0"], "train.checkpoint_every must be a whole number of at least 1"),
        (["train", "train.optimiser.lr=-1"], "lr and early_weight must not be negative"),
        (["train", "train.optimiser.betas=[0.9]"], "train.optimiser does not fit"),
        (["train", "+train.optimiser.momentum=0.9"], "train.optimiser does not fit"),
        (["train", "agent.soft_cap=0"], "agent.soft_cap must be positive or null"),
        (["train", "agent.policy.logit_scale=0"], "logit_scale positive"),
        (["train", "agent.policy_weight=abc"], "agent.policy_weight must be a number and not negative, got 'abc'"),
        (["train", "agent.policy=null"], "a node with a _target_ is needed"),
        (["train", "agent.rate=3"], "agent.rate must be a controller of agents.rates, got 3"),
        (["train", "agent.advantage.discounted_return.gamma=2"], "gamma must lie in [0, 1], got 2"),
        (
            ["train", "~agent.advantage.discounted_return.gamma"],
            "missing a required argument: 'gamma'",
        ),
        (["train", "data=files", "data.source.path=short.txt", "data.length=4"], "no bytes to evaluate on"),
        (["eval", "nowhere", "--seed", "-1"], "a seed is a whole number"),
        (["train", "--resume", "nowhere"], "no run folder"),
        (["train", "--run", "other", "--resume", "nowhere/checkpoints/00000001"], "no run folder"),
        (["train", "train.keep=0"], "train.keep must be a whole number of at least 1, got 0"),
        (["train", "train.max_skipped=many"], "train.max_skipped must be a whole number of at least 1, got 'many'"),
        (["eval", "binaries"], "no run folder"),
        (["segment", "nowhere", "text"], "no run folder"),
    ],
)
def test_mistakes_get_one_line(arguments, says, mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("Ishmael.")
    (tmp_path / "binaries").mkdir()
    (tmp_path / "binaries" / "image.png").write_bytes(b"\x89PNG")
    before = sorted(tmp_path.rglob("*"))
    assert says in mistake(*arguments)
    assert sorted(tmp_path.rglob("*")) == before, "a mistake leaves nothing behind"


def test_a_run_is_not_overwritten(finished, mistake):
    assert "already holds a run" in mistake("train", *TINY, "--run", finished)


def test_a_run_without_checkpoint(finished, mistake, tmp_path):
    shutil.copy(finished / "config.yaml", tmp_path)
    assert "has no checkpoint yet" in mistake("eval", tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "agent.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint(finished, mistake, tmp_path, name, damage):
    run = shutil.copytree(finished, tmp_path / "run")
    for file in run.glob(f"checkpoints/*/{name}"):
        if damage == "truncated":
            file.write_bytes(file.read_bytes()[:-8])
        else:
            file.unlink()
    for command in (["eval", run], ["segment", run, "text"], ["train", "--resume", run]):
        assert "missing or damaged" in mistake(*command)


@pytest.mark.parametrize("name", ["optimiser.safetensors", "state.json"])
def test_a_damaged_training_state(finished, mistake, tmp_path, name):
    run = shutil.copytree(finished, tmp_path / "run")
    for file in run.glob(f"checkpoints/*/{name}"):
        file.write_bytes(b"{")
    assert "missing or damaged" in mistake("train", "--resume", run)


def test_a_damaged_newest_checkpoint_is_passed_over(finished, tmp_path, capsys, mistake):
    run = shutil.copytree(finished, tmp_path / "run")
    before, newest = sorted((run / "checkpoints").iterdir())[-2:]
    (newest / "model.safetensors").write_bytes(b"")
    assert cli.main(["eval", str(run), "--split", "validation"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["split"] == "validation"
    assert err.count("\n") == 1 and f"'{before.name}', is taken" in err
    assert "model.safetensors is not what was written" in mistake("eval", newest)
    assert cli.main(["train", "--resume", str(run)]) == 0
    assert cli.main(["eval", str(newest), "--split", "validation"]) == 0, "it was made anew"


def test_evaluation_of_the_best(finished, tmp_path, capsys):
    """The newest worsened on purpose: the best is another, and is the one that is evaluated."""
    run = shutil.copytree(finished, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["update"]: line["validation_bits_per_byte"] for line in lines if "validation_bits_per_byte" in line}
    best = min(held_out, key=held_out.get)
    found = {}
    (tmp_path / "text.txt").write_text("Call me Ishmael. Some years ago - never mind how long precisely. " * 20)
    for arguments in ([run, "--best"], [run / "checkpoints" / f"{best:08d}"]):
        assert cli.main(["eval", *map(str, arguments), "--data", str(tmp_path / "text.txt")]) == 0
        found[len(arguments)] = json.loads(capsys.readouterr().out)
    assert found[1] == found[2]


def test_going_on_with_another_configuration(finished, mistake, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    says = mistake("train", *TINY, "train.optimiser.lr=1.0", "agent.policy_weight=0.5", "--resume", run)
    assert "gives another configuration: agent.policy_weight was 0.3, is 0.5, train.optimiser.lr was 0.003, is 1.0\n" in says
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("clip: 1.0", "clip: 2.0"))
    assert "the configuration is another one now: train.optimiser.clip was 1.0, is 2.0\n" in mistake("train", "--resume", run)
    (run / "config.yaml").write_text(text)
    assert cli.main(["train", *TINY, "--resume", str(run)]) == 0, "the same command again"


def test_a_run_folder_that_cannot_be_written(finished, mistake, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot write the run folder" in mistake("train", *TINY, "--run", tmp_path / "file" / "run")
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert f"cannot write '{run / 'metrics.jsonl'}': Is a directory" in mistake("train", "--resume", run)


def test_a_full_disk_is_one_line_and_loses_nothing(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    *_, before, newest = sorted((run / "checkpoints").iterdir())
    shutil.rmtree(newest)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        assert cli.main(["train", "--resume", str(run)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    err = capsys.readouterr().err
    assert re.search(f"\nsegment-env: cannot write checkpoint .*File too large.*the one before is whole: '{before}'\n$", err)
    assert "Traceback" not in err
    assert cli.main(["train", "--resume", str(run)]) == 0 and newest.is_dir()


def test_wandb_without_login(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=lambda prompt: False, Error=RuntimeError))
    assert "train.wandb=online: nobody is logged in to W&B" in mistake("train", *TINY, "train.wandb=online")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "train.wandb=offline cannot import wandb" in mistake("train", *TINY, "train.wandb=offline")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_size(finished, mistake, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("size: nano", "size: 18M"))
    assert "1,379,840 numbers" in mistake("eval", run)
