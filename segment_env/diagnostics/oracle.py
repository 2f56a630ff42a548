"""The best policy of a diagnostic problem.

Letters: B rows, T bytes, D contexts.
"""

from typing import Protocol

from torch import Tensor, nn

from segment_env.errors import UserError
from segment_env.scorer import Decision, Observation


class HasOracle(Protocol):
    """Whatever has an oracle that reads the context alone."""

    oracle_contexts: Tensor  #: [D] bool


class Oracle(nn.Module):
    """Cuts exactly where h is one-hot in one of the given ``contexts`` [D] bool. A policy without parameters: no random variable."""

    n_past = 0
    reads_early_log_p = False

    contexts: Tensor

    def __init__(self, contexts: Tensor):
        super().__init__()
        self.register_buffer("contexts", contexts.clone())

    def parallel(self, h: Tensor, x: Tensor, noise: Tensor, early_log_p: Tensor | None = None, **_) -> Decision:
        """Decide all positions: h [B, T, D] -> action [B, T]."""
        return Decision(self._decide(h), None)

    def init(self, num_rows: int) -> tuple:
        """It keeps nothing."""
        return ()

    def step(self, state: tuple, observation: Observation, **_) -> tuple[tuple, Decision]:
        """Decide one position."""
        return state, Decision(self._decide(observation.hidden), None)

    def _decide(self, h: Tensor) -> Tensor:
        if h.shape[-1] != len(self.contexts):
            raise ValueError(f"the oracle reads {len(self.contexts)} contexts of its own problem, but h has a width of {h.shape[-1]}")
        return h @ self.contexts.to(h.dtype) > 0.5


def oracle(problem: HasOracle) -> Oracle:
    """The oracle of a problem, a :class:`segment_env.scorer.Policy`: its actions are the problem's ``reference`` at t > 0.

    Raises UserError on what is no diagnostic problem.
    """
    if not hasattr(problem, "oracle_contexts"):
        raise UserError(f"{type(problem).__name__} has no known best policy: the oracle is one of diagnostic=NAME")
    return Oracle(problem.oracle_contexts)
