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
    train.add_argument("--dry-run", action="store_true", help="say what it would take, in parameters, memory, time and files, and stop")

    evaluate = command("eval", _eval, "Bits per byte, rate and alignment of a run on held-out bytes.")
    evaluate.add_argument("run", type=Path, metavar="RUN", help="a run, or one of its checkpoints")
    evaluate.add_argument("--best", action="store_true", help="the checkpoint of lowest validation bits per byte, not the newest")
    evaluate.add_argument("--split", choices=("validation", "test"), help="of the data (default: test)")
    other = "other data than the run's: a text file, a folder of them, JSON lines or Parquet, or configuration as in data=files"
    evaluate.add_argument("--data", nargs="+", default=[], metavar="PATH", help=other)
    evaluate.add_argument("--seed", type=_seed, default=0, help="of the boundary noise (default: 0)")
    evaluate.add_argument("--rate", type=float, help="add one offset to all logits, calibrated on validation bytes to this rate")
    evaluate.add_argument("--draws", type=int, metavar="K", help="of all boundaries, for mean and marginal (default: 1)")
    evaluate.add_argument("--stride", type=int, metavar="N", help="overlap crops: each begins N bytes after the one before")
    evaluate.add_argument("--tasks", metavar="NAMES", help="instead tasks of lm-eval, as in piqa,hellaswag,arc_easy,lambada_openai")
    evaluate.add_argument("--include-path", type=Path, metavar="FOLDER", help="more task files (YAML), as of tasks with local data")
    evaluate.add_argument("--limit", type=int, metavar="N", help="so many documents of each task")
    evaluate.add_argument("--num-fewshot", type=int, metavar="N", help="so many solved examples before each document of a task")
    thresholded = "of tasks: drawn (default), or where P(start) is above a threshold that gives the rate"
    evaluate.add_argument("--boundaries", choices=("sampled", "thresholded"), help=thresholded)
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures too")

    segment = command("segment", _segment, "Cut a text where a run's agent would.")
    segment.add_argument("run", type=Path, metavar="RUN")
    segment.add_argument("text", metavar="TEXT", help="the text, or - for standard input")
    segment.add_argument("--seed", type=_seed, default=0, help="of the boundary noise (default: 0)")
    segment.add_argument("--html", type=Path, metavar="FILE", help="write a heat map of the probabilities, as a page")
    segment.add_argument("--png", type=Path, metavar="FILE", help="the same as a picture")

    generate = command("generate", _generate, "Text of a run's model, shown byte by byte as it comes.")
    generate.add_argument("run", type=Path, metavar="RUN", help="a run, or one of its checkpoints")
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="what to go on from, or - for standard input (default: a document's beginning)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same, the bytes of a file")
    generate.add_argument("--bytes", type=int, default=256, metavar="N", help="how many behind the prompt (default: 256)")
    generate.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest byte (default: 1)")
    generate.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest bytes that reach this probability (default: 1)")
    generate.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts from the same prompt (default: 1)")
    generate.add_argument("--seed", type=_seed, default=0, help="of the bytes (default: 0)")
    generate.add_argument("--boundary-seed", type=_seed, help="of the boundary noise (default: the seed of the bytes)")
    choices, text = ("sampled", "thresholded"), "drawn (default), or where P(start) is above a threshold that gives the rate"
    generate.add_argument("--boundaries", choices=choices, default="sampled", help=text)
    calibrated = "starts per byte, by one offset of all logits that gives it on validation bytes (default of thresholded: the target)"
    generate.add_argument("--rate", type=float, help=calibrated)
    generate.add_argument("--segments", action="store_true", help="show where segments start, as |")

    report = command("report", _report, "Write one page about a run, or several: curves, segments, and how the segmentation grew.")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run, or one of its checkpoints")
    report.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html of the first)")
    report.add_argument("--png", type=Path, metavar="FILE", help="draw the first run's heat maps there too")
    report.add_argument("--bytes", type=_positive, default=65_536, metavar="N", help="of the test split at most (default: 65,536)")
    report.add_argument("--seed", type=_seed, default=0, help="of the boundary noise (default: 0)")

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


def _positive(text: str) -> int:
    if not text.replace("_", "").isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is needed, got {text!r}")
    return int(text)


def _train(options: argparse.Namespace) -> int:
    from agents import checkpoint, config, ranks, training  # here, so that --help does not wait for torch
    from agents.interruption import Interruption

    if options.dry_run:
        return _dry_run(options)
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
            command = shlex.join(["segment-env", "train", *options.overrides])
            folder = ranks.from_first(training.begin, settings, options.run, command)
        before = run.sentence()
        with Interruption(patient=ranks.total() > 1) as interruption:
            made = training.train(run, folder, found, stop=lambda: interruption.caught is not None).schedule.last_epoch
        caught = ranks.highest(interruption.caught or 0)
    if not ranks.is_first():
        return 128 + caught if caught else 0
    if caught:
        done = f"stopped by {signal.Signals(caught).name} after update {made} of {run.updates}"
        print(f"segment-env: {done}; go on with: segment-env train --resume {shlex.quote(str(folder))}", file=sys.stderr)
        return 128 + caught
    print(_ending(run))
    print(f"before  {before}\nafter   {run.sentence()}\nrun     {folder}")
    return 0


def _dry_run(options: argparse.Namespace) -> int:
    from agents import config, estimate

    if options.resume:
        raise UserError("--dry-run is of a run that is yet to begin: it takes no --resume")
    print(estimate.describe(config.load(options.overrides), options.run))
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
    from agents import assessment, harness, training

    tasks = options.tasks is not None
    others = ("split", "data", "draws", "stride") if tasks else ("include_path", "limit", "num_fewshot", "boundaries")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(options, name) not in (None, [])]:
        raise UserError(f"{', '.join(given)}: {'not with' if tasks else 'only with'} --tasks; see segment-env eval --help")
    if tasks and not all(names := options.tasks.split(",")):
        raise UserError(f"--tasks takes names with commas between, as in piqa,hellaswag, got {options.tasks!r}")
    _check_writable(options.json)
    run, seed, rate = training.open_run(options.run, options.best), options.seed, options.rate
    if tasks:
        thresholded = options.boundaries == "thresholded"
        how: dict[str, Any] = {"num_fewshot": options.num_fewshot, "seed": seed, "thresholded": thresholded, "rate": rate}
        figures = harness.run_tasks(run, names, options.include_path, options.limit, **how)
    else:
        draws = 1 if options.draws is None else options.draws
        figures = assessment.assess(run, options.split, options.data, seed, rate, draws, options.stride)
    print(text := json.dumps(_without_nan(figures), indent=2))
    if options.json:
        options.json.write_text(f"{text}\n")


def _check_writable(path: Path | None) -> None:
    """Before anything is computed. Raises UserError where a file cannot be written to ``path``, and leaves what is there."""
    try:
        if path and path.exists():
            path.open("ab").close()
        elif path:
            path.touch()
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}") from error


def _without_nan(value: Any) -> Any:
    """``value`` with null for nan, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    return None if value != value else value


def _segment(options: argparse.Namespace) -> None:
    from agents import pages, training
    from agents.segmenting import segment, shown
    from segment_env.scorer import note

    pages.check_writable(options.html, options.png)
    data = _given(options.text)
    run = training.open_run(options.run)
    if remark := note(run.agent.policy):
        print(remark, file=sys.stderr)
    if options.html or options.png:
        _heat_maps(run, data, options)
    print(shown(segment(run.model, run.agent.policy, data, options.seed, run.device)))


def _heat_maps(run: Any, data: bytes, options: argparse.Namespace) -> None:
    from agents import heat_map, pages
    from agents.data import train_stream

    decided = heat_map.decide(run.model, run.agent.policy, data, options.seed, run.device)
    made, title = heat_map.cells(decided, train_stream(run.source).unit == "byte"), f"{options.run}, noise seed {options.seed}"
    if options.png:
        from agents import pictures, plots  # brings matplotlib

        pages.write(options.png, plots.png(pictures.draw([(title, made)])))
    if options.html:
        pages.write(options.html, pages.heat_map(title, made))


def _report(options: argparse.Namespace) -> None:
    from agents import report

    command = shlex.join(map(str, ["segment-env", "report", *options.runs, "--bytes", options.bytes, "--seed", options.seed]))
    print(report.run(options.runs, options.out, options.png, options.bytes, options.seed, command))


def _generate(options: argparse.Namespace) -> None:
    from agents import generation

    seeds, thresholded = (options.seed, options.boundary_seed), options.boundaries == "thresholded"
    drawing = generation.Drawing(options.temperature, options.top_p, *seeds, thresholded)
    texts = generation.run(options.run, _prompt(options), options.bytes, options.num_samples, drawing, options.rate, options.segments)
    for text in texts:
        print(text, end="", flush=True)
    print()


def _prompt(options: argparse.Namespace) -> bytes | None:
    if options.prompt is not None:
        return _given(options.prompt)
    try:
        return options.prompt_file.read_bytes() if options.prompt_file else None
    except OSError as error:
        raise UserError(f"cannot read the prompt '{options.prompt_file}': {error.strerror}") from error


def _given(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == "-" else os.fsencode(text)


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
