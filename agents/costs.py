"""What the rows of an experiment cost: time of an update in turns with the reference's, and operations by formula.

Letters: B rows, T bytes.
"""

from statistics import fmean, median
from typing import Any

from agents import training
from agents.timing import updates_in_turns
from segment_env.errors import UserError

WARM_UP = 20  #: updates, so that a policy has begun to hold its rate


def check_pairs(value: Any) -> int:
    """The number of timed pairs that an experiment's ``costs`` gives. Raises UserError on anything else."""
    if type(value) is not int or value < 1:
        raise UserError(f"costs must be the number of timed pairs of updates a row, at least 1, got {value!r}")
    return value


def speed(settings: dict[str, Any], reference: dict[str, Any], pairs: int) -> dict[str, float]:
    """Update both in turns: -> medians: ``time_ratio``, of time a byte over the reference's; ``bytes_per_second``, decoded."""
    runs = [training.Run(each) for each in (settings, reference)]
    learners = [run.learner() for run in runs]
    batches = [next(run.batches(learner)) for run, learner in zip(runs, learners, strict=True)]
    taken = updates_in_turns(learners, batches, pairs, WARM_UP)
    size, other = (run.train["rows"] * run.length for run in runs)
    return {
        "time_ratio": median(first / second for first, second in taken) * other / size,
        "bytes_per_second": size / median(first for first, _ in taken),
    }


def update_flops(run: training.Run, tokens: float, samples: float, length: int | None = None) -> float:
    """Operations of an update per decoded byte, forward and backward, at ``tokens`` a byte and K = ``samples`` of every sequence.

    ``length`` of a crop: that of the run, where none is given.
    Of policies those with a ``flops_per_byte`` are counted; a read-out is too little.
    """
    policy = getattr(run.agent.policy, "flops_per_byte", lambda: 0.0)()
    return 3 * (run.model.flops_per_byte(tokens, length or run.length, samples) + policy)


def training_flops(run: training.Run, curve: list[dict[str, Any]], rate: float) -> float | None:
    """:func:`update_flops` at the mean rate of the validations, ``rate`` without any; None for a scorer that does not say what it costs."""
    if not hasattr(run.model, "flops_per_byte"):
        return None
    counts = run.agent.sample_counts(run.train["rows"])
    seen = fmean([line["validation_rate"] for line in curve] or [rate])
    # a rate is of choices: the first byte of a crop starts a token besides
    tokens = (1 + seen * (run.length - 1)) / run.length
    return update_flops(run, tokens, sum(counts) / len(counts))
