"""Processes that train one model together, started by ``torchrun``: who this one is, and how all of them agree.

``accelerate`` starts the process group (NCCL on GPUs, gloo on CPUs) and wraps what is trained in data parallelism. What is agreed on
here goes over gloo between the hosts, so that no GPU is waited for. In a process by itself every function does the obvious.

Letters: R ranks.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from segment_env.errors import UserError

T = TypeVar("T")
_TIMEOUT = timedelta(hours=6)  #: the first rank validates, writes and evaluates while the others wait; one that dies is noticed at once
_hosts: Any = None  #: the gloo group beside NCCL; None: the group of all is one


def total() -> int:
    """R: how many ranks there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def index() -> int:
    """Which of them this process is, from 0 on."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the rank that writes and speaks; known before the ranks are started, too."""
    return index() == 0 if distributed.is_initialized() else os.environ.get("RANK", "0") == "0"


@contextmanager
def started(device: str = "auto") -> Iterator[None]:
    """A context in which the ranks that ``torchrun`` started know each other; without it, or with one, nothing is done.

    ``device`` is ``train.device``: GPUs are dealt out to the ranks of a machine. What :func:`data_parallel` made is to be let go of
    before the context ends: else a rank may hang when it goes. Raises UserError where that cannot be.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield
        return
    cpu, local = device == "cpu" or not torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"every rank takes a device of its own: train.device must be auto, cuda or cpu, got {device!r}")
    if not cpu and local >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise UserError(f"rank {local} of this machine has no GPU, as there are {there}: start no more ranks, or use train.device=cpu")
    from accelerate import PartialState  # slow to import, and wanted by few

    global _hosts
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # as torch has it, and without a warning
    PartialState(cpu=cpu, timeout=_TIMEOUT)
    _hosts = None if cpu else distributed.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield
    finally:
        gc.collect()  # data parallelism that goes after its group may wait forever for the threads of gloo
        distributed.destroy_process_group()
        PartialState._reset_state()
        _hosts = None


def data_parallel(module: nn.Module) -> nn.Module:
    """``module`` whose gradients are means over all ranks, and whose parameters and buffers are those of the first rank."""
    if total() == 1:
        return module
    from accelerate import Accelerator, DistributedDataParallelKwargs

    device = next(module.parameters()).device
    # The model rests in the later epochs of a batch, and a critic where nothing was decided. Where all take part torch warns of a needless
    # search for those that rest; this one always does.
    module.register_parameter("resting", nn.Parameter(torch.zeros((), device=device)))
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    return Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=handlers).prepare_model(module)


def shard(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Share the parameters of ``module`` out to all ranks, in place: those of each block are put together when it is called.

    By torch itself: accelerate's FSDP2 wants a plugin for the whole process and an optimiser of its own making.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import, and wanted by few
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (total(),))
    for each in (*blocks, module):
        fully_shard(each, mesh=mesh)


def whole(value: Tensor) -> Tensor:
    """A tensor that is sharded over the ranks, put together; any other as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def anywhere(flag: Tensor) -> Tensor:
    """The largest of the ranks' scalars, on the device."""
    if total() > 1:
        flag = flag.clone()
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return flag


def highest(number: int) -> int:
    """The largest of the ranks' numbers."""
    return -_lowest(-number)


def gather(value: T) -> list[T]:
    """What every rank has, in their order; of this project's own processes, so that pickle may carry it."""
    if total() == 1:
        return [value]
    values: list[Any] = [None] * total()
    distributed.all_gather_object(values, value, group=_hosts)
    return values


@contextmanager
def together() -> Iterator[None]:
    """A context that every rank passes: a UserError inside it on some of them is raised on all, that of the lowest rank."""
    mistake = None
    try:
        yield
    except UserError as error:
        if total() == 1:
            raise
        mistake = error
    if total() > 1 and (rank := _lowest(total() if mistake is None else index())) < total():
        raise UserError(_from(rank, str(mistake))) from mistake


def from_first(function: Callable[..., T], *arguments: Any) -> T:
    """What ``function`` returns on the first rank, which alone calls it; a UserError of its is raised on all."""
    if total() == 1:
        return function(*arguments)
    outcome: Any = None
    if is_first():
        try:
            outcome = (function(*arguments), None)
        except UserError as error:
            outcome = (None, str(error))
    result, mistake = _from(0, outcome)
    if mistake is not None:
        raise UserError(mistake)
    return result


def _from(rank: int, value: Any) -> Any:
    box = [value]
    distributed.broadcast_object_list(box, src=rank, group=_hosts)
    return box[0]


def _lowest(number: int) -> int:
    if total() == 1:
        return number
    box = torch.tensor(number)
    distributed.all_reduce(box, distributed.ReduceOp.MIN, group=_hosts)
    return int(box)
