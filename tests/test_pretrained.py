"""A byte U-Net on its own: written and read by huggingface_hub's mixin, and read out of a run's checkpoint."""

import copy
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agents import checkpoint, config, training
from models import ByteUNet, Size
from models.pooling import SelectAdd
from models.unet import POOLINGS
from segment_env.errors import UserError

SIZE = Size(width=16, heads=2, encoder=1, mid=2, decoder=1, window=4)


class Other(SelectAdd):
    """A pair of one's own."""


def same(one: ByteUNet, other: ByteUNet) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    alike = all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)
    return mine.keys() == theirs.keys() and alike and one.config == other.config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [SIZE, "nano"])
def test_size_pooling_and_weights_come_back(size, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ByteUNet(size).to(dtype)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    read = ByteUNet.from_pretrained(tmp_path)
    assert same(read, model) and type(read.pooling) is SelectAdd and not read.training
    assert capsys.readouterr().out == ""
    read.save_pretrained(tmp_path / "again")
    assert same(ByteUNet.from_pretrained(tmp_path / "again"), model)


def test_the_mixin_changes_nothing_else() -> None:
    model = ByteUNet(SIZE, SelectAdd())
    assert {key.split(".")[0] for key in model.state_dict()} == {name for name, _ in model.named_children()} - {"pooling"}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(twin, model)
    with pytest.raises(TypeError, match="widht"):
        ByteUNet(widht=3)


def test_every_pooling_has_a_name_that_comes_back(tmp_path: Path) -> None:
    for name, pooling in POOLINGS.items():
        model = ByteUNet(SIZE, pooling)
        model.save_pretrained(tmp_path / name)
        read = ByteUNet.from_pretrained(tmp_path / name)
        assert type(read.pooling).__name__ == name and same(read, model)


def test_a_pooling_of_ones_own_is_handed_over(tmp_path: Path) -> None:
    model = ByteUNet(SIZE, Other())
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has a pooling Other of its own: hand it over, from_pretrained\(..., pooling=Other\(\)\)"):
        ByteUNet.from_pretrained(tmp_path)
    read = ByteUNet.from_pretrained(tmp_path, pooling=Other())
    assert same(read, model) and type(read.pooling) is Other


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_folder_that_holds_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ByteUNet(SIZE).save_pretrained(tmp_path)
    file, settings = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())

    def refused() -> None:
        with pytest.raises(UserError, match="holds no model of this kind") as told:
            ByteUNet.from_pretrained(tmp_path)
        assert "\n" not in str(told.value)

    for size in ({**settings["size"], "mid": 3}, {**settings["size"], "mid": 1}, {"width": 16}, "12M", None):
        (tmp_path / "config.json").write_text(json.dumps({**settings, "size": size}))
        refused()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    file.write_bytes(pickle.dumps(Payload()))
    refused()
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    refused()
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_a_run_is_one(tmp_path: Path) -> None:
    sizes = ["model.size={_target_:models.Size,width:16,heads:2,encoder:1,mid:2,decoder:1,window:4}", "data=made_up", "data.length=32"]
    settings = config.load([*sizes, "train.rows=4", "train.bytes=256", "train.validations=0", "train.device=cpu"])
    run = training.Run(settings)
    training.train(run, training.begin(settings, tmp_path), progress=False)
    found = checkpoint.find(tmp_path)
    model = ByteUNet.from_pretrained(found)
    assert same(model, run.model)
    assert same(training.open_run(tmp_path).model, model)
