"""Metrics and W&B: every update once and in order, whatever was written before a run was killed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agents.checkpoint import State
from agents.journal import Journal, check_wandb
from segment_env.errors import UserError


class Wandb:
    """As W&B does: a run of a known id goes on behind its last step, and a step that does not increase is dropped with a warning."""

    Error = RuntimeError

    def __init__(self):
        self.history, self.ids, self.configs, self.logged_in = {}, [], [], True

    def login(self, prompt):
        assert prompt is False, "a run does not wait for somebody to type"
        return self.logged_in

    def init(self, id, resume, config, **_):
        assert resume == "allow"
        self.ids.append(id)
        self.configs.append(config)
        steps = self.history.setdefault(id, [])
        run = SimpleNamespace(step=max(steps) + 1 if steps else 0, finish=lambda: None)

        def log(line, step):
            assert step >= run.step, "Steps must be monotonically increasing"
            run.step = step
            steps.append(step)

        run.log = log
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def metrics(nll: float, skipped: float = 0.0) -> dict[str, torch.Tensor]:
    return {"nll": torch.tensor(nll), "early_nll": torch.tensor(2 * nll), "skipped": torch.tensor(skipped)}


def opened(folder: Path, update: int = 0, log=(), wandb: str | None = None, seconds: float = 0.0) -> Journal:
    return Journal(folder, State(update, {"train": {"wandb": wandb}}, seconds, log=list(log)), 100, progress=False)


def updates(folder: Path) -> list[int]:
    return [json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_after_the_checkpoint_come_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for update in (10, 20, 30):
            journal.write({"update": update})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"update": 4\xff')  # a kill cut it off
    with opened(tmp_path, 20) as journal:
        assert updates(tmp_path) == [10, 20]
        journal.write({"update": 30})
    assert updates(tmp_path) == [10, 20, 30]


def test_a_kill_while_lines_are_dropped_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as journal:
        journal.write({"update": 10})
        journal.write({"update": 20})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path, 10)
    assert updates(tmp_path) == [10, 20]


def test_what_no_line_held_yet_counts_towards_the_next(tmp_path: Path) -> None:
    log2 = torch.tensor(2.0).log().item()
    with opened(tmp_path, 2, [metrics(log2), metrics(2 * log2)], seconds=50.0) as journal:
        journal.add(metrics(6 * log2))
        journal.add(metrics(torch.nan, skipped=1.0))
        means = journal.means()
        assert means["bits_per_byte"] == pytest.approx(3) and means["early_bits_per_byte"] == pytest.approx(6)
        assert means["skipped"] == 1 and 50 <= means["seconds"] < 60
        journal.add(metrics(torch.inf, skipped=1.0))
        assert journal.means().keys() == {"skipped", "seconds"}


def test_wandb_goes_on_with_the_same_run_and_its_steps_only_increase(tmp_path: Path, wandb: Wandb) -> None:
    with opened(tmp_path, wandb="offline") as journal:
        for update in (10, 20, 20, 30):  # a validation has the update of a line
            journal.write({"update": update})
    with opened(tmp_path, 10, wandb="offline") as journal:
        for update in (20, 20, 30, 40):
            journal.write({"update": update})
    assert len(wandb.ids) == 2 and len(set(wandb.ids)) == 1
    assert wandb.configs == [{"train": {"wandb": "offline"}}] * 2, "the configuration is logged"
    assert wandb.history[wandb.ids[0]] == [10, 20, 20, 30, 40]
    assert updates(tmp_path) == [10, 20, 20, 30, 40]


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library as it is: configuration and lines reach the file that is to be synchronised."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    with opened(tmp_path, wandb="offline") as journal:
        journal.write({"update": 10, "rate": 0.2})
        assert journal.wandb.config["train"] == {"wandb": "offline"} and journal.wandb.step == 10
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_that_is_missing_or_logged_out(tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch) -> None:
    check_wandb(None)
    check_wandb("online")
    wandb.logged_in = False
    check_wandb("offline")
    with pytest.raises(UserError, match="nobody is logged in to W&B; run wandb login, set WANDB_API_KEY, or use train.wandb=offline"):
        check_wandb("online")
    with pytest.raises(UserError, match="nobody is logged in"):
        opened(tmp_path, wandb="online")
    wandb.logged_in = True
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(RuntimeError("no way\nthere")))
    with pytest.raises(UserError, match="^train.wandb=online: no way; use train.wandb=offline or null$"):
        opened(tmp_path, wandb="online")
    monkeypatch.setattr(wandb, "login", lambda **_: (_ for _ in ()).throw(RuntimeError("Failed to authenticate")))
    with pytest.raises(UserError, match="^train.wandb=online: Failed to authenticate; use train.wandb=offline or null$"):
        check_wandb("online")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="train.wandb=offline cannot import wandb .*: install it, or use train.wandb=null"):
        check_wandb("offline")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").mkdir()
        for write in (lambda: journal.write({"update": 1}), lambda: opened(tmp_path)):
            with pytest.raises(UserError, match="cannot write '.*metrics.jsonl': Is a directory; go on with --resume when that is mended"):
                write()
