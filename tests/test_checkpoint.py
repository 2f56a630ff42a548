"""Checkpoints are whole or not there: what they hold, which are kept, and that damage of any kind is found and nothing is executed."""

import hashlib
import json
import os
import pickle
import random
import resource
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from agents import checkpoint, durable, random_states
from agents.advantages import batch_relative, discounted_return, subtract_baseline
from agents.agent import Reinforce
from agents.checkpoint import State
from agents.hindsight import Hindsight
from agents.learner import Learner
from agents.policies import WindowPolicy
from agents.rates import PI, Lagrangian
from models import ByteUNet, Size
from segment_env.batch import EpisodeBatches, Episodes
from segment_env.closed_form import CountingStream
from segment_env.errors import UserError

SIZE = Size(width=16, heads=2, encoder=1, mid=1, decoder=1, window=4)
STEPS = [partial(discounted_return, gamma=0.9), subtract_baseline, batch_relative]
SETTINGS = {"seed": 0, "train": {"rows": 4, "wandb": None}}


def made(updates: int = 0, rate=PI) -> Learner:
    """A learner whose agent has all that one may have: a policy, a baseline and a controller with a memory."""
    torch.manual_seed(0)
    model = ByteUNet(SIZE)
    learner = Learner(model, Reinforce(WindowPolicy(16, 0.3), STEPS, rate(0.3), baseline=Hindsight(16, 0.9)), 4, 40, lr=0.01)
    for n in range(updates):
        learner.update(batch(n))
    return learner


def batch(n: int):
    return Episodes(CountingStream(4, 0.0), 4, 24, seed=5).batch(n)


def data(played: int = 0) -> EpisodeBatches:
    found = EpisodeBatches(Episodes(CountingStream(4, 0.0), 4, 24, seed=5))
    found.load_state_dict({"batches": played})
    return found


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    moments = learner.optimiser.state_dict()["state"]
    return {
        **{f"model.{key}": value.clone() for key, value in learner.model.state_dict().items()},
        **{f"agent.{key}": value.clone() for key, value in learner.agent.state_dict().items()},
        **{f"{i}.{key}": value.clone() for i, each in moments.items() for key, value in each.items()},
        "lr": torch.tensor([group["lr"] for group in learner.optimiser.param_groups], dtype=torch.float64),
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def learner() -> Learner:
    return made(2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()
    return tmp_path


def names(run: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (run / "checkpoints").iterdir())


def save(run: Path, learner: Learner, update: int, held_out: float | None = None, keep: int = 3, **rest) -> Path:
    state, place = State(update, SETTINGS, validation_bits_per_byte=held_out, **rest), (data(update).state_dict(), random_states.states())
    return checkpoint.save(run, learner, state, [place], keep)


# --- what a checkpoint holds ---


@pytest.mark.parametrize("rate", [PI, Lagrangian])
def test_a_restored_learner_goes_on_to_the_bit(run: Path, rate) -> None:
    whole = made(3, rate)
    log = [{"nll": torch.tensor(1.5, dtype=torch.float64), "skipped": torch.tensor(0.0)}, {"nll": torch.tensor(torch.nan)}]
    log += [{"nll": torch.tensor(float(n))} for n in range(2, 12)]
    folder = save(run, whole, 3, 2.5, seconds=7.25, skipped_in_a_row=2, log=log)
    before, drawn = everything(whole), (random.random(), numpy.random.rand(), torch.rand(2).tolist())
    whole.update(batch(3))
    fresh = made(0, rate)
    position = data()
    state = checkpoint.restore(folder, fresh, position, SETTINGS)
    assert same(everything(fresh), before) and position.state_dict() == {"batches": 3}
    assert (state.update, state.seconds, state.skipped_in_a_row, state.validation_bits_per_byte) == (3, 7.25, 2, 2.5)
    assert int(fresh.skipped_in_a_row) == 2
    assert [each["nll"].item() for each in state.log if not each["nll"].isnan()] == [1.5, *range(2, 12)]
    assert state.log[0]["nll"].dtype == torch.float64 and state.log[1].keys() == {"nll"}
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(2).tolist())
    fresh.update(batch(3))
    assert same(everything(fresh), everything(whole))
    assert not same(everything(fresh), before)


def test_generators_are_seeded_alike() -> None:
    found = []
    for _ in range(2):
        random_states.seed(2**61 - 1)
        found.append((random.random(), numpy.random.rand(), torch.rand(2).tolist()))
    assert found[0] == found[1]


def test_another_configuration_is_refused_by_its_keys(run: Path, learner: Learner) -> None:
    folder = save(run, learner, 2)
    other = {"seed": 1, "train": {"rows": 4.0, "wandb": None, "new": {}}}
    says = r"the configuration is another one now: seed was 0, is 1, train.rows was 4, is 4.0, train.new was absent, is {}$"
    with pytest.raises(UserError, match=says):
        checkpoint.restore(folder, made(), data(), other)


# --- which are kept ---


def test_the_newest_and_the_best_stay(run: Path, learner: Learner) -> None:
    held_out = {1: 3.0, 2: 2.0, 3: None, 4: 2.0, 5: 2.5, 6: None}
    (run / "checkpoints").mkdir()
    for torn in ("00000009.partial", "00000001.old.partial"):
        (run / "checkpoints" / torn).mkdir()
    kept = [save(run, learner, update, figure, 2) and names(run) for update, figure in held_out.items()]
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert checkpoint.find(run).name == "00000006" and checkpoint.find(run, best=True).name == "00000002"
    assert checkpoint.lowest_bits_per_byte(run) == 2.0
    checkpoint.forget_after(run, 5)
    assert names(run) == [2, 5]


def test_without_a_validation_none_is_best(run: Path, learner: Learner) -> None:
    assert checkpoint.find(run) is None
    save(run, learner, 1)
    with pytest.raises(UserError, match="no checkpoint that was validated.*leave out --best"):
        checkpoint.find(run, best=True)
    assert checkpoint.lowest_bits_per_byte(run) == float("inf")


def test_what_a_run_falls_back_on_ends_with_an_update_that_was_made(run: Path, learner: Learner) -> None:
    assert checkpoint.last_good(run) is None
    save(run, learner, 1)
    save(run, learner, 2, skipped_in_a_row=1)
    assert checkpoint.last_good(run).name == "00000001"


def test_a_checkpoint_is_found_from_everywhere(run: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(run, learner, 1)
    assert checkpoint.find(folder) == folder and checkpoint.run_of(folder) == run and checkpoint.run_of(run) == run
    monkeypatch.chdir(folder.parent)
    assert checkpoint.find(Path(folder.name)).resolve() == folder
    nested = run / "checkpoints" / "7"  # a run may itself lie in a folder of that name
    nested.mkdir()
    (nested / "config.yaml").touch()
    assert checkpoint.run_of(nested) == nested


# --- damage ---


def damaged_by_a_bit(file: Path, where: int) -> None:
    content = bytearray(file.read_bytes())
    content[where // 8] ^= 1 << where % 8
    file.write_bytes(content)


def test_a_flipped_bit_is_found_wherever_it_is(run: Path, learner: Learner) -> None:
    folder, chance = save(run, learner, 1), random.Random(0)
    assert checkpoint.damage_of(folder) is None
    assert {file.name for file in folder.iterdir()} == {*checkpoint._FILES, "config.json", "manifest.json"}
    for file in folder.iterdir():
        for _ in range(40 if file.name == "manifest.json" else 4):
            where = chance.randrange(8 * file.stat().st_size)
            damaged_by_a_bit(file, where)
            assert checkpoint.damage_of(folder), (file.name, where)
            damaged_by_a_bit(file, where)
    assert checkpoint.damage_of(folder) is None


@pytest.mark.parametrize("name", [*checkpoint._FILES, "manifest.json"])
def test_a_damaged_newest_falls_back_in_one_line(name: str, run: Path, learner: Learner, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [save(run, learner, update, 1.0 / update) for update in (1, 2, 3)]
    damage = [lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink]
    for harm, folder in zip(damage, folders[:0:-1], strict=True):
        harm(folder / name)
    assert checkpoint.find(run) == folders[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert "the one before, '00000001', is taken" in line and str(folders[2]) in line and name in line
    for asked in ((folders[2], False), (run, True)) if name != "state.json" else ((folders[2], False),):
        with pytest.raises(UserError, match=f"checkpoint '{folders[2]}' is missing or damaged"):
            checkpoint.find(*asked)
    (folders[0] / name).write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint of run .* is missing or damaged, the newest: .*00000003") as told:
        checkpoint.find(run)
    assert "\n" not in str(told.value)


def test_a_checkpoint_of_before_there_were_manifests_is_refused(run: Path, learner: Learner) -> None:
    folder = save(run, learner, 1)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="no manifest.json: cut short, or by a version without checksums"):
        checkpoint.find(folder)


@pytest.mark.parametrize(
    "manifest", [b"[]", b"{}", b'{"format":2,"sha256":{}}', b'{"format":1,"sha256":{}}', b'{"format":1,"sha256":[]}', b"\xff"]
)
def test_a_manifest_that_is_none(manifest: bytes, run: Path, learner: Learner) -> None:
    folder = save(run, learner, 1)
    (folder / "manifest.json").write_bytes(manifest)
    assert "\n" not in checkpoint.damage_of(folder)


def test_a_manifest_reaches_for_no_file_elsewhere(run: Path, learner: Learner) -> None:
    folder = save(run, learner, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"]["../../config.yaml"] = hashlib.sha256(b"").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damage_of(folder) == "../../config.yaml is not what was written"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", checkpoint._FILES)
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_with_the_right_checksum_is_refused(name: str, form: str, run: Path, learner: Learner, monkeypatch) -> None:
    """As one would be that was put there on purpose, with a manifest to match."""
    folder = save(run, learner, 1)
    monkeypatch.chdir(run)
    with (folder / name).open("wb") as file:
        (pickle.dump if form == "pickle" else torch.save)(Payload(), file)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.find(run) == folder
    with pytest.raises(UserError, match="is missing or damaged") as told:
        checkpoint.restore(folder, made(), data(), SETTINGS)
    assert "\n" not in str(told.value) and not Path("executed").exists()


# --- writing ---


def test_everything_is_on_the_disk_before_it_counts(run: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    events, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(Path(os.readlink(f"/proc/self/fd/{handle}"))), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (events.append((self, target)), replace(self, target))[1])
    folder = save(run, learner, 1)
    beside = folder.with_suffix(".partial")
    placed = events.index((beside, folder))
    files = [beside / file.name for file in folder.iterdir() if file.name != "manifest.json"]
    manifest = events.index((beside / "manifest.json.partial", beside / "manifest.json"))
    assert sorted(events[: len(files)]) == sorted(files)
    assert events.index(beside / "manifest.json.partial") < manifest < placed
    assert manifest < len(events) - 1 - events[::-1].index(beside) < placed  # the folder, with all its names in it
    assert {folder.parent, run} <= set(events[placed:])


@pytest.mark.parametrize("limit", [100, 4000, 1 << 16])
def test_a_full_disk_leaves_the_older_one_whole(limit: int, run: Path, learner: Learner) -> None:
    first = save(run, learner, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(
            UserError, match=f"cannot write checkpoint .*00000002': .*[Ff]ile too large.*the one before is whole: '{first}'"
        ):
            save(run, learner, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(run) == [1] and checkpoint.find(run) == first


def test_a_run_folder_that_cannot_be_written(run: Path, learner: Learner) -> None:
    (run / "checkpoints").touch()
    with pytest.raises(UserError, match="cannot write checkpoint .*there is no earlier one") as told:
        save(run, learner, 1)
    assert "\n" not in str(told.value)


def test_a_file_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    durable.write(file, "old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        durable.write(file, "new")
    assert file.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["file"]
