"""A run on tasks of EleutherAI's evaluation harness: the harness' own figures, and bits per byte of the right continuations."""

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from agents.training import Run
from segment_env.errors import UserError, one_line
from segment_env.streams.shards import hush

_BOOTSTRAPS = 1000  #: for standard errors of what is no mean


def run_tasks(
    run: Run,
    names: Sequence[str],
    include_path: Path | None = None,
    limit: int | None = None,
    *,
    num_fewshot: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    thresholded: bool = False,
    rate: float | None = None,
) -> dict[str, Any]:
    """Figures of each task in ``names``, of the harness or of YAML files below ``include_path``; and the rate over all that was scored.

    Beside the harness' metrics stand ``target_bits_per_byte``, its ``_stderr`` over documents and ``num_targets``: see
    :func:`target_bits_per_byte`. ``limit`` documents of each task; other arguments: see ``agents.lm_eval_model.SegmentLM``. Raises
    UserError where lm-eval is not installed, there is no such task, or its data cannot be loaded.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"tasks need lm-eval, which cannot be imported ({one_line(error)}): pip install 'segment-env[lm-eval]'") from error
    from agents.lm_eval_model import SegmentLM

    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    hush()
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"no folder '{include_path}'; give one of task files (YAML)")
    model = SegmentLM(run, batch_size, seed, thresholded, rate)
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if not manager or not set(names) <= set(manager.all_subtasks):  # reading all files of the harness takes many seconds
        manager = TaskManager(include_path=include_path)
    tasks = [part for name in names for part in _load(manager, name)]
    settings = {"num_fewshot": num_fewshot, "limit": limit, "bootstrap_iters": _BOOTSTRAPS, "task_manager": manager}
    results = lm_eval.simple_evaluate(model, tasks=tasks, **settings)
    figures = {name: _metrics(found) for name, found in results["results"].items()}
    for name, samples in results["samples"].items():
        figures[name] |= target_bits_per_byte(samples)
    return {"tasks": figures, **model.figures}


def _load(manager: Any, name: str) -> list[Any]:
    """The task of that name, or the group, or the tasks of the tag."""
    if name not in manager.all_tasks:
        raise UserError(f"no task '{name}': `lm-eval ls tasks` lists those of the harness; --include-path adds a folder of your own")
    try:
        found = manager.load(name)
    except Exception as error:  # of the network, of many libraries, of a task's own code
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"cannot load the task '{name}' ({reason}); data of the hub must be cached or within reach") from error
    return [found["groups"][name]] if name in found["groups"] else list(found["tasks"].values())


def _metrics(found: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value == "N/A" else value for key, value in found.items() if key not in ("alias", "name")}


def target_bits_per_byte(samples: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Bits per byte of the right continuation given its context, as in the paper: mean over documents, and its standard error.

    Of multiple choice the right choice counts, the space before it included; of a single continuation that one. Nothing is said of
    documents that are rolled over or generated from, nor of those with several right choices.

    >>> sample = {"doc_id": 0, "target": 1, "arguments": [("Q", " no"), ("Q", " yes")], "resps": [[(-9.0, False)], [(-2.0, False)]]}
    >>> round(target_bits_per_byte([sample])["target_bits_per_byte"], 4) == round(2 / 4 / math.log(2), 4)
    True
    """
    values: dict[int, float] = {}
    for sample in samples:
        place = _right(sample)
        response = None if place is None else sample["resps"][place][0]
        if isinstance(response, Sequence) and not isinstance(response, str) and len(response) == 2:
            size = len(sample["arguments"][place][1].encode("utf-8", "surrogatepass"))
            if size:
                values[sample["doc_id"]] = -float(response[0]) / (size * math.log(2))
    if not values:
        return {}
    error = stdev(values.values()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"target_bits_per_byte": fmean(values.values()), "target_bits_per_byte_stderr": error, "num_targets": len(values)}


def _right(sample: dict[str, Any]) -> int | None:
    """Which of a sample's requests is the right one; None where none is, or several are."""
    target, requests = sample["target"], sample["arguments"]
    if len(requests) == 1:
        return 0
    if isinstance(target, str):
        matching = [i for i, each in enumerate(requests) if each[1].strip() == target.strip()]
        return matching[0] if len(matching) == 1 else None
    return target if type(target) is int and 0 <= target < len(requests) else None
