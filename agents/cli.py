"""The command line, ``segment-env``: a mistake gets one line on standard error and exit status 2, never a traceback."""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from segment_env.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage that argparse prints before it."""
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: -> the exit status."""
    try:
        options = _parser().parse_args(arguments)
        return options.command(options) or 0
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # ranks that torchrun started fail alike, and one of them speaks
            print(f"segment-env: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("segment-env: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough; nothing more can be written, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="segment-env", description="Learn where tokens begin, by reinforcement learning.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.set_defaults(command=function)
        return added

    def overrides(added: argparse.ArgumentParser) -> None:
        added.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration, as in agent=paper train.bytes=1_000_000")

    train = command("train", _train, "Train a byte U-Net and the agent that places its boundaries.")
    overrides(train)
    train.add_argument("--run", type=Path, metavar="FOLDER", help="where to write it (default: runs/DATE-TIME)")
    resume = "go on with this run from its newest checkpoint; with one of its checkpoints, from there: later ones are removed"
    train.add_argument("--resume", type=Path, metavar="FOLDER", help=resume)

    evaluate = command("eval", _eval, "Bits per byte, rate and alignment of a run on held-out bytes.")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="a run, or one of its checkpoints")
    evaluate.add_argument("--best", action="store_true", help="the checkpoint of lowest validation bits per byte, not the newest")
    evaluate.add_argument("--split", choices=("validation", "test"), default="test")
    evaluate.add_argument("--seed", type=_seed, default=0, help="of the boundary noise (default: 0)")
    evaluate.add_argument("--rate", type=float, help="add one offset to all logits, calibrated on validation bytes to this rate")

    segment = command("segment", _segment, "Cut a text where a run's agent would.")
    segment.add_argument("run", type=Path, metavar="RUN")
    segment.add_argument("text", metavar="TEXT", help="the text, or - for standard input")
    segment.add_argument("--seed", type=_seed, default=0, help="of the boundary noise (default: 0)")

    compare = command("compare", _compare, "Run the grid of an experiment and print its table; goes on where it was stopped.")
    overrides(compare)
    compare.add_argument("--cells", type=Path, default=Path("results/cells"), metavar="FOLDER", help="where finished cells lie")

    variance = command("variance", _variance, "Measure the noise, the bias and the cost of gradient estimators on a frozen run.")
    variance.add_argument("run", type=Path, metavar="RUN")
    overrides(variance)
    variance.add_argument("--draws", type=int, default=64, metavar="N", help="of held-out bytes, two of boundaries each (default: 64)")
    variance.add_argument("--fit", type=int, default=200, metavar="N", help="updates that fit critics and baselines (default: 200)")
    variance.add_argument("--out", type=Path, metavar="FOLDER", help="where table, figures and plot are written (default: RUN/variance)")

    bench = command("bench", _bench, "Measure what learned boundaries cost, as ratios within one run.")
    bench.add_argument("--quick", action="store_true", help="few repetitions: to see that it works, not to quote")
    bench.add_argument("--only", metavar="NAME", help="one measurement alone")
    bench.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures too")
    return parser


def _seed(text: str) -> int:
    from agents.data import MAX_SEED

    if not text.isdecimal() or int(text) > MAX_SEED:
        raise argparse.ArgumentTypeError(f"a seed is a whole number from 0 to {MAX_SEED}, got {text!r}")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    from agents import checkpoint, config, ranks, training  # here, so that --help does not wait for torch
    from agents.interruption import Interruption

    found = None
    if options.resume:
        folder = checkpoint.run_of(options.resume)
        found = checkpoint.find(options.resume)
        settings = _as_begun(options, config.read(folder / "config.yaml"))
    else:
        settings = config.load(options.overrides)
    with ranks.started(settings.get("train", {}).get("device", "auto")):
        with ranks.together():
            run = training.Run(settings)
            if not options.resume:
                run.rehearse()  # mistakes first: nothing is written for a configuration that cannot train
        if not options.resume:
            folder = ranks.from_first(training.begin, settings, options.run)
        before = run.sentence()
        with Interruption(patient=ranks.total() > 1) as interruption:
            learner = training.train(run, folder, found, stop=lambda: interruption.caught is not None)
        caught = ranks.highest(interruption.caught or 0)
    if not ranks.is_first():
        return 128 + caught if caught else 0
    if caught:
        done = f"stopped by {signal.Signals(caught).name} after update {learner.schedule.last_epoch} of {run.updates}"
        print(f"segment-env: {done}; go on with: segment-env train --resume {shlex.quote(str(folder))}", file=sys.stderr)
        return 128 + caught
    print(_ending(run))
    print(f"before  {before}\nafter   {run.sentence()}\nrun     {folder}")
    return 0


def _as_begun(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The ``settings`` of the run to go on with. Raises UserError where the command line asks for others."""
    from agents import config

    if options.run:
        raise UserError("--resume goes on in the folder of the run: it takes no --run")
    if options.overrides and (differing := config.differences(settings, config.load(options.overrides))):
        raise UserError(f"--resume goes on with a run as it was begun, but the command line gives another configuration: {differing}")
    return settings


def _ending(run: Any) -> str:
    from agents.data import is_text

    figures = run.evaluate("test")
    reference = "starts after whitespace" if is_text(run.source) else "true starts"
    text = (
        f"held-out bits per byte {figures['bits_per_byte']:.3f} at rate {figures['rate']:.3f} "
        f"({figures['boundaries']}, seed {figures['seed']}, {figures['num_bytes']:,} test bytes)\n"
        f"{reference}: recall {figures['recall']:.3f}, precision {figures['precision']:.3f}"
    )
    if not hasattr(run.source, "scores"):
        return text
    expected = run.source.scores(run.source.rate, run.agent.price)  # of a problem with a known answer
    score = (figures["reward"] - expected["random"]) / (expected["oracle"] - expected["random"])
    return f"{text}\nscore {score:.3f}, where random cuts expect 0 and the best policy expects 1"


def _eval(options: argparse.Namespace) -> None:
    from agents import training

    run = training.open_run(options.run, options.best)
    print(json.dumps({"split": options.split, **run.evaluate(options.split, seed=options.seed, rate=options.rate)}, indent=2))


def _segment(options: argparse.Namespace) -> None:
    from agents import training
    from agents.segmenting import segment, shown
    from segment_env.scorer import note

    data = sys.stdin.buffer.read() if options.text == "-" else os.fsencode(options.text)
    run = training.open_run(options.run)
    if remark := note(run.agent.policy):
        print(remark, file=sys.stderr)
    print(shown(segment(run.model, run.agent.policy, data, options.seed, run.device)))


def _compare(options: argparse.Namespace) -> None:
    from agents import compare

    print(compare.run(options.overrides, options.cells))


def _variance(options: argparse.Namespace) -> None:
    from agents import variance

    print(variance.run(options.run, options.overrides, options.out, options.draws, options.fit))


def _bench(options: argparse.Namespace) -> None:
    from agents import bench

    print(bench.run(options.quick, options.only, options.json))


if __name__ == "__main__":
    sys.exit(main())
