"""Checkpoints: safetensors and JSON, never pickle; written beside, then renamed, so that a killed run leaves a whole one.

A checkpoint is a folder ``checkpoints/UPDATE`` of ``model.safetensors``, ``agent.safetensors``, ``optimiser.safetensors`` and
``state.json``: the updates that were made, and the position in the data.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from agents.learner import Learner
from segment_env.batch import Batches
from segment_env.errors import UserError

FOLDER = "checkpoints"


def save(run: Path, learner: Learner, update: int, data: Batches) -> Path:
    """Write the checkpoint after ``update`` updates, then remove the older ones: -> its folder."""
    folder = run / FOLDER / f"{update:08d}"
    beside = folder.with_suffix(".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name, part in _parts(learner).items():
        save_file({key: value.contiguous() for key, value in part.state_dict().items()}, beside / f"{name}.safetensors")
    state = learner.optimiser.state_dict()["state"]
    save_file({f"{i}.{key}": value for i, slots in state.items() for key, value in slots.items()}, beside / "optimiser.safetensors")
    (beside / "state.json").write_text(json.dumps({"update": update, "data": data.state_dict()}))
    shutil.rmtree(folder, ignore_errors=True)
    beside.replace(folder)
    for old in folder.parent.iterdir():
        if old != folder and old.stem.isdigit():  # what else lies there is not ours
            shutil.rmtree(old)
    return folder


def newest(run: Path) -> Path:
    """The newest checkpoint of a run folder. Raises UserError where it has none, or is none."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"'{run}' is no run folder: it has no config.yaml; give the folder that training printed")
    found = sorted(folder for folder in (run / FOLDER).glob("*") if folder.name.isdigit())
    if not found:
        raise UserError(f"run '{run}' has no checkpoint yet; train it further, or choose another run")
    return found[-1]


def load(folder: Path, model: nn.Module, agent: nn.Module) -> None:
    """Put the parameters of a checkpoint into a model and an agent of the same layout. Raises UserError where that fails."""
    for name, part in {"model": model, "agent": agent}.items():
        tensors = _read(folder / f"{name}.safetensors")
        expected = part.state_dict()
        if {key: value.shape for key, value in tensors.items()} != {key: value.shape for key, value in expected.items()}:
            raise UserError(f"checkpoint '{folder}' holds {_size(tensors)}, but the {name} of the configuration is {_size(expected)}")
        part.load_state_dict(tensors)


def restore(folder: Path, learner: Learner, data: Batches) -> int:
    """Put a whole checkpoint into a learner and the data of the same configuration: -> the updates that were made."""
    load(folder, *_parts(learner).values())
    tensors = _read(folder / "optimiser.safetensors")
    try:
        state = json.loads((folder / "state.json").read_text())
        update = state["update"]
        data.load_state_dict(state["data"])
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder / "state.json", error) from error
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        slots.setdefault(int(index), {})[name] = value
    groups = learner.optimiser.state_dict()["param_groups"]
    learner.optimiser.load_state_dict({"state": slots, "param_groups": groups})
    learner.schedule.load_state_dict({**learner.schedule.state_dict(), "last_epoch": update})
    for group, base, scale in zip(learner.optimiser.param_groups, learner.schedule.base_lrs, learner.schedule.lr_lambdas, strict=True):
        group["lr"] = base * scale(update)
    return update


def _parts(learner: Learner) -> dict[str, nn.Module]:
    return {"model": learner.model, "agent": learner.agent}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"checkpoint file '{path}' is missing or damaged ({error}); choose another checkpoint or train again")


def _size(tensors: dict[str, torch.Tensor]) -> str:
    return f"{sum(value.numel() for value in tensors.values()):,} numbers in {len(tensors)} tensors"
