"""A world of CPU processes over gloo, for tests of what ranks do together."""

import faulthandler
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing


def run(function: Callable[..., Any], folder: Path, total: int = 2, started: bool = True) -> list[Any]:
    """What ``function()`` returns on each of ``total`` ranks, each in a process of its own; ``started``, or as ``torchrun`` makes them."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_process, (function, folder, total, port, started), nprocs=total)
    return [torch.load(folder / f"{rank}.pt") for rank in range(total)]


def _process(rank: int, function: Callable[..., Any], folder: Path, total: int, port: int, started: bool) -> None:
    from agents import ranks

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(200, exit=True)  # a world that waits for ever says where
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": total, "LOCAL_WORLD_SIZE": total}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with ranks.started("cpu") if started else nullcontext():
        torch.save(function(), folder / f"{rank}.pt")
