"""Checkpoints: safetensors and JSON, never pickle; whole or not there, and known to be whole when they are read.

A checkpoint is a folder ``checkpoints/UPDATE`` of a run:

    model.safetensors, agent.safetensors      parameters and buffers: policy, critic, baseline and rate controller are the agent's
    optimiser.safetensors                     its moments
    log.safetensors                           metrics of the updates that no line of metrics.jsonl holds yet
    random.json                               states of the global random generators
    rank1.json, ...                           of every further rank: its position in the data, and its random generators' states
    config.json                               size and pooling of a byte U-Net: the folder is one for ``ByteUNet.from_pretrained``
    state.json                                the rest, see :class:`State`
    manifest.json                             SHA-256 of all of the above, written last

It is written beside, brought to the disk, and renamed into its place. The position in the schedule of the learning rate is
the number of updates; that in the data is the data's own state. Nothing but these files is opened, and nothing in them
is ever executed. A checkpoint of before there were manifests is refused.
"""

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agents import config, durable, random_states, ranks
from agents.learner import Learner
from models import ByteUNet
from segment_env.batch import Batches
from segment_env.errors import UserError, one_line

FOLDER, FORMAT = "checkpoints", 1
Place = tuple[dict[str, Any], dict[str, Any]]  #: of a rank: the position in the data, and the states of the random generators
_MANIFEST = "manifest.json"
_FILES = ("model.safetensors", "agent.safetensors", "optimiser.safetensors", "log.safetensors", "random.json", "state.json")


@dataclass
class State:
    """What a run is besides its learner and the random generators."""

    update: int  #: how many were made
    config: dict[str, Any]  #: of the run
    seconds: float = 0.0  #: of training, over all its processes
    skipped_in_a_row: int = 0  #: updates up to this one, as they were not finite
    validation_bits_per_byte: float | None = None  #: where this very update was validated
    data: dict[str, Any] = field(default_factory=dict)  #: the first rank's position in the data, as :func:`save` is told it
    log: list[dict[str, Tensor]] = field(default_factory=list)  #: metrics of updates that are not written yet


def save(run: Path, learner: Learner, state: State, places: Sequence[Place], keep: int = 1) -> Path:
    """Write the checkpoint of ``state.update``, then remove others but the newest ``keep`` and the best: -> its folder.

    ``places`` are those of all ranks, in their order. Raises UserError where it cannot be written; what was there before stays.
    """
    folder = run / FOLDER / f"{state.update:08d}"
    beside = folder.with_suffix(".partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        _write(beside, learner, state, places)
        durable.sync(beside)
        _discard(folder)
        beside.replace(folder)
        durable.sync(folder.parent)
        durable.sync(run)
        _retain(folder, keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"cannot write checkpoint '{folder}': {one_line(error)}; {_advice(run)}") from error
    return folder


def find(path: Path, best: bool = False) -> Path | None:
    """The newest whole checkpoint of a run folder, or the ``best`` by validation; or the one that ``path`` itself is.

    Of one that is passed over as it is damaged, a line on standard error tells. -> None where the run has none yet. Raises UserError
    where ``path`` is no run, where all are damaged, and where the one that was asked for is.
    """
    run = run_of(path)
    if not (run / "config.yaml").is_file():
        raise UserError(f"'{path}' is no run folder: it has no config.yaml; give the folder that training printed")
    if run != path or best:
        folder = _best(run) if best else path
        if folder is None:
            raise UserError(f"run '{run}' has no checkpoint that was validated, so that none is best; leave out --best")
        if damage := damage_of(folder):
            raise UserError(f"checkpoint '{folder}' is missing or damaged ({damage}); choose another checkpoint or train again")
        return folder
    damaged: list[str] = []
    for folder in reversed(every(run)):
        if not (damage := damage_of(folder)):
            if damaged and ranks.is_first():
                print(f"segment-env: checkpoint {' and '.join(damaged)}: the one before, '{folder.name}', is taken", file=sys.stderr)
            return folder
        damaged.append(f"'{folder}' is damaged ({damage})")
    if damaged:
        raise UserError(f"every checkpoint of run '{run}' is missing or damaged, the newest: {damaged[0]}; train it again")
    return None


def run_of(path: Path) -> Path:
    """The run folder that ``path`` is, or that the checkpoint ``path`` lies in."""
    inside = path.absolute().parent.name == FOLDER and not (path / "config.yaml").exists()
    return Path(os.path.normpath(path / ".." / "..")) if inside else path


def last_good(run: Path) -> Path | None:
    """The newest checkpoint whose last update was made, not skipped; None where there is none."""
    good = (folder for folder in reversed(every(run)) if _field(folder, "skipped_in_a_row") == 0 and not damage_of(folder))
    return next(good, None)


def lowest_bits_per_byte(run: Path) -> float:
    """Of the checkpoints that were validated, infinity where none was."""
    best = _best(run)
    return _field(best, "validation_bits_per_byte") if best else math.inf


def load(folder: Path, model: nn.Module, agent: nn.Module) -> None:
    """Put the parameters of a checkpoint into a model and an agent of the same layout. Raises UserError where that fails."""
    for name, part in {"model": model, "agent": agent}.items():
        tensors = _read(folder / f"{name}.safetensors")
        expected = part.state_dict()
        if {key: value.shape for key, value in tensors.items()} != {key: value.shape for key, value in expected.items()}:
            raise UserError(f"checkpoint '{folder}' holds {_size(tensors)}, but the {name} of the configuration is {_size(expected)}")
        part.load_state_dict(tensors)


def restore(folder: Path, learner: Learner, data: Batches, settings: dict[str, Any]) -> State:
    """Put a whole checkpoint into a learner, the data and the random generators: -> its state.

    Of several ranks each takes its own place. One that the checkpoint knows no place of takes the first one's in the data, which
    refuse it where it means nothing there, and its random generators begin anew. Raises UserError where ``settings`` are not those
    of the run, with the keys that differ, and where a file is damaged.
    """
    try:
        log = _unflatten(_read(folder / "log.safetensors"))
        state = State(**json.loads((folder / "state.json").read_bytes()), log=[log[i] for i in sorted(log)])
        if differing := config.differences(state.config, settings):
            raise UserError(f"run '{run_of(folder)}' goes on as it was begun, but the configuration is another one now: {differing}")
        load(folder, *_parts(learner).values())
        place, random = _place(folder, state)
        data.load_state_dict(place)
        _restore_optimiser(learner, _unflatten(_read(folder / "optimiser.safetensors")), state.update)
        learner.skipped_in_a_row.fill_(state.skipped_in_a_row)
        if random is None:
            random_states.seed(settings["seed"] + ranks.index())
        else:
            random_states.restore(random)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(folder, error) from error
    return state


def forget_after(run: Path, update: int) -> None:
    """Remove the checkpoints of later updates: a run that goes on from here makes them anew. Raises UserError where it cannot."""
    try:
        for folder in every(run):
            if int(folder.name) > update:
                _discard(folder)
    except OSError as error:
        raise UserError(f"cannot write the run folder '{run}': {one_line(error)}") from error


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None where every file of it is the one that was written."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']!r} is not known"
        sums = manifest["sha256"]
        if missing := set(_FILES) - sums.keys():
            return f"{_MANIFEST} names no {min(missing)}"
        wrong = [name for name in sums if Path(name).name != name or _sha256(folder / name) != sums[name]]
        return f"{wrong[0]} is not what was written" if wrong else None
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return f"no {name}" + (": cut short, or by a version without checksums" if name == _MANIFEST else "")
    except OSError as error:
        return one_line(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"


def _write(folder: Path, learner: Learner, state: State, places: Sequence[Place]) -> None:
    for name, part in _parts(learner).items():
        _save_tensors(part.state_dict(), folder / f"{name}.safetensors")
    moments = learner.optimiser.state_dict()["state"]
    _save_tensors(_flatten(moments), folder / "optimiser.safetensors")
    _save_tensors(_flatten(dict(enumerate(state.log))), folder / "log.safetensors")
    if isinstance(learner.model, ByteUNet):
        (folder / "config.json").write_text(json.dumps(learner.model.config))
    (data, random), *others = places
    (folder / "random.json").write_text(json.dumps(random))
    for rank, (position, drawn) in enumerate(others, 1):
        (folder / f"rank{rank}.json").write_text(json.dumps({"data": position, "random": drawn}))
    state = replace(state, data=data)
    (folder / "state.json").write_text(json.dumps({key: value for key, value in vars(state).items() if key != "log"}))
    names = sorted(file.name for file in folder.iterdir())
    for name in names:
        durable.sync(folder / name)
    sums = {name: _sha256(folder / name) for name in names}
    durable.write(folder / _MANIFEST, json.dumps({"format": FORMAT, "sha256": sums}, separators=(",", ":")))


def _retain(newest: Path, keep: int) -> None:
    best = _best(newest.parent.parent)
    for folder in every(newest.parent.parent)[:-keep]:
        if folder != best:
            _discard(folder)
    for torn in newest.parent.glob("*.partial"):
        shutil.rmtree(torn)


def _discard(folder: Path) -> None:
    """Remove a checkpoint, which is at no moment there in part."""
    if folder.exists():
        torn = folder.with_name(f"{folder.name}.old.partial")
        shutil.rmtree(torn, ignore_errors=True)
        folder.replace(torn)
        shutil.rmtree(torn)


def every(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    return sorted(folder for folder in (run / FOLDER).glob("*") if folder.name.isdigit())  # what else lies there is not ours


def _best(run: Path) -> Path | None:
    """The first that reached the lowest validation bits per byte."""
    figures = {folder: _field(folder, "validation_bits_per_byte") for folder in every(run)}
    return min((folder for folder in figures if figures[folder] is not None), key=lambda folder: figures[folder], default=None)


def _field(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / "state.json").read_bytes())[name]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # damaged


def _place(folder: Path, state: State) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """This rank's, as far as the checkpoint has one."""
    if ranks.index() == 0:
        return state.data, json.loads((folder / "random.json").read_bytes())
    if not (own := folder / f"rank{ranks.index()}.json").exists():
        return state.data, None
    place = json.loads(own.read_bytes())
    return place["data"], place["random"]


def _restore_optimiser(learner: Learner, state: dict[int, dict[str, Tensor]], update: int) -> None:
    groups = learner.optimiser.state_dict()["param_groups"]
    learner.optimiser.load_state_dict({"state": state, "param_groups": groups})
    learner.schedule.load_state_dict({**learner.schedule.state_dict(), "last_epoch": update})
    for group, base, scale in zip(learner.optimiser.param_groups, learner.schedule.base_lrs, learner.schedule.lr_lambdas, strict=True):
        group["lr"] = base * scale(update)


def _parts(learner: Learner) -> dict[str, nn.Module]:
    return {"model": learner.model, "agent": learner.agent}


def _flatten(nested: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{i}.{key}": value for i, each in nested.items() for key, value in each.items()}


def _unflatten(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    nested: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        nested.setdefault(int(index), {})[name] = value
    return nested


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"checkpoint file '{path}' is missing or damaged ({one_line(error)}); choose another checkpoint or train again")


def _advice(run: Path) -> str:
    found = every(run)
    return f"the one before is whole: '{found[-1]}'" if found else "there is no earlier one"


def _size(tensors: dict[str, Tensor]) -> str:
    return f"{sum(value.numel() for value in tensors.values()):,} numbers in {len(tensors)} tensors"
