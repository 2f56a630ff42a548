"""Nothing that is not valid enters any loss, statistic or gradient.

Letters: B rows, T bytes.
"""

import torch
from tensordict import TensorDict


def mask_invalid(rollout: TensorDict) -> TensorDict:
    """All floats, and the actions, set to 0 where ``valid`` is False: run it before a tensordict meets any loss.

    Losses mask too late: 0 times a NaN of padding is NaN. Integers and flags are kept. ``rollout`` [B, T] needs ``valid``
    [B, T] bool; the entries of ``next`` follow the step they belong to. Returns a new tensordict.
    """
    valid = rollout["valid"]

    def zeroed(name: str | tuple[str, ...], leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point() and name != "action":
            return leaf
        return torch.where(valid.view(*valid.shape, *[1] * (leaf.dim() - valid.dim())), leaf, torch.zeros_like(leaf))

    return rollout.named_apply(zeroed)
