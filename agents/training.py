"""The training program: a configuration in, a run folder out, with checkpoints that it can go on from.

A run folder holds ``config.yaml``, ``metrics.jsonl`` (one line every ``train.log_every`` updates, and one a validation) and
``checkpoints/``: one every ``train.checkpoint_every`` updates, of which the newest ``train.keep`` stay, and the best, one whenever
validation bits per byte are lower than ever before.

Letters: S sequences, B rows, T bytes.
"""

import copy
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agents import checkpoint, config, durable, micro_batches, random_states, ranks
from agents.agent import Agent
from agents.calibration import offset_for, shifted_logits
from agents.data import MAX_SEED, Source, batches, held_out, train_stream, training_bytes
from agents.evaluation import evaluate
from agents.journal import Journal, check_wandb
from agents.learner import STATISTICS, Learner
from agents.rules import Rule
from agents.segmenting import beginning, segment, shown
from models import ByteUNet
from segment_env.batch import Batch, Batches
from segment_env.errors import UserError, one_line
from segment_env.scorer import Policy
from segment_env.streams import SPLITS

WANDB_MODES = (None, "offline", "online")
_COUNTS = ("rows", "bytes", "log_every", "validation_bytes", "checkpoint_every", "keep", "max_skipped")  #: of ``train``, at least 1


class Run:
    """The parts that a configuration describes: data, model, agent, and where they stand.

    The model is initialised from ``seed`` before the agent is built, so that runs of one seed begin alike whatever their agent. A
    given rule is then fitted: see :class:`agents.rules.Rule`.
    """

    def __init__(self, settings: dict[str, Any]):
        _check(settings)
        self.settings, self.train = settings, settings["train"]
        self.device = _device(self.train["device"])
        self.length: int = settings["data"]["length"]
        self.source: Source = config.build(settings["data"]["source"])
        torch.manual_seed(settings["seed"])
        self.model = config.build(settings["model"]).to(self.device)
        if self.train.get("compile"):
            _compile(self.model)
        self.agent = make_agent(settings["agent"], self.model.width).to(self.device)
        if isinstance(rule := self.agent.policy, Rule):
            _check_unit(rule, self.source)
            rule.read_training(training_bytes(self.source, self.length, settings["seed"]))
        self.calibrate()

    @property
    def updates(self) -> int:
        """All updates of the budget: ``train.bytes`` decoded bytes, B * T an update."""
        return max(1, round(self.train["bytes"] / (self.train["rows"] * self.length)))

    def counts(self, update: int) -> dict[str, int]:
        """How far a run is after ``update`` updates: bytes read are different ones, bytes decoded those of all rows."""
        rows = self.train["rows"]
        sequences = len(self.agent.sample_counts(rows))
        return {"update": update, "bytes_read": update * sequences * self.length, "bytes_decoded": update * rows * self.length}

    @property
    def learns(self) -> bool:
        """Whether there is anything to train: a rule on a scorer in closed form has no parameters."""
        return any(True for part in (self.model, self.agent) for _ in part.parameters())

    def learner(self) -> Learner:
        """The learner of this configuration, fresh, of this rank's share of the rows. Raises UserError where they have no such share."""
        optimiser, rows, parts = self.train["optimiser"], self.train["rows"], self.train.get("micro_batches", 1)
        if rows % ranks.total():
            raise UserError(f"train.rows={rows} do not divide over {ranks.total()} ranks: choose a multiple of {ranks.total()}")
        with refused("train.optimiser does not fit", TypeError, ValueError):
            own = rows // ranks.total()
            return Learner(self.model, self.agent, own, self.updates, **optimiser, micro_batches=parts, device=self.device)

    def batches(self, learner: Learner) -> Batches:
        """This rank's batches to train on, from the first one on."""
        return batches(self.source, learner.num_sequences, self.length, self.settings["seed"], ranks.index(), ranks.total())

    def calibrate(self) -> None:
        """Fit a rule's threshold, if it has one, to validation bytes and the model as it is now."""
        if isinstance(rule := self.agent.policy, Rule):
            rule.calibrate(self.model, self._known(), self.device)

    def offset(self, rate: float, seed: int = 0, thresholded: bool = False) -> float:
        """The offset of all logits that gives ``rate`` on validation bytes: see :func:`agents.calibration.offset_for`."""
        return offset_for(self.model, self.agent.policy, self._known(seed), rate, self.device, thresholded)

    def _known(self, seed: int = 0) -> Iterator[Batch]:
        """The validation bytes that a run is calibrated on."""
        return held_out(self.source, "validation", self.length, self.train["rows"], self.train["validation_bytes"], seed)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Play the first micro-batch, compiled if that is asked for, and reach for the held-out ones.

        Raises UserError on a mistake that shows only then.
        """
        check_wandb(self.train.get("wandb"))
        learner = self.learner()
        self.agent.eval()  # a controller keeps nothing of it
        before = copy.deepcopy(self.agent.state_dict())  # and a loss that adapts itself is set back
        with refused("the configuration cannot be trained", ValueError, TypeError, KeyError, RuntimeError, NotImplementedError):
            first, *_ = learner.parts
            with torch.set_grad_enabled(bool(self.train.get("compile"))):
                learner.loss(micro_batches.of(next(self.batches(learner)), first), first.samples)
            for split in SPLITS[1:]:
                next(held_out(self.source, split, self.length, 1))
        self.agent.load_state_dict(before)

    def sentence(self) -> str:
        """A held-out sentence as the agent cuts it now, always the same one."""
        self.agent.eval()
        batch = next(held_out(self.source, "validation", self.length, 1))
        text = bytes(batch.bytes[0][batch.valid[0]].tolist())
        begin = beginning(text)
        return shown(segment(self.model, self.agent.policy, text[begin : begin + 120], device=self.device))

    def evaluate(self, split: str, max_bytes: int | None = None, seed: int = 0, rate: float | None = None) -> dict[str, Any]:
        """Figures of a held-out split: see :func:`agents.evaluation.evaluate`.

        With a ``rate`` one offset is added to all logits, calibrated on validation bytes to that rate; it is among the figures.
        """
        self.agent.eval()
        batches = held_out(self.source, split, self.length, self.train["rows"], max_bytes, seed)
        if rate is None:
            return evaluate(self.model, self.agent.policy, batches, self.source, self.device, self.agent.price)
        offset = self.offset(rate, seed)
        with shifted_logits(self.agent.policy, offset):
            figures = evaluate(self.model, self.agent.policy, batches, self.source, self.device, self.agent.price)
        return {**figures, "boundaries": f"{figures['boundaries']}, calibrated to {rate:g} on validation bytes", "offset": offset}


def make_agent(node: dict[str, Any], width: int, policy: Policy | None = None) -> Agent:
    """The agent that ``node`` describes, for an h of ``width`` D; with a ``policy`` that is there already, in place of its own.

    A policy, a critic or a baseline that reads h stands in the configuration as a partial one: it is told the width.
    """
    parts: dict[str, Any] = {"policy": policy or config.build(node.get("policy"))}
    for name in ("policy", "critic", "baseline"):
        if node.get(name) is None:
            continue
        part = parts["policy"] if name == "policy" else config.build(node[name])
        told = (width, parts["policy"].n_past) if name == "critic" else (width,)
        with refused(f"agent.{name} cannot be built", TypeError, ValueError):
            parts[name] = part(*told) if isinstance(part, partial) else part
    return config.build({key: value for key, value in node.items() if key not in parts}, **parts)


def open_run(path: Path, best: bool = False) -> Run:
    """A finished or half-finished run with the parameters of its newest checkpoint, or its best, or the one that ``path`` is.

    Raises UserError where there is none.
    """
    folder, found = checkpoint.run_of(path), checkpoint.find(path, best)
    if found is None:
        raise UserError(f"run '{folder}' has no checkpoint yet; train it further, or choose another run")
    run = Run(config.read(folder / "config.yaml"))
    checkpoint.load(found, run.model, run.agent)
    return run


def new_folder(folder: Path | None = None) -> Path:
    """Where a run would be written, by default ``runs/DATE-TIME``. Raises UserError where one stands there."""
    if folder is None:
        folder = Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}")
    if (folder / "config.yaml").exists():
        raise UserError(f"'{folder}' already holds a run; go on with --resume {folder}, or give another folder")
    return folder


def begin(settings: dict[str, Any], folder: Path | None = None, command: str = "") -> Path:
    """Make the run folder of a configuration, see :func:`new_folder`; its ``config.yaml`` opens with the ``command`` that asked for it.

    Raises UserError where it cannot be written too.
    """
    folder = new_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save(settings, folder / "config.yaml", command)
        durable.sync(folder.parent)
    except OSError as error:
        raise UserError(f"cannot write the run folder '{folder}': {one_line(error)}") from error
    return folder


def train(
    run: Run,
    folder: Path,
    resume: Path | None = None,
    progress: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> Learner:
    """Train ``run``, writing to ``folder``, to the end of its budget, or until ``stop`` says so after an update: -> its learner.

    With ``resume``, a checkpoint of the folder, it goes on from there. Several ranks train as one, each calling this: the first alone
    validates and writes, and all stop where one of them is to. Raises UserError where the folder cannot be written, and where
    ``train.max_skipped`` updates in a row were skipped as they were not finite.
    """
    with ranks.together():
        learner = run.learner()
        data = run.batches(learner)
        if resume:
            state = checkpoint.restore(resume, learner, data, run.settings)
        else:
            state = checkpoint.State(0, run.settings)
            random_states.seed(run.settings["seed"] + ranks.index())
    learner.distribute(run.train.get("statistics", "all"))
    ranks.from_first(checkpoint.forget_after, folder, state.update)
    with ranks.together():
        opened = Journal(folder, state, run.updates, progress, run.device) if ranks.is_first() else nullcontext()
    with opened as journal:
        for update in range(state.update + 1, run.updates + 1):
            with ranks.together():
                batch = next(data)
            metrics = learner.update(batch)
            if journal:
                journal.add(metrics)
            last, better = update == run.updates, False
            state = replace(state, update=update, validation_bits_per_byte=None)
            if update % run.train["log_every"] == 0 or last:
                _check_finite(run, folder, learner, update)
                ranks.from_first(_log, run, journal, update)
            validates = _every(update, run.train["validations"], run.updates)
            if validates or last or update & (update - 1) == 0:  # a young model changes most in its first updates
                run.calibrate()
            if validates:
                state.validation_bits_per_byte, better = ranks.from_first(_validate, run, journal, update)
            stopped = ranks.highest(stop()) > 0
            if update % run.train["checkpoint_every"] == 0 or last or stopped or better:
                _check_finite(run, folder, learner, update)
                state.skipped_in_a_row = int(learner.skipped_in_a_row)
                if last or stopped or not state.skipped_in_a_row:  # what a run may fall back on ends with an update that was made
                    places = ranks.gather((data.state_dict(), random_states.states()))
                    ranks.from_first(_save, run, journal, learner, state, places)
            if stopped:
                break
    return learner


def _log(run: Run, journal: Journal, update: int) -> None:
    journal.write(run.counts(update) | journal.means())


def _validate(run: Run, journal: Journal, update: int) -> tuple[float | None, bool]:
    """-> bits per byte, where they are a number, and whether they were never lower."""
    figures = run.evaluate("validation", run.train["validation_bytes"])
    journal.write(run.counts(update) | {f"validation_{key}": value for key, value in figures.items()})
    if not math.isfinite(bits := figures["bits_per_byte"]):
        return None, False
    return bits, bits < checkpoint.lowest_bits_per_byte(journal.folder)


def _save(run: Run, journal: Journal, learner: Learner, state: checkpoint.State, places: list[checkpoint.Place]) -> None:
    journal.sync()
    state = replace(state, seconds=journal.seconds, log=journal.pending)
    checkpoint.save(journal.folder, learner, state, places, run.train["keep"])


def _check_finite(run: Run, folder: Path, learner: Learner, update: int) -> None:
    """Raises UserError where too many updates in a row were skipped; the one place where the host waits for their number."""
    if (most := int(learner.most_skipped)) < run.train["max_skipped"]:
        return
    good = checkpoint.last_good(folder)
    where = f"the last good checkpoint is '{good}'" if good else "there was no checkpoint yet"
    raise UserError(
        f"stopped at update {update}: {most} updates in a row were skipped, as their loss or gradients were not finite "
        f"(train.max_skipped={run.train['max_skipped']}); {where}; a lower train.optimiser.lr may help"
    )


def _every(update: int, times: int, updates: int) -> bool:
    """True at ``times`` evenly spread updates, the last among them."""
    return times > 0 and update * times // updates > (update - 1) * times // updates


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).tolist()  # "meta" holds nothing
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise UserError(f"no device {name!r} here; use train.device=cpu or auto") from error
    return device


@contextmanager
def refused(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds become a UserError that says ``what``; one that is a UserError already stays as it is."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, ValueError) else f" ({type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno})"
        raise UserError(f"{what}: {one_line(error)}{where}") from error


def _compile(model: Any) -> None:
    if not isinstance(model, ByteUNet):
        raise UserError(f"train.compile=true compiles the layers of a byte U-Net, and {type(model).__name__} has none: leave it false")
    model.compile()


def _check_unit(rule: Rule, source: Source) -> None:
    unit = train_stream(source).unit
    if rule.needs_text and unit != "byte":
        raise UserError(f"{type(rule).__name__} is a rule of text, but the data's unit is a {unit}: choose a rule that needs no text")


def _check(settings: dict[str, Any]) -> None:
    if missing := {"data", "model", "agent", "train", "seed"} - settings.keys():
        raise UserError(f"the configuration has no {', '.join(sorted(missing))}: it is not one of a run")
    least = {"data": {"length": 1}, "train": dict.fromkeys(_COUNTS, 1)}
    least["train"]["validations"] = 0
    if settings["train"].get("test_bytes") is not None:
        least["train"]["test_bytes"] = 1
    for group, keys in least.items():
        for key, smallest in keys.items():
            value = settings[group].get(key)
            if type(value) is not int or value < smallest:
                raise UserError(f"{group}.{key} must be a whole number of at least {smallest}, got {value!r}")
    if type(settings["seed"]) is not int or not 0 <= settings["seed"] <= MAX_SEED:
        raise UserError(f"seed must be a whole number from 0 to {MAX_SEED}, got {settings['seed']!r}")
    if type(compiled := settings["train"].get("compile", False)) is not bool:
        raise UserError(f"train.compile must be true or false, got {compiled!r}")
    if (statistics := settings["train"].get("statistics", "all")) not in STATISTICS:
        raise UserError(f"train.statistics must be one of {', '.join(STATISTICS)}, got {statistics!r}")
    if settings["train"].get("wandb") not in WANDB_MODES:
        raise UserError(f"train.wandb must be one of null, offline, online, got {settings['train']['wandb']!r}")
