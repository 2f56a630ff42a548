"""Segments of given bytes, and how a terminal shows them.

Letters: B rows, T bytes.
"""

import torch

from agents.escaping import printable
from segment_env.batch import Samples, pack
from segment_env.boundaries import split
from segment_env.scorer import Policy, Scorer
from segment_env.unroll import unroll


@torch.no_grad()
def segment(scorer: Scorer, policy: Policy, data: bytes, seed: int = 0, device: torch.device | str = "cpu") -> list[bytes]:
    """One seeded draw of boundaries, uncapped: joined again the segments are ``data``. Empty data has no segments.

    The data is read as one sequence, whatever its length.
    """
    if not data:
        return []
    rollout, _ = unroll(scorer, policy, pack([data], seed).to(device), Samples([1], device=device))
    return split(data, rollout["action"][0].bool().cpu())


def shown(segments: list[bytes], separator: str = "|") -> str:
    r"""Segments between separators on one line; what cannot be printed and bytes that are no UTF-8 are escaped, as Python does.

    A character that a boundary cuts in two is shown as its bytes.

    >>> shown([b"Call ", b"me", b"\n", "—".encode()[:1]])
    '|Call |me|\\n|\\xe2|'
    """
    texts = [printable(piece.decode("utf-8", "backslashreplace")) for piece in segments]
    return separator.join(["", *texts, ""]) if texts else ""
