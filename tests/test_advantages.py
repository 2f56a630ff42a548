"""The steps of an advantage, on numbers small enough to follow, and their indifference to padding."""

from functools import partial
from itertools import permutations, product

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from agents.advantages import (
    advantage,
    batch_relative,
    discounted_return,
    early_exit,
    hard_horizon,
    leave_one_out,
    normalise,
    subtract_baseline,
)
from agents.estimators import score_function
from segment_env.boundaries import is_choice
from segment_env.masking import mask_invalid

MEAN_OF_ALL, MEAN_OF_OTHERS = partial(batch_relative, own_sample=True), partial(batch_relative, own_sample=False)
BACK = partial(discounted_return, gamma=0.9)


def rollout_of(values: list[list[float | None]], sequence: list[int], early: float = 0.0) -> TensorDict:
    """A rollout whose reward less its early-exit part is ``values`` [B, T]; None is padding."""
    valid = torch.tensor([[value is not None for value in row] for row in values])
    reward = torch.tensor([[value or 0.0 for value in row] for row in values], dtype=torch.float64)
    early_nll = torch.where(valid, early, 0.0).double()
    done = ~torch.nn.functional.pad(valid, (0, 1))[:, 1:]
    size = list(valid.shape)
    nested = {"reward": reward + early_nll, "nll": -reward, "early_nll": early_nll, "done": done}
    return TensorDict(
        {
            "valid": valid,
            "is_choice": is_choice(valid),
            "sequence": torch.tensor(sequence)[:, None].expand(size),
            "action": torch.ones(size, dtype=torch.long),
            "logits": torch.zeros(size, dtype=torch.float64),
            "next": TensorDict({name: values[..., None] for name, values in nested.items()}, size),
        },
        size,
    )


def check(got: Tensor, expected: list[list[float]], atol: float = 1e-14) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def random_rollout(seed: int = 0) -> TensorDict:
    """Seven rows of three sequences and one that has two bytes, T = 9, all keys that the steps read."""
    generator = torch.Generator().manual_seed(seed)
    sequence, count = [0, 0, 1, 2, 2, 2, 3], [9, 9, 6, 7, 7, 7, 2]
    values = torch.randn(7, 9, generator=generator, dtype=torch.float64).tolist()
    rollout = rollout_of([row[:n] + [None] * (9 - n) for row, n in zip(values, count, strict=True)], sequence, early=1.3)
    rollout["logits"] = torch.randn(7, 9, generator=generator, dtype=torch.float64) * rollout["is_choice"]
    rollout["action"] = (torch.rand(7, 9, generator=generator) < 0.5).long() * rollout["valid"]
    return rollout


def recipes() -> list[list]:
    """Every choice of steps with every order of them, and a deviation at the end or not."""
    made = []
    for early, mean, pairs, scaled in product([[], [early_exit]], [[], [MEAN_OF_ALL], [MEAN_OF_OTHERS]], [[], [leave_one_out]], [0, 1]):
        made += [[*order, *[normalise] * scaled] for order in permutations([BACK, *early, *mean, *pairs])]
    return made


# --- literal numbers ---


def test_values_begin_without_the_early_exit() -> None:
    rollout = rollout_of([[-3.0, -1.0, None]], [0], early=5.0)
    check(advantage(rollout, []), [[-3, -1, 0]])
    check(advantage(rollout, [early_exit]), [[2, 4, 0]])


def test_a_price_stays_in_without_the_early_exit() -> None:
    rollout = rollout_of([[-3.0, -1.0]], [0], early=5.0)
    rollout["next", "reward"][:, 1] -= 0.25
    check(advantage(rollout, []), [[-3, -1.25]])


def test_discounted_return() -> None:
    rollout = rollout_of([[1.0, 2.0, 4.0], [8.0, 4.0, None]], [0, 1])
    check(advantage(rollout, [partial(discounted_return, gamma=0.5)]), [[3, 4, 4], [10, 4, 0]])


def test_hard_horizon() -> None:
    # 1 + 2, 2 + 4, 4 + 8, 8; a row that ends after two bytes
    rollout = rollout_of([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, None, None]], [0, 1])
    check(advantage(rollout, [partial(hard_horizon, horizon=2)]), [[3, 6, 12, 8], [48, 32, 0, 0]])
    check(advantage(rollout, [partial(hard_horizon, horizon=1)]), [[1, 2, 4, 8], [16, 32, 0, 0]])


def test_subtract_baseline() -> None:
    # G = 7, 6, 4 and 24, 16; what the baseline is fitted to is what the steps before have made
    rollout = rollout_of([[1.0, 2.0, 4.0], [8.0, 16.0, None]], [0, 1])
    rollout["baseline"] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]], dtype=torch.float64)
    back = partial(discounted_return, gamma=1.0)
    check(advantage(rollout, [back, subtract_baseline]), [[6, 4, 1], [20, 11, 0]])
    check(rollout["baseline_target"], [[7, 6, 4], [24, 16, 0]])
    check(advantage(rollout, [MEAN_OF_OTHERS, subtract_baseline, back]), [[-23, -15, 1], [12, 9, 0]])
    check(rollout["baseline_target"], [[-7, -14, 4], [7, 14, 0]])


def test_batch_relative_with_the_own_sample() -> None:
    # columns: mean(1, 3, 8) = 4; mean(2, 6) = 4; 5 stands alone
    rollout = rollout_of([[1.0, 2.0, 5.0], [3.0, 6.0, None], [8.0, None, None]], [0, 1, 2])
    check(advantage(rollout, [MEAN_OF_ALL]), [[-3, -2, 0], [-1, 2, 0], [4, 0, 0]])
    check(advantage(rollout, [batch_relative]), [[-3, -2, 0], [-1, 2, 0], [4, 0, 0]])


def test_batch_relative_without_the_own_sample() -> None:
    # column 0: 1 - (3 + 8)/2, 3 - (1 + 8)/2, 8 - (1 + 3)/2; column 1: 2 - 6, 6 - 2; column 2: nothing to subtract
    rollout = rollout_of([[1.0, 2.0, 5.0], [3.0, 6.0, None], [8.0, None, None]], [0, 1, 2])
    check(advantage(rollout, [MEAN_OF_OTHERS]), [[-4.5, -4, 5], [-1.5, 4, 0], [6, 0, 0]])


def test_batch_relative_leaves_the_whole_sequence_out() -> None:
    # column 0: rows 0 and 1 see (4 + 6)/2 = 5, rows 2 and 3 see (1 + 3)/2 = 2; column 1: rows 0 and 1 see nobody
    rollout = rollout_of([[1.0, 7.0], [3.0, 9.0], [4.0, None], [6.0, None]], [5, 5, 2, 2])
    check(advantage(rollout, [MEAN_OF_OTHERS]), [[-4, 7], [-2, 9], [2, 0], [4, 0]])


def test_leave_one_out() -> None:
    # 1 - (3 + 8)/2, 3 - (1 + 8)/2, 8 - (1 + 3)/2; 2 - 6, 6 - 2; a sample alone keeps its value
    rollout = rollout_of([[1.0], [3.0], [8.0], [2.0], [6.0], [7.0]], [0, 0, 0, 1, 1, 2])
    check(advantage(rollout, [leave_one_out]), [[-4.5], [-1.5], [6], [-4], [4], [7]])


def test_both_baselines_together() -> None:
    # others first: -4, -2 | 5; then the pair's difference, and the lone row as it was
    rollout = rollout_of([[1.0], [3.0], [7.0]], [0, 0, 1])
    check(advantage(rollout, [MEAN_OF_OTHERS, leave_one_out]), [[-2], [2], [5]])
    # pair first: -2, 2 | 7; then less the others' mean: less 7, 7 | less 0
    check(advantage(rollout, [leave_one_out, MEAN_OF_OTHERS]), [[-9], [-5], [7]])


def test_normalise() -> None:
    # choices: 1, 5, 3 and 7, of mean 4 and variance (9 + 1 + 1 + 9)/4 = 5; t = 0 and padding do not count
    rollout = rollout_of([[100.0, 1.0, 5.0], [-50.0, 3.0, None], [0.0, 7.0, None]], [0, 1, 2])
    root = 5**0.5
    expected = [[100 / root, 1 / root, 5 / root], [-50 / root, 3 / root, 0], [0, 7 / root, 0]]
    check(advantage(rollout, [normalise]), expected, atol=1e-6)
    check(advantage(rollout, [partial(normalise, epsilon=0.0)]), expected)
    check(advantage(rollout, [partial(normalise, epsilon=5 - root)]), [[20, 0.2, 1], [-10, 0.6, 0], [0, 1.4, 0]])


def test_normalise_without_choices_or_spread() -> None:
    check(advantage(rollout_of([[0.0], [0.0]], [0, 1]), [normalise]), [[0], [0]])
    assert advantage(rollout_of([[2.0, 3.0]], [0]), [normalise]).isfinite().all()


def test_score_function() -> None:
    # p = .25 at log(1/3): -(1 - .25) * 4 = -3 and -(0 - .25) * 4 = 1; t = 0 and padding are no choices
    rollout = rollout_of([[4.0, 4.0, 4.0, None]], [0])
    rollout["logits"].fill_(torch.tensor(1 / 3, dtype=torch.float64).log())
    rollout["action"] = torch.tensor([[1, 1, 0, 0]])
    check(score_function(rollout, []), [[0, -3, 1, 0]])


# --- padding ---


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_garbage_in_padding_changes_nothing(garbage: float) -> None:
    clean = random_rollout()
    dirty, padding = clean.clone(), ~clean["valid"]
    for key in ("logits", ("next", "reward"), ("next", "nll"), ("next", "early_nll")):
        dirty[key][padding] = garbage
    dirty["action"][padding] = 1
    masked = mask_invalid(dirty)
    for key in ("logits", "action", ("next", "reward"), ("next", "nll"), ("next", "early_nll")):
        assert torch.equal(masked[key], clean[key]), key
    for steps in recipes():
        assert torch.equal(score_function(masked, steps), score_function(clean, steps))
        assert advantage(masked, steps).isfinite().all()


def test_padding_holds_nothing_whatever_a_step_does() -> None:
    rollout = random_rollout()
    for steps in ([lambda values, _: values + 1], [lambda values, _: values / 0], *recipes()):
        for result in (advantage(rollout, steps), score_function(rollout, steps)):
            assert not result[~rollout["valid"]].any()
        assert not score_function(rollout, steps)[~rollout["is_choice"]].any()


def test_an_index_that_no_row_reaches_is_no_zero_over_zero() -> None:
    rollout = rollout_of([[1.0, 2.0, None], [3.0, 5.0, None]], [0, 1])
    check(advantage(rollout, [MEAN_OF_ALL]), [[-1, -1.5, 0], [1, 1.5, 0]])
    for steps in recipes():
        assert advantage(rollout, steps).isfinite().all()


def test_further_rows_of_padding_change_nothing() -> None:
    rollout = random_rollout()
    empty = rollout_of([[None] * 9] * 3, [3, 0, 9])  # also as rows of sequences that are there
    more = torch.cat([empty[:1], rollout, empty[1:]])
    for steps in recipes():
        torch.testing.assert_close(advantage(more, steps)[1:8], advantage(rollout, steps), rtol=0, atol=1e-10)
        g = score_function(more, steps)
        torch.testing.assert_close(g[1:8], score_function(rollout, steps), rtol=0, atol=1e-10)
        assert not g[[0, 8, 9]].any()


def test_further_bytes_of_padding_change_nothing() -> None:
    rollout = random_rollout()
    longer = torch.cat([rollout, rollout_of([[None] * 3] * 7, [0, 0, 1, 2, 2, 2, 3])], 1)
    for steps in recipes():
        torch.testing.assert_close(score_function(longer, steps)[:, :9], score_function(rollout, steps), rtol=0, atol=1e-10)
