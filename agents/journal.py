"""What a run says of itself while it trains: ``metrics.jsonl``, the progress bar and W&B. Its updates only ever increase.

Of several ranks the first one keeps it. Losses, rates and norms are those of all ranks, unless ``train.statistics`` is "rank"; what
else an agent reports is of the first rank's rows.
"""

import json
import math
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from agents import durable
from agents.checkpoint import State
from segment_env.errors import UserError, one_line

_SHOWN = {"bits_per_byte": "bits/byte", "rate": "rate", "validation_bits_per_byte": "held-out", "validation_recall": "recall"}


class Journal:
    """Of the run in ``folder``, which goes on from ``state``; lines of ``metrics.jsonl`` after that are dropped: they come anew.

    Metrics that a checkpoint kept, as no line held them yet, count towards the next line. Raises UserError, as its methods do, where
    the folder cannot be written.
    """

    def __init__(self, folder: Path, state: State, updates: int, progress: bool, device: torch.device | str = "cpu"):
        self.folder, self.path, self.settings = folder, folder / "metrics.jsonl", state.config
        self.pending = [{key: value.to(device) for key, value in metrics.items()} for metrics in state.log]
        self.began = time.monotonic() - state.seconds
        try:
            lines = self.path.read_bytes().splitlines() if self.path.exists() else []
            kept = [line.decode() + "\n" for line in lines if _whole_and_until(line, state.update)]
            durable.write(self.path, "".join(kept))
        except OSError as error:
            raise self._unwritable(error) from error
        self.wandb = _wandb(folder, state.config) if state.config["train"]["wandb"] else None
        self.bar = tqdm(total=updates, initial=state.update, unit="update", disable=not progress, file=sys.stderr, dynamic_ncols=True)
        self.shown: dict[str, str] = {}

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
        if self.wandb:
            self.wandb.finish()

    @property
    def seconds(self) -> float:
        """Of training, over all processes of the run."""
        return time.monotonic() - self.began

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Take in the metrics of one update, on the device."""
        self.pending.append({key: value.detach().clone() for key, value in metrics.items()})
        self.bar.update()

    def means(self) -> dict[str, float]:
        """Means of what was added since the last call, skipped updates left out but counted; nats become bits per byte."""
        skipped = torch.stack([metrics["skipped"] for metrics in self.pending]).tolist()
        made = [metrics for metrics, was in zip(self.pending, skipped, strict=True) if not was]
        keys = dict.fromkeys(key for each in made for key in each if key != "skipped")  # not every batch need give all
        means = {key: torch.stack([each[key] for each in made if key in each]).mean().item() for key in keys}
        self.pending = []
        for name, nats in (("bits_per_byte", "nll"), ("early_bits_per_byte", "early_nll")):
            if nats in means:
                means[name] = means.pop(nats) / math.log(2)
        return means | {"skipped": int(sum(skipped)), "seconds": self.seconds}

    def write(self, line: dict[str, Any]) -> None:
        """One line of ``metrics.jsonl``."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error
        if self.wandb and line["update"] >= self.wandb.step:  # what W&B has of a run that was killed is not sent again
            self.wandb.log(line, step=line["update"])
        self.shown |= {label: f"{line[key]:.3f}" for key, label in _SHOWN.items() if key in line}
        self.bar.set_postfix(self.shown)

    def sync(self) -> None:
        """Bring the lines to the disk: a checkpoint that outlives a power cut must not lack those before it."""
        try:
            durable.sync(self.path)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write '{self.path}': {one_line(error)}; go on with --resume when that is mended")


def _whole_and_until(line: bytes, update: int) -> bool:
    try:
        return json.loads(line)["update"] <= update
    except (ValueError, KeyError, TypeError):  # the line that a kill cut off
        return False


def check_wandb(mode: str | None) -> None:
    """Raises UserError where W&B is asked for, and is not installed, or is to be reached and nobody is logged in."""
    if mode is None:
        return
    try:
        import wandb  # slow to import, and wanted by few
    except ImportError as error:
        raise UserError(f"train.wandb={mode} cannot import wandb ({one_line(error)}): install it, or use train.wandb=null") from error
    try:
        logged_in = mode != "online" or wandb.login(prompt=False)
    except wandb.Error as error:
        raise _refused_by_wandb(mode, error) from error
    if not logged_in:
        raise UserError("train.wandb=online: nobody is logged in to W&B; run wandb login, set WANDB_API_KEY, or use train.wandb=offline")


def _wandb(folder: Path, settings: dict[str, Any]) -> Any:
    """One W&B run for all processes of a run: its id lies in the run folder."""
    mode = settings["train"]["wandb"]
    check_wandb(mode)
    import wandb

    name = folder / "wandb_id"
    try:
        if not name.is_file():
            durable.write(name, secrets.token_hex(4))
        run_id = name.read_text()
    except OSError as error:
        raise UserError(f"cannot write '{name}': {one_line(error)}") from error
    try:
        return wandb.init(project="segment-env", dir=str(folder), config=settings, mode=mode, id=run_id, resume="allow")
    except wandb.Error as error:
        raise _refused_by_wandb(mode, error) from error


def _refused_by_wandb(mode: str, error: Exception) -> UserError:
    return UserError(f"train.wandb={mode}: {one_line(error)}; use train.wandb=offline or null")
