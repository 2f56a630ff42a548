"""Ranks that learn together: what one process with all rows would, statistics and guards over all of them, and how they agree.

Letters: B rows.
"""

import gloo
import pytest
import torch
from learners import AGENTS, ROWS, UPDATES, batch, everything, far, made

from agents import ranks
from agents.totals import mean_over_ranks, over_ranks, sum_of_others, sum_over_ranks
from segment_env.errors import UserError

NAMES = [name for name in AGENTS if name != "mixed_ratio"]  # whose pairs lie elsewhere when each rank has its share of them


def learn(name: str, **settings):
    """A rank's updates with its share of the rows: everything it has learned, and the metrics of the last update."""
    learner = made(name, ROWS // ranks.total(), **settings)
    if ranks.total() > 1:
        learner.distribute()
    for n in range(UPDATES):
        metrics = learner.update(batch(learner, n, ranks.index(), ranks.total()))
    return everything(learner), metrics


def learn_all():
    found = {name: learn(name) for name in NAMES}
    return found | {f"{name} in parts": learn(name, micro_batches=2) for name in ("paper", "ppo")}


def learn_apart():
    """Statistics per rank: parameters agree, and are others."""
    learner = made("batch_relative", ROWS // 2)
    learner.distribute("rank")
    for n in range(UPDATES):
        learner.update(batch(learner, n, ranks.index(), 2))
    return everything(learner)


def skip():
    """One rank's bytes give no number in the second of three updates: -> what was skipped, and whether anything moved in it."""
    learner, skipped, moved = made("batch_relative", ROWS // 2), [], []
    learner.distribute()
    for n in range(3):
        before, unspoiled = everything(learner), learner.loss

        def spoiled(each, unspoiled=unspoiled):
            loss, metrics, rollout = unspoiled(each)
            return loss * torch.nan, metrics, rollout

        if n == 1 and ranks.index() == 1:
            learner.loss = spoiled
        skipped.append(bool(learner.update(batch(learner, n, ranks.index(), 2))["skipped"]))
        learner.loss = unspoiled
        moved.append(far(before, everything(learner)) > 0)
    return {"skipped": skipped, "moved": moved, "in a row": int(learner.most_skipped), "end": everything(learner)}


def infinite_loss():
    """A loss that is infinite on one rank alone, while its gradient is finite everywhere."""
    learner = made("batch_relative", ROWS // 2)
    learner.distribute("rank")
    unspoiled = learner.loss

    def spoiled(each):
        loss, metrics, rollout = unspoiled(each)
        return loss + torch.inf, metrics, rollout

    if ranks.index() == 0:
        learner.loss = spoiled
    return bool(learner.update(batch(learner, 0, ranks.index(), 2))["skipped"])


def sums():
    """Values and gradients of functions of sums: x is 1, 2 on rank 0 and 3, 4 on rank 1."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64) + 2 * ranks.index()
    x.requires_grad_()
    count = torch.tensor(1 + ranks.index())
    alone = sum_over_ranks(x.sum())[0].item()
    with over_ranks():
        total, number = sum_over_ranks(x.sum(), count)
        (total.square() / number).backward()
        others = sum_of_others(x.detach())[0]
        mean = mean_over_ranks(x.detach().mean(), 1 + 2 * ranks.index()).item()
    return {"alone": alone, "total": total.item(), "number": number, "gradient": x.grad, "others": others, "mean": mean}


def agreements():
    """Everything that ranks agree on by way of their hosts."""
    rank = ranks.index()
    found = [ranks.gather({"rank": rank}), ranks.highest(7 * rank), ranks.from_first(lambda: f"by {rank}"), ranks.is_first()]
    for mistaken in ([1], [0, 1]):
        try:
            with ranks.together():
                if rank in mistaken:
                    raise UserError(f"mistake of {rank}")
        except UserError as error:
            found.append(str(error))
    try:
        ranks.from_first(lambda: _refuse("no room"))
    except UserError as error:
        found.append(str(error))
    return found


def _refuse(text: str):
    raise UserError(text)


def learn_sharded(name: str):
    """FSDP2: each rank holds a part of every parameter, and all of them put together are what is compared."""
    learner = made(name, ROWS // 2)
    learner.distribute(shard=True)
    held = sum(parameter.to_local().numel() for parameter in learner.model.parameters())
    for n in range(UPDATES):
        learner.update(batch(learner, n, ranks.index(), 2))
    parts = {"model": learner.model, "agent": learner.agent}
    found = {f"{part}.{key}": value for part, module in parts.items() for key, value in module.state_dict().items()}
    return {key: ranks.whole(value).detach().clone() for key, value in found.items()}, held


def not_sharded():
    try:
        made("ppo", ROWS // 2).distribute(shard=True)
    except UserError as error:
        return str(error)


def world():
    return {
        "not sharded": not_sharded(),
        "sharded": {name: learn_sharded(name) for name in ("paper", "leave_one_out")},
        "learned": learn_all(),
        "apart": learn_apart(),
        "skipped": skip(),
        "infinite": infinite_loss(),
        "sums": sums(),
        "agreed": agreements(),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks found, in one world for all tests."""
    return gloo.run(world, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*NAMES, "paper in parts", "ppo in parts"])
def test_two_ranks_with_half_of_the_rows_learn_what_one_does_with_all(name: str, two) -> None:
    """Parameters and controllers after 5 updates in float64, on ragged rows."""
    expected, metrics = learn(name.removesuffix(" in parts"))
    start = everything(made(name.removesuffix(" in parts")))
    for rank in two:
        learned, logged = rank["learned"][name]
        assert far(learned, expected) < 1e-10 < 1e-3 < far(expected, start)
        for key in metrics.keys() & {"nll", "early_nll", "rate", "rate_uncapped", "grad_norm", "g_rms", "price", "baseline_explained"}:
            torch.testing.assert_close(logged[key].double(), metrics[key].double(), rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", ["paper", "leave_one_out"])
def test_sharded_parameters_learn_what_whole_ones_do(name: str, two) -> None:
    expected, _ = learn(name)
    total = sum(parameter.numel() for parameter in made(name).model.parameters())
    for rank in two:
        learned, held = rank["sharded"][name]
        assert far(learned, expected) < 1e-10 and 0.4 < held / total < 0.6
        assert rank["not sharded"].startswith("the parameters of LossModuleAgent cannot be sharded")


def test_shards_go_without_micro_batches() -> None:
    with pytest.raises(UserError, match="they go without micro-batches"):
        made("ppo", micro_batches=2).distribute(shard=True)


def test_statistics_of_a_rank_are_another_algorithm_on_which_ranks_agree(two) -> None:
    first, second = (rank["apart"] for rank in two)
    parameters = {name for name, _ in made("batch_relative").model.named_parameters("model")} | {"agent.policy.weight"}
    assert all(first[name].equal(second[name]) for name in parameters)
    assert far(first, two[0]["learned"]["batch_relative"][0]) > 1e-6


def test_one_rank_that_is_not_finite_skips_the_update_of_all(two) -> None:
    for rank in two:
        assert rank["skipped"]["skipped"] == [False, True, False] and rank["skipped"]["moved"] == [True, False, True]
        assert rank["skipped"]["in a row"] == 1 and rank["infinite"]
    assert far(two[0]["skipped"]["end"], two[1]["skipped"]["end"]) == 0


def test_sums_over_ranks_and_their_gradients(two) -> None:
    for index, rank in enumerate(two):
        found = rank["sums"]
        assert found["alone"] == 3 + 4 * index
        assert (found["total"], found["number"]) == (10, 3) and found["number"].dtype == torch.int64
        assert found["gradient"].tolist() == pytest.approx([2 * 2 * 10 / 3] * 2)  # twice, as a mean of two gradients is taken
        assert found["others"].tolist() == [[3, 4], [1, 2]][index]
        assert found["mean"] == (1 * 1.5 + 3 * 3.5) / 4


def test_what_ranks_agree_on(two) -> None:
    for index, rank in enumerate(two):
        gathered, highest, first, is_first, *mistakes = rank["agreed"]
        assert gathered == [{"rank": 0}, {"rank": 1}] and highest == 7 and first == "by 0" and is_first == (index == 0)
        assert mistakes == ["mistake of 1", "mistake of 0", "no room"]


def test_a_process_by_itself_agrees_with_itself() -> None:
    assert (ranks.total(), ranks.index(), ranks.is_first(), ranks.gather(3), ranks.highest(2)) == (1, 0, True, [3], 2)
    assert ranks.from_first(lambda: 5) == 5 and ranks.anywhere(torch.ones(())) == 1
    with pytest.raises(UserError, match="no room"), ranks.together():
        _refuse("no room")
    with over_ranks():
        assert sum_over_ranks(torch.ones(2))[0].tolist() == [1, 1] and sum_of_others(torch.ones(2))[0].tolist() == [0, 0]
        assert mean_over_ranks(torch.tensor(3.0), 0) == 3


def test_no_other_statistics_and_no_device_for_all() -> None:
    with pytest.raises(UserError, match="statistics must be one of all, rank, got 'some'"):
        made("ppo").distribute("some")


def test_every_rank_needs_a_device_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="train.device must be auto, cuda or cpu, got 'cuda:0'"), ranks.started("cuda:0"):
        pass
