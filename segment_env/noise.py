"""Counter-based randomness: every number is a pure function of integers, so that rows, batches and ranks agree.

A number depends on (seed, domain, global sequence index, ...) alone: never on the batch it is drawn in, the device or what was
drawn before. The mixer is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) on wrapping int64.

Letters: S sequences, B rows, T bytes.
"""

import torch
from torch import Tensor

BYTES, ACTIONS = 0, 1  #: domains: what a number is for; streams of numbers in different domains are unrelated
_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit integer
_START = 0x243F6A8885A308D3  # digits of pi: the mixer maps 0 to 0, so no seed may lead there
_MASK = {30: (1 << 34) - 1, 27: (1 << 37) - 1, 31: (1 << 33) - 1}


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & _MASK[30])) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & _MASK[27])) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & _MASK[31])


def hashed(seed: int, domain: int, *counters: Tensor) -> Tensor:
    """63 random bits for every tuple of counters: int64 >= 0, of the counters' broadcast shape."""
    state = _mix(torch.full((), seed * 2 + domain, dtype=torch.int64, device=counters[0].device) * _GOLDEN + _START)
    for counter in counters:
        state = _mix(state + (counter.long() + 1) * _GOLDEN)
    return state & ((1 << 63) - 1)


def uniform(seed: int, domain: int, *counters: Tensor) -> Tensor:
    """Uniform floats of the open interval (0, 1): odd multiples of 2^-24, so that both u and 1 - u are exact in float32."""
    return ((hashed(seed, domain, *counters) >> 40).float() + 0.5) * 2.0**-23


def action_noise(seed: int, sequence: Tensor, sample: Tensor, length: int, antithetic: bool = False) -> Tensor:
    """The u[t] by which policies act, a[t] = (u[t] < p[t]).

    Args: ``sequence`` [B] int64, global index of each row's sequence; ``sample`` [B] int64, which of its K samples the row
    is; ``length`` T; ``antithetic`` makes samples 2i and 2i + 1 of a sequence use u and 1 - u.
    Returns: [B, T] float32 in (0, 1).
    """
    time = torch.arange(length, device=sequence.device)
    draw = sample // 2 if antithetic else sample
    u = uniform(seed, ACTIONS, sequence[:, None], draw[:, None], time)
    return torch.where((sample % 2 == 1)[:, None], 1 - u, u) if antithetic else u
