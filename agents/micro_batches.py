"""A batch in micro-batches: the memory of one, the gradient of all.

Every micro-batch is played and scored once, and the language model's gradient is taken at once, as its denominators are known from
``valid``. What the agent's loss needs of other rows is small: the rollouts are put together, and one loss over all of them says what it
wants of every logit and every gate. Each micro-batch then carries that to the parameters: its decisions are made once more, with
their graph, which takes the policy, and where ``encoder_grad`` is on the encoder, but never the decoder.

So nothing is a mean of means: centring over the batch, the rate's loss and its controller, a critic's loss see the whole batch,
with ragged rows and over all ranks. The same holds of gradients that reach the encoder. Further epochs pass over the whole
rollout, as they always do. What it costs beside more and smaller launches is that second pass.

Letters: S sequences, K boundary samples of a sequence, B rows, T bytes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from segment_env.batch import Batch, Samples
from segment_env.errors import UserError
from segment_env.unroll import Live


class Part(NamedTuple):
    """A micro-batch: whole sequences with all of their rows."""

    sequences: slice
    rows: slice
    samples: Samples


def parts(samples: Samples, count: int, device: torch.device | str) -> list[Part]:
    """``count`` micro-batches of equally many rows. Raises UserError where they would cut through the K rows of a sequence."""
    if type(count) is not int or count < 1:
        raise UserError(f"train.micro_batches must be a whole number of at least 1, got {count!r}")
    rows, found, begin, first, end = samples.num_rows, list[Part](), 0, 0, 0
    for sequence, k in enumerate(samples.counts, 1):
        end += k
        if end * count == rows * (len(found) + 1):
            own = Samples(samples.counts[begin:sequence], samples.antithetic, device)
            found.append(Part(slice(begin, sequence), slice(first, end), own))
            begin, first = sequence, end
    if len(found) != count:
        groups = f" without parting the {max(samples.counts)} samples of a sequence" if max(samples.counts) > 1 else ""
        raise UserError(f"train.micro_batches={count} do not divide the {rows} rows of a rank{groups}: choose another number of either")
    return found


def of(batch: Batch, part: Part) -> Batch:
    """The sequences of one micro-batch."""
    x, valid, terminated, sequence = (each[part.sequences] for each in (batch.bytes, batch.valid, batch.terminated, batch.sequence))
    return Batch(x, valid, terminated, sequence, batch.seed)


def wanted(rollout: TensorDictBase, live: Live) -> Live:
    """Leaves for the logits and the gate of ``rollout``, which gather what a loss wants of them; as far as ``live``, of one part, has them.

    There is no graph behind anything else: a loss that reads h or a nll of this fails.
    """
    there = (("logits", live.logits), ("gate", live.gate))
    leaves = (None if one is None else rollout[name].clone().requires_grad_() for name, one in there)
    return Live(None, None, None, *leaves)  # type: ignore[arg-type]


def carry(decided: Sequence[Tensor | None], leaves: Live, rows: slice) -> Tensor:
    """The scalar whose gradient in the logits and the gate that were ``decided`` of ``rows`` is what the ``leaves`` gathered."""
    pairs = zip(decided, (leaves.logits, leaves.gate), strict=True)
    terms = [(leaf.grad[rows] * one).sum() for one, leaf in pairs if one is not None and leaf is not None and leaf.grad is not None]
    return sum(terms, torch.zeros(()))
