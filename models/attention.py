"""Attention: exact sliding windows over bytes, full causal attention over tokens, rotary positions, and their cached steps.

All functions take q, k, v as [B, H, T, E] and return the same shape; scores are scaled by E^-1/2.

Letters: B rows, H heads, T positions, E width of a head, W window, N blocks, C positions of a block.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rotary_angles(positions: Tensor, head_width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary positions (RoFormer, arXiv 2104.09864): positions [..., T] -> two of [..., T, 1, E/2]."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rates = 10_000.0 ** -(torch.arange(0, head_width, 2, device=positions.device, dtype=wide) / head_width)
    angles = positions.unsqueeze(-1).to(wide) * rates
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x[i], x[i + E/2]) of x [..., T, H, E] by their angles; the dtype stays that of x."""
    cos, sin = (angle.to(x.dtype) for angle in angles)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention under ``mask`` (True: may be attended), broadcastable to [..., queries, keys]; leading dims are batch.

    On CUDA the fused kernel; on CPU two matrix products, which for these small blocks are faster, forward and backward.
    """
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with torch.autocast("cpu", enabled=False):  # softmax stays in the dtype of q: it sums in float32 inside either way
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def sliding(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Position t attends to t-window+1 .. t, exactly; time and memory are O(T window): there is no T x T mask.

    Queries are cut into N blocks of C >= W; a block sees its own C keys and the W - 1 before them.
    """
    length, past = q.shape[-2], window - 1
    block = max(window, 32)
    num_blocks = -(-length // block)
    tail = num_blocks * block - length
    q = F.pad(q, (0, 0, 0, tail)).unflatten(-2, (num_blocks, block))
    k, v = (F.pad(x, (0, 0, block, tail)).unflatten(-2, (num_blocks + 1, block)) for x in (k, v))
    k, v = (torch.cat([x[..., :-1, block - past :, :], x[..., 1:, :, :]], -2) for x in (k, v))
    query = torch.arange(block, device=q.device)[:, None]
    key = torch.arange(block + past, device=q.device) - past  # position of a key relative to its block
    band = (key <= query) & (key > query - window)
    real = torch.arange(0, num_blocks * block, block, device=q.device)[:, None, None] + key >= 0
    shape = (q.shape[0], -1)
    out = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), band & real).unflatten(0, shape)
    return out.flatten(-3, -2)[..., :length, :]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full causal attention: position t attends to 0 .. t. Short sequences on CPU take the explicit products: they are faster there."""
    if not q.is_cuda and q.shape[-2] <= 256:
        time = torch.arange(q.shape[-2], device=q.device)
        return attend(q, k, v, time <= time[:, None])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_ring(q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], time: Tensor) -> Tensor:
    """One step of :func:`sliding`: q, k, v [B, H, 1, E] at ``time`` [B] int64; the cache, two of [B, H, W, E], is written in place."""
    window = cache[0].shape[-2]
    row = torch.arange(len(time), device=time.device)
    for store, new in zip(cache, (k, v), strict=True):
        store[row, :, time % window] = new.squeeze(-2).to(store.dtype)
    filled = torch.arange(window, device=time.device) <= time[:, None]
    return F.scaled_dot_product_attention(q.to(cache[0].dtype), *cache, attn_mask=filled[:, None, None])


def attend_rows(q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], rows: Tensor, count: Tensor, used: int) -> Tensor:
    """One step of :func:`causal` for ``rows`` [R] of a cache of two [B, H, L, E], written in place.

    q, k, v are [R, H, 1, E]; ``count`` [R] int64 says how many tokens each row holds already, ``used`` the largest count + 1.
    """
    for store, new in zip(cache, (k, v), strict=True):
        store[rows, :, count] = new.squeeze(-2).to(store.dtype)
    keys, values = (store[:, :, :used] for store in cache)
    if len(cache[0]) > 1:  # a single row needs no copy
        keys, values = keys.index_select(0, rows), values.index_select(0, rows)  # on CPU 4 times as fast as store[rows, :, :used]
    filled = torch.arange(used, device=q.device) <= count[:, None]
    return F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=filled[:, None, None])
