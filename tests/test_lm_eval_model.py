"""A run as a model of the evaluation harness: log-likelihoods are our own, in any batch, and tasks of local files run offline."""

import json
import math
import sys
from functools import partial

import lm_eval.tasks
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from torch import nn

from agents import cli, config, harness, training
from agents.evaluation import tally
from agents.generation import generate
from agents.lm_eval_model import SegmentLM
from agents.windows import windows
from segment_env.batch import Samples, pack
from segment_env.errors import UserError
from segment_env.streams import whitespace_starts
from segment_env.unroll import unroll

SMALL = ["data.length=24", "train.rows=4", "train.bytes=96", "train.validation_bytes=200", "train.validations=0", "train.device=cpu"]
PAIRS = [
    ("Call me", " Ishmael"),
    ("", "Some years ago"),
    ("Never mind how long precisely", ""),
    ("é ", "née"),
    ("Call me Ishmael. Some years ago - never mind", " how long"),  # longer than a crop
    ("A", " continuation that alone is longer than a crop of 24 bytes"),
    ("exactly", "24 bytes, it fills a crop"[:24]),
    ("", ""),
]


@pytest.fixture(scope="module")
def run():
    """A run in float64, untrained, whose boundaries and predictions are no coin flips."""
    made = training.Run(config.load(SMALL))
    torch.manual_seed(0)
    nn.init.normal_(made.agent.policy.weight, std=0.3)
    with torch.no_grad():
        made.model.head.weight.mul_(10)
    made.model.double()
    made.agent.double()
    return made


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def own(run, context: bytes, continuation: bytes, number: int = 0) -> float:
    """Teacher-forced log-probability of what comes after ``context``, of one crop of its own."""
    batch = pack([context + continuation], 3, number)
    return -float(unroll(run.model, run.agent.policy, batch, Samples([1]))[1].nll.detach()[0, len(context) :].sum())


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_log_likelihoods_are_our_own(run, batch_size: int) -> None:
    found = SegmentLM(run, batch_size, seed=3).loglikelihood(ask("loglikelihood", *PAIRS))
    pairs = [(context.encode(), continuation.encode()) for context, continuation in PAIRS]
    expected = [own(run, *pair) if pair[1] else 0.0 for pair in pairs[:4]]
    expected.append(own(run, (pairs[4][0] + pairs[4][1])[-24:-9], pairs[4][1]))
    long = pairs[5][1]
    expected.append(sum(own(run, b"", long[begin : begin + 24], number) for number, begin in enumerate(range(0, len(long), 24))))
    expected += [own(run, b"", pairs[6][1]), 0.0]
    assert [log_p for log_p, _ in found] == pytest.approx(expected, rel=1e-11)
    assert found[2] == found[7] == (0.0, True)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_rolled_over_texts_are_documents_of_evaluation(run, batch_size: int) -> None:
    texts = ["Call me Ishmael. Some years ago - never mind how long", "", "née", "x" * 24]
    found = SegmentLM(run, batch_size, seed=3).loglikelihood_rolling(ask("loglikelihood_rolling", *((text,) for text in texts)))
    for text, log_p in zip(texts, found, strict=True):
        if text:
            counted = tally(run.model, run.agent.policy, windows([text.encode()], 24, 4, 3), whitespace_starts)
            assert log_p == pytest.approx(-float(counted.nats[0, 0]), rel=1e-12)
    assert found[1] == 0.0


def test_which_continuations_are_greedy(run) -> None:
    """What generation takes at temperature 0 under the same boundary noise is; with another last or first byte it is not."""
    prompts = [b"Call me", b"", b"Some years ago"]
    found = []
    for prompt in prompts:
        (text,) = generate(run.model, run.agent.policy, [prompt], 8, temperature=0, seed=3, rows=[0])
        found.append(text.data[text.prompt_length :])
    model = SegmentLM(run, 2, seed=3)
    pairs = list(zip(prompts, found, strict=True))
    assert [greedy for _, greedy in model.score(pairs)] == [True] * 3
    for place in (0, -1):
        others = [bytearray(each) for each in found]
        for other in others:
            other[place] ^= 1
        assert [greedy for _, greedy in model.score([(p, bytes(o)) for p, o in zip(prompts, others, strict=True)])] == [False] * 3
    _, later = model.score([(b"", b"x" * 24 + b"y"), (prompts[0], found[0])])
    assert later[1], "another request does not matter"


def test_text_up_to_a_stop(run) -> None:
    """In batches as alone, cut before the first of ``until``, and as generation says."""
    plain = {"max_gen_toks": 20, "do_sample": True, "temperature": 2.0}
    contexts = ["Call me", "", "Some years ago - never mind how long precisely"]
    alone = [SegmentLM(run, 1, seed=3).generate_until(ask("generate_until", (context, plain)))[0] for context in contexts]
    model = SegmentLM(run, 3, seed=3)
    together = model.generate_until(ask("generate_until", *((context, plain) for context in contexts)))
    assert together[0] == alone[0]  # noise is by the place of a request, so the others meet other boundaries
    texts = generate(run.model, run.agent.policy, [each.encode()[-24:] for each in contexts], 20, temperature=2.0, seed=3, rows=[0, 1, 2])
    data = [text.data[text.prompt_length :] for text in texts]
    assert together == [each.decode("utf-8", "replace") for each in data]

    ends = [bytes([next(byte for byte in each if byte < 128)]).decode() for each in data]
    asked = [(context, {**plain, "until": [end, "never there"]}) for context, end in zip(contexts, ends, strict=True)]
    stopped = model.generate_until(ask("generate_until", *asked))
    assert stopped == [each[: each.index(end.encode())].decode("utf-8", "replace") for each, end in zip(data, ends, strict=True)]
    several = [(contexts[0], plain), (contexts[1], {**plain, "max_gen_toks": 5}), (contexts[2], {"until": ends[2], **plain})]
    mixed = model.generate_until(ask("generate_until", *several))
    assert mixed == [together[0], data[1][:5].decode("utf-8", "replace"), stopped[2]]
    greedy = [
        model.generate_until(ask("generate_until", (contexts[0], how))) for how in ({**plain, "do_sample": False}, {"max_gen_toks": 20})
    ]
    assert greedy[0] == greedy[1] != [together[0]], "without a temperature the likeliest bytes are taken"
    with pytest.raises(UserError, match="no setting top_k"):
        model.generate_until(ask("generate_until", ("", {"top_k": 5})))


def test_boundaries_are_a_matter_of_the_seed_the_rate_and_the_threshold(run) -> None:
    requests = ask("loglikelihood", *PAIRS[:2])
    models = [SegmentLM(run, 4, seed) for seed in (3, 3, 4)]
    models += [SegmentLM(run, 4, 3, rate=0.4), SegmentLM(run, 4, 3, thresholded=True), SegmentLM(run, 4, 4, thresholded=True)]
    found = [model.loglikelihood(requests) for model in models]
    assert found[0] == found[1] != found[2]
    assert found[3] not in (found[0], found[4]) and found[4] == found[5] != found[0]
    assert models[4].figures["boundaries"].startswith("thresholded; offset ")
    assert models[3].figures["rate"] > 0.25 and models[3].figures["seed"] == 3
    assert run.agent.policy.offset == pytest.approx(math.log(0.25)), "the policy is left as it was"


def test_it_is_registered_and_opens_a_run_by_its_folder(finished) -> None:
    model = get_model("segment-env").create_from_arg_string(f"run={finished}", {"batch_size": 2, "device": None})
    assert isinstance(model, SegmentLM) and model.batch_size == 2
    assert model.loglikelihood(ask("loglikelihood", ("a", "b")))[0][0] < 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run folder of one update of `nano`."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    made = training.Run(config.load(SMALL))
    training.train(made, training.begin(made.settings, folder), progress=False)
    return folder


CHOICES = [
    {"q": "The whale is", "options": ["white", "a teapot"], "gold": 0},
    {"q": "Ishmael goes to", "options": ["bed", "sea"], "gold": 1},
    {"q": "A ship", "options": ["sails", "sings", "née"], "gold": 2},
]
TEXTS = [{"text": "Call me Ishmael. Some years ago - never mind"}, {"text": "how long"}]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{options}}"
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "tiny_last_word": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list: [{metric: acc}]
""",
    "tiny_text": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "."
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of task files, with their data beside them."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in (("choices", CHOICES), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        data = folder / ("choices.jsonl" if name == "tiny_choice" else "texts.jsonl")
        where = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{data}'}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(where + text)
    broken = f"task: broken\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{folder / 'nowhere.jsonl'}'}}}}\ntest_split: test\n"
    (folder / "broken.yaml").write_text(broken + TASKS["tiny_rolling"])
    return folder


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
def test_tasks_of_local_files_from_the_command_line(finished, tasks, tmp_path, capsys, monkeypatch) -> None:
    """All four kinds, offline: the harness' figures are those of the scores, and the right continuations' bits per byte are ours."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    names = ",".join(TASKS)
    out = tmp_path / "figures.json"
    assert cli.main(["eval", str(finished), "--tasks", names, "--include-path", str(tasks), "--seed", "3", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed)
    assert json.loads(out.read_text()) == figures and figures["tasks"].keys() == TASKS.keys()
    assert (figures["boundaries"], figures["seed"]) == ("sampled, uncapped", 3) and 0 < figures["rate"] < 0.5

    model = SegmentLM(finished, seed=3)
    scores = [model.score([(doc["q"].encode(), f" {each}".encode()) for each in doc["options"]]) for doc in CHOICES]
    right = [scored[doc["gold"]][0] for doc, scored in zip(CHOICES, scores, strict=True)]
    choice = figures["tasks"]["tiny_choice"]
    assert choice["acc,none"] == pytest.approx(sum(max(s)[0] == r for s, r in zip(scores, right, strict=True)) / 3)
    bits = [-log_p / math.log(2) / len(f" {doc['options'][doc['gold']]}".encode()) for doc, log_p in zip(CHOICES, right, strict=True)]
    assert choice["target_bits_per_byte"] == pytest.approx(sum(bits) / 3, rel=1e-5)
    assert choice["num_targets"] == 3 and choice["target_bits_per_byte_stderr"] > 0

    rolled = sum(log_p for log_p, _ in model.score([(b"", doc["text"].encode()) for doc in TEXTS]))
    size = sum(len(doc["text"].encode()) for doc in TEXTS)
    rolling = figures["tasks"]["tiny_rolling"]
    assert rolling["bits_per_byte,none"] == pytest.approx(-rolled / math.log(2) / size, rel=1e-5)
    assert "num_targets" not in rolling and "num_targets" not in figures["tasks"]["tiny_text"]
    ((last, _),) = model.score([(b"how", b" long")])
    ((first, _),) = model.score([(TEXTS[0]["text"][:-5].encode(), b" mind")])
    word = figures["tasks"]["tiny_last_word"]["target_bits_per_byte"]
    assert word == pytest.approx(-(last + first) / 2 / 5 / math.log(2), rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "no_such_task"], "no task 'no_such_task': `lm-eval ls tasks` lists"),
        (["--tasks", "tiny_choice,"], "--tasks takes names with commas between, as in piqa,hellaswag, got 'tiny_choice,'"),
        (["--tasks", ""], "--tasks takes names with commas between"),
        (["--tasks", "broken"], "cannot load the task 'broken' (FileNotFoundError"),
        (["--tasks", "tiny_choice", "--draws", "3"], "--draws: not with --tasks"),
        (["--limit", "3"], "--limit: only with --tasks"),
        (["--tasks", "tiny_choice", "--json", "FOLDER"], "cannot write"),
    ],
)
def test_mistakes_get_one_line(finished, tasks, capsys, monkeypatch, arguments: list[str], says: str) -> None:
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))  # 14,000 files less
    where = ["--include-path", str(tasks)] if "--tasks" in arguments else []
    given = [str(tasks) if each == "FOLDER" else each for each in arguments]
    assert cli.main(["eval", str(finished), *given, *where]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("segment-env: ") and err.count("\n") == 1 and says in err, err


def test_a_folder_of_tasks_that_is_none(run, tmp_path) -> None:
    with pytest.raises(UserError, match="no folder"):
        harness.run_tasks(run, ["x"], tmp_path / "nowhere")


def test_without_the_harness(run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"tasks need lm-eval, which cannot be imported .*: pip install 'segment-env\[lm-eval\]'"):
        harness.run_tasks(run, ["piqa"])


def test_a_scorer_that_does_not_tell_all_probabilities() -> None:
    diagnostic = training.Run(config.load(["diagnostic=delimiter", "train.device=cpu"]))
    with pytest.raises(UserError, match="Delimiter gives no probabilities of all bytes"):
        SegmentLM(diagnostic)
