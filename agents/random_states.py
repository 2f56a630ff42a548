"""The states of the global random generators, as JSON.

The library draws nothing from them while it trains: its bytes and its noise are functions of integers. A researcher's own agent may.
"""

import random
from typing import Any

import numpy
import torch

from agents import ranks


def seed(value: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(value)
    numpy.random.seed(value % 2**32)
    torch.manual_seed(value)


def states() -> dict[str, Any]:
    """The generators as they stand, GPUs' included."""
    legacy: Any = numpy.random.get_state()
    name, keys, *rest = legacy
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(torch.cuda.get_rng_state(device)) for device in _gpus()],
    }


def restore(saved: dict[str, Any]) -> None:
    """Put the generators where they stood; those of GPUs that are not here are left out.

    Raises KeyError, TypeError, ValueError or RuntimeError on what :func:`states` did not give.
    """
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    numpy.random.set_state(tuple(saved["numpy"]))
    torch.set_rng_state(_tensor(saved["torch"]))
    for device, state in zip(_gpus(), saved["cuda"], strict=False):
        torch.cuda.set_rng_state(_tensor(state), device)


def _gpus() -> list[int]:
    """All that are here, but of several ranks each one's own: a rank must not touch the others'."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_device()] if ranks.total() > 1 else list(range(torch.cuda.device_count()))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
