"""What a training would cost on this machine, before it begins: ``segment-env train --dry-run``.

Parameters and operations are counted. Memory and time are measured on updates of as many rows and bytes as this machine can afford to
try, all of them if that is little, and scaled: memory by bytes, time by operations.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agents.costs import update_flops
from agents.data import batches
from agents.learner import Learner
from agents.timing import stopwatch
from agents.training import Run, new_folder, refused
from segment_env.batch import Batch
from segment_env.errors import UserError

_AFFORDABLE = {"cpu": 2e11, "cuda": 1e15}  #: operations of a trial update: seconds
_SHORTEST, _FEWEST = 256, 2  #: bytes and rows of a trial update, where more are too many
_STAND_IN = {"_target_": "segment_env.streams.moby_dick"}  #: for bytes that cannot be reached


@dataclass(frozen=True)
class Trial:
    """Updates that were made to see what they take."""

    rows: int
    length: int
    rate: float  #: of starts among choices
    seconds: float  #: of the second of two updates
    kept: float  #: bytes of memory that a loss keeps for its gradient, for every decoded byte
    kept_once: float  #: and those that do not grow with bytes


def describe(settings: dict[str, Any], folder: Path | None = None) -> str:
    """The report: text of one screen. Nothing is written.

    Where the hub cannot be reached the reason is told, and text that is always there takes the place of its data. Raises UserError on
    a configuration that cannot train, and on a ``folder`` that holds a run.
    """
    folder, missing = new_folder(folder), ""
    try:
        run = Run(settings)
    except UserError as error:
        if not settings["data"]["source"]["_target_"].endswith("HubDocuments"):
            raise
        run, missing = Run({**settings, "data": {**settings["data"], "source": _STAND_IN}}), str(error)
    with refused("the configuration cannot be trained", ValueError, TypeError, KeyError, RuntimeError, NotImplementedError):
        rows, length = affordable(run)
        trial = measure(run, rows, length)
    lines = _lines(run, trial, folder)
    if missing:
        lines["data"] += [f"NOT THERE: {missing}", "what is measured here was measured on the embedded text"]
    text = [f"{name if n == 0 else '':<12}{line}" for name, each in lines.items() for n, line in enumerate(each)]
    return "\n".join([*text, "a dry run: nothing was written"])


def affordable(run: Run) -> tuple[int, int]:
    """Rows and bytes of a trial update: those of the run, or halves of them until they are affordable on its device."""
    rows, length = run.train["rows"], run.length
    limit = _AFFORDABLE.get(run.device.type, _AFFORDABLE["cpu"])
    while (flops(run, rows, length) or 0.0) > limit:
        if length // 2 >= _SHORTEST:
            length //= 2
        elif rows // 2 >= _FEWEST and _fills(run, rows // 2):
            rows //= 2
        else:
            break
    return rows, length


def measure(run: Run, rows: int, length: int) -> Trial:
    """Make two updates of B = ``rows`` and T = ``length``, and two losses."""
    learner = Learner(run.model, run.agent, rows, run.updates, **run.train["optimiser"], device=run.device)
    data = batches(run.source, learner.num_sequences, length, run.settings["seed"])
    batch = next(data).to(run.device)
    half = Batch(batch.bytes[:, : -(-length // 2)], batch.valid[:, : -(-length // 2)], batch.terminated, batch.sequence, batch.seed)
    metrics = learner.update(batch)  # first: kernels are chosen, the optimiser makes its moments
    seconds = stopwatch(lambda: learner.update(batch), run.device)()
    whole, part = kept_for_backward(learner, batch), kept_for_backward(learner, half)
    slope = (whole - part) / (rows * (length - half.bytes.shape[1])) if length > 1 else whole / rows
    return Trial(rows, length, float(metrics["rate"]), seconds, slope, max(whole - slope * rows * length, 0.0))


def kept_for_backward(learner: Learner, batch: Batch) -> int:
    """Bytes of all tensors that the gradient of a loss needs, parameters not counted, what shares memory counted once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in _parameters(learner.model, learner.agent)}
    sizes: dict[int, int] = {}
    alive = []  # as the gradient would keep them: else memory that is used again would count once

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = learner.loss(batch)[0]
    del loss
    return sum(sizes.values())


def flops(run: Run, rows: int, length: int, rate: float | None = None) -> float | None:
    """Operations of an update, forward and backward, at ``rate`` (default: the target); None for a scorer that does not say."""
    if not hasattr(run.model, "flops_per_byte"):
        return None
    counts = run.agent.sample_counts(rows)
    seen = run.settings.get("target", 0.2) if rate is None else rate
    tokens = (1 + seen * (length - 1)) / length
    return rows * length * update_flops(run, tokens, rows / len(counts), length)


def _lines(run: Run, trial: Trial, folder: Path) -> dict[str, list[str]]:
    train, rows, length, updates = run.train, run.train["rows"], run.length, run.updates
    all_counts = run.counts(updates)
    sequences = len(run.agent.sample_counts(rows))
    return {
        "parameters": [
            f"model {_count(run.model):,} + agent {_count(run.agent):,} = {_count(run.model, run.agent):,} ({type(run.model).__name__})"
        ],
        "data": [f"{train['rows']} rows of {length} bytes an update, of {sequences} sequences"],
        "budget": [f"{updates:,} updates, {all_counts['bytes_decoded']:,} bytes decoded, {all_counts['bytes_read']:,} of them different"],
        "operations": _operations(run, trial),
        "memory": _memory(run, trial),
        "time": _time(run, trial),
        "writes": _writes(run, folder),
    }


def _operations(run: Run, trial: Trial) -> list[str]:
    rows, length = run.train["rows"], run.length
    whole = flops(run, rows, length, trial.rate)
    if whole is None:
        return [f"not counted: {type(run.model).__name__} does not say what it costs"]
    forward = whole / 3 / (rows * length)
    return [
        f"{_si(forward)}FLOP a decoded byte, forward; {_si(whole)}FLOP an update, three times that; {_si(whole * run.updates)}FLOP in all",
        f"at {trial.rate:.3f} starts a byte, as the agent begins; a multiply-add counts two",
    ]


def _memory(run: Run, trial: Trial) -> list[str]:
    size = sum(parameter.nbytes for parameter in _parameters(run.model, run.agent))
    kept = trial.kept * run.train["rows"] * run.length / run.train.get("micro_batches", 1) + trial.kept_once
    return [
        f"parameters {_si(size)}B + gradients {_si(size)}B + moments {_si(2 * size)}B + activations {_si(kept)}B = {_si(4 * size + kept)}B",
        f"activations: counted in losses of {trial.rows} x {trial.length} bytes and of half of that, extended by bytes; what is held only",
        "for a moment is not counted",
    ]


def _time(run: Run, trial: Trial) -> list[str]:
    train, rows, length = run.train, run.train["rows"], run.length
    real = (trial.rows, trial.length) == (rows, length)
    scale = 1.0 if real else (flops(run, rows, length, trial.rate) or 1.0) / (flops(run, trial.rows, trial.length, trial.rate) or 1.0)
    update = trial.seconds * scale
    validation = train["validations"] * train["validation_bytes"] * update / (rows * length) / 3
    how = f"timed: an update of {trial.rows} x {trial.length} bytes took {trial.seconds:.3g} s"
    return [
        f"{_duration(update)} an update, {_duration(update * run.updates)} in all, validations {_duration(validation)}, on {_device(run)}",
        how if real else f"{how}; scaled by operations, {scale:,.0f} times as many",
    ]


def _writes(run: Run, folder: Path) -> list[str]:
    train, updates, every = run.train, run.updates, run.train["checkpoint_every"]
    parts = [sum(tensor.nbytes for tensor in part.state_dict().values()) for part in (run.model, run.agent) if isinstance(part, nn.Module)]
    size = sum(parts) + 2 * sum(parameter.nbytes for parameter in _parameters(run.model, run.agent))
    number = train["keep"] + 2  # the best, and the one that is being written
    lines = -(-updates // train["log_every"]) + train["validations"]
    mode = train.get("wandb")
    return [
        f"{folder}/config.yaml, metrics.jsonl with {lines:,} lines" + (f", wandb ({mode})" if mode else ""),
        f"{folder}/checkpoints of {_si(size)}B, one every {every} updates; at most {number} at once, {_si(number * size)}B",
    ]


def _parameters(*parts: Any) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, nn.Module):
            yield from part.parameters()


def _count(*parts: Any) -> int:
    return sum(parameter.numel() for parameter in _parameters(*parts))


def _fills(run: Run, rows: int) -> bool:
    try:
        return bool(run.agent.sample_counts(rows))
    except UserError:
        return False


def _device(run: Run) -> str:
    return torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else f"{run.device.type}, {torch.get_num_threads()} threads"


def _si(value: float) -> str:
    """Three digits and a prefix.

    >>> _si(999.4), _si(1_500_000), _si(2.5e13)
    ('999 ', '1.50 M', '25.0 T')
    """
    prefixes = iter(["", "k", "M", "G", "T", "P", "E"])
    prefix = next(prefixes)
    while value >= 999.5 and prefix != "E":
        value, prefix = value / 1000, next(prefixes)
    digits = 0 if value >= 99.95 or not prefix else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}"


def _duration(seconds: float) -> str:
    """In the unit that is read most easily.

    >>> _duration(0.0123), _duration(90), _duration(2e5)
    ('0.0123 s', '1.5 min', '2.3 days')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} hours" if seconds < 36 * 3600 else f"{seconds / 86400:,.1f} days"
