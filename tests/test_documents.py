"""Streamed documents: bytes untouched, splits apart, positions exact over resumes, mistakes of the user's in one line."""

import gzip
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from agents import checkpoint, cli, config, training
from agents import data as agents_data
from segment_env.batch import pack
from segment_env.errors import UserError
from segment_env.streams import HubDocuments, LocalDocuments
from segment_env.streams.documents import Documents
from segment_env.streams.streaming import CUTS, Lane, Reading

TEXTS = [f"{i} " + "Call me Ishmael. é\r\n\x00"[: 3 + i % 17] * (i % 5 + 1) for i in range(60)]
RAW = [text.encode() for text in TEXTS]
ODD = [b"\xff\xfe\x00", "naïve".encode("latin-1"), "ω".encode("utf-16"), b"\xe2\x80", b"\r\nplain\n", b"\x00"]
ODD += ["é ".encode() + "é ".encode("latin-1") + "é".encode("utf-16-be"), bytes(range(256)), random.Random(0).randbytes(200)]
SMALL = {"buffer": 8, "workers": 0}


class Lists:
    """Shards that are there."""

    def __init__(self, *shards: list[bytes]):
        self.shards, self.reads = shards, 0

    def __len__(self) -> int:
        return len(self.shards)

    def read(self, shard: int, row: int = 0):
        self.reads += 1
        yield from self.shards[shard][row:]


class Given(Documents):
    """Documents of shards that are there."""

    def __init__(self, *shards: list[bytes], **options):
        super().__init__(**options)
        self.name, self.shards = "given", {"train": Lists(*shards)}


def write(folder: Path, kind: str, shards: list[list[bytes]], column: str = "text") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, documents in enumerate(shards):
        if kind == "parquet":
            table = pa.table({column: pa.array(documents, pa.binary()), "n": list(range(len(documents)))})
            pyarrow.parquet.write_table(table, folder / f"{i}.parquet", row_group_size=7)
        elif kind == "jsonl":
            (folder / f"{i}.jsonl").write_text("".join(json.dumps({column: each.decode(), "n": 1}) + "\n" for each in documents))
        else:
            for j, document in enumerate(documents):
                (folder / f"{i}-{j:03d}.txt").write_bytes(document)
    return folder


@pytest.fixture(scope="module", params=["parquet", "jsonl", "text"])
def local(request, tmp_path_factory):
    """A folder of three shards, or of as many files, and its format."""
    return write(tmp_path_factory.mktemp(request.param), request.param, [RAW[i::3] for i in range(3)]), request.param


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert all(getattr(mine, key).equal(getattr(theirs, key)) for key in ("bytes", "valid", "terminated", "sequence"))
        assert mine.seed == theirs.seed


def whole(batch):
    return [bytes(row[valid].tolist()) for row, valid in zip(batch.bytes, batch.valid, strict=True)]


# the position


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_twice_is_the_undisturbed_sequence(local, workers, world_size):
    folder, kind = local
    for rank in range(world_size):

        def batches(rank=rank):
            documents = LocalDocuments(folder, kind, buffer=8, workers=workers)
            return documents.batches(3, 16, seed=5, rank=rank, world_size=world_size)

        undisturbed = take(batches(), 50)  # 150 crops: several buffers and epochs
        resumed, state = [], None
        for count in (13, 18, 19):
            part = batches()
            if state:
                part.load_state_dict(json.loads(state))
            resumed += take(part, count)
            state = json.dumps(part.state_dict())
        assert_same(resumed, undisturbed)
        assert len({bytes(batch.bytes.flatten().tolist()) for batch in undisturbed}) == 50


def test_a_state_can_be_loaded_while_threads_work_ahead(local):
    batches = LocalDocuments(*local, buffer=8, workers=2).batches(2, 16, seed=0)
    first = take(batches, 3)
    state = batches.state_dict()
    then = take(batches, 4)
    batches.load_state_dict(state)
    assert_same(take(batches, 4), then)
    batches.load_state_dict({**state, "batches": 0, "lanes": [[0] * 5] * 2})
    assert_same(take(batches, 3), first)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("index", "total"), [(0, 1), (1, 2), (3, 5)])
def test_a_lane_goes_on_from_any_crop(cut, index, total):
    reading = Reading(Lists(RAW[:9], RAW[9:11], RAW[11:30]), lambda document: len(document) > 4, cut, 11, 6, 3, "numbers")
    lane, crops, states = Lane(reading, index, total), [], []
    for _ in range(90):
        states.append(json.loads(json.dumps(lane.state())))
        crops.append(next(lane))
    for begin in range(0, 90, 7):
        again = Lane(reading, index, total)
        again.load_state(states[begin])
        assert [next(again) for _ in range(20)][: 90 - begin] == crops[begin : begin + 20]


@pytest.mark.parametrize("total", [1, 2, 3, 5])
def test_an_epoch_is_every_document_once(total):
    """Of all lanes together, dealt out by shards where there are enough of them, else by documents."""
    reading = Reading(Lists(RAW[:20], RAW[20:40], RAW[40:]), bool, "documents", 10**6, 1, 0, "numbers")
    shares = []
    for index in range(total):
        lane = Lane(reading, index, total)
        count = {1: [60], 2: [40, 20], 3: [20, 20, 20], 5: [12] * 5}[total][index]
        shares.append([next(lane).data for _ in range(count)])
    seen = list(itertools.chain(*shares))
    if total == 5:  # the last turns of a share are cut off where a shard does not divide: no document comes twice
        assert len(set(seen)) == len(seen)
    assert sorted(seen) == sorted(RAW)


def test_every_epoch_has_an_order_of_its_own_and_every_seed():
    def epochs(seed, buffer):
        lane = Lane(Reading(Lists(*[[document] for document in RAW]), bool, "documents", 10**6, buffer, seed, "numbers"))
        return [[next(lane).data for _ in range(60)] for _ in range(3)]

    for buffer in (1, 60):
        first, second, _ = epochs(0, buffer)
        assert sorted(first) == sorted(second) == sorted(RAW)
        assert RAW != first != second and epochs(1, buffer)[0] != first == epochs(0, buffer)[0]


def test_a_buffer_mixes_neighbours_of_one_shard():
    lane = Lane(Reading(Lists(RAW), bool, "documents", 10**6, 30, 0, "numbers"))
    order = [RAW.index(next(lane).data) for _ in range(30)]
    assert sorted(order) == list(range(30)) and order != list(range(30))


def test_sequences_are_numbered_over_all_ranks(local):
    parts = [LocalDocuments(*local, **SMALL).batches(3, 16, seed=1, rank=rank, world_size=2) for rank in range(2)]
    for n in range(3):
        numbers = torch.cat([next(part).sequence for part in parts])
        assert numbers.tolist() == list(range(6 * n, 6 * n + 6))


def test_ranks_and_workers_share_no_document(tmp_path):
    folder = write(tmp_path, "parquet", [RAW[i::4] for i in range(4)])
    seen = []
    for rank in range(2):
        documents = LocalDocuments(folder, "parquet", cut="documents", fractions=(1, 0, 0), buffer=1, workers=2)
        batches = documents.batches(15, 200, seed=0, rank=rank, world_size=2)
        seen += [document for batch in take(batches, 2) for document in whole(batch)]
    assert sorted(seen) == sorted(RAW)


def test_a_position_of_other_data_or_workers_is_refused(tmp_path):
    folder = write(tmp_path, "jsonl", [RAW])
    state = LocalDocuments(folder, "jsonl", **SMALL).batches(2, 8, 0).state_dict()
    with pytest.raises(UserError, match="that of rank 0 of 1 with 1 workers, not of rank 0 of 1 with 2: use as many"):
        LocalDocuments(folder, "jsonl", workers=2).batches(2, 8, 0).load_state_dict(state)
    write(tmp_path, "jsonl", [RAW[1:]])
    with pytest.raises(UserError, match="changed since the checkpoint"):
        LocalDocuments(folder, "jsonl", **SMALL).batches(2, 8, 0).load_state_dict(state)


def test_a_run_that_is_stopped_twice_ends_as_one_that_was_not(tmp_path, monkeypatch):
    folder = write(tmp_path / "shards", "parquet", [RAW[i::3] * 3 for i in range(3)])
    small = ["data.length=16", "train.rows=4", f"train.bytes={4 * 16 * 12}", "train.checkpoint_every=3", "train.validations=2"]
    small += ["train.validation_bytes=64", "train.device=cpu", "train.optimiser.precision=float32", "data.source.buffer=16"]
    settings = config.load(["data=parquet", f"data.source.path={folder}", "data.source.workers=2", *small])

    def train(name, stop=None):
        run, there = training.Run(settings), (tmp_path / name / "config.yaml").exists()
        if not there:
            training.begin(settings, tmp_path / name)
        made = itertools.count(1)
        update = training.Learner.update

        def stopped(learner, batch):
            if next(made) == stop:
                raise KeyboardInterrupt
            return update(learner, batch)

        with monkeypatch.context() as patched:
            patched.setattr(training.Learner, "update", stopped)
            training.train(run, tmp_path / name, checkpoint.find(tmp_path / name) if there else None, progress=False)

    train("whole")
    for stop in (5, 6):  # after the checkpoints of the 3rd and the 6th update, both times with updates that are made again
        with pytest.raises(KeyboardInterrupt):
            train("stopped", stop)
    train("stopped")
    one, other = (load_file(tmp_path / name / "checkpoints/00000012/model.safetensors") for name in ("whole", "stopped"))
    assert all(one[key].equal(other[key]) for key in one)


# crops


def crops(cut, *documents, length=4):
    lane = Lane(Reading(Lists(list(documents)), bool, cut, length, 1, 0, "text"))
    return [(crop.data, crop.terminated) for crop in (next(lane) for _ in range(6))]


def test_documents_joined_by_a_blank_line_are_full_crops_that_never_end():
    stream = b"abcde\n\nxy\n\n" * 4
    assert crops("joined", b"abcde", b"", b"xy") == [(stream[at : at + 4], False) for at in range(0, 24, 4)]


def test_documents_by_themselves_end_with_their_last_crop():
    assert crops("documents", b"abcdef", b"wxyz", b"k")[:4] == [(b"abcd", False), (b"ef", True), (b"wxyz", True), (b"k", True)]


def test_beginnings_are_one_crop_a_document():
    assert crops("beginnings", b"abcdef", b"wxyz", b"k")[:4] == [(b"abcd", False), (b"wxyz", True), (b"k", True), (b"abcd", False)]


def test_shorter_crops_are_padded(tmp_path):
    folder = write(tmp_path, "parquet", [[b"abcdef", b"k"]])
    batch = next(LocalDocuments(folder, "parquet", cut="documents", fractions=(1, 0, 0), buffer=1, workers=0).batches(3, 4, 0))
    assert batch.bytes.shape == batch.valid.shape == (3, 4) and not batch.bytes[~batch.valid].any()
    assert whole(batch) == [b"abcd", b"ef", b"k"] and batch.terminated.tolist() == [False, True, True]
    assert torch.equal(pack([b"abcd", b"ef", b"k"], length=4).bytes, batch.bytes)


def test_only_longer_documents_are_read(tmp_path):
    folder = write(tmp_path, "parquet", [[b"x" * n for n in range(1, 40)]])
    documents = LocalDocuments(folder, "parquet", longer_than=20, cut="beginnings", fractions=(0.6, 0.2, 0.2), **SMALL)
    lengths = {len(crop) for batch in take(documents.batches(4, 64, 0), 30) for crop in whole(batch)}
    held_out = [agents_data.held_out(documents, split, 64, 2) for split in ("validation", "test")]
    held = {len(crop) for batch in itertools.chain(*held_out) for crop in whole(batch)}
    assert lengths | held == set(range(21, 40)) and not lengths & held and held


# bytes are bytes


@pytest.mark.parametrize("kind", ["text", "parquet", "parquet string", "jsonl"])
def test_no_byte_is_repaired_or_dropped(kind, tmp_path):
    if kind == "parquet string":  # as a careless writer leaves it: marked as UTF-8, and none
        binary = pa.array(ODD, pa.binary())
        strings = pa.StringArray.from_buffers(len(ODD), *binary.buffers()[1:])
        pyarrow.parquet.write_table(pa.table({"text": strings}), tmp_path / "odd.parquet")
    elif kind == "jsonl":
        escaped = ["".join(f"\\u{byte:04x}" if byte < 32 or byte in b'"\\\\' else chr(byte) for byte in each) for each in ODD]
        (tmp_path / "odd.jsonl").write_bytes(b"".join(b'{"text": "%b"}\n' % each.encode("latin-1") for each in escaped))
    else:
        write(tmp_path, kind, [ODD])
    documents = LocalDocuments(tmp_path, kind.split()[0], cut="documents", fractions=(1, 0, 0), buffer=1, workers=0)
    assert sorted(whole(next(documents.batches(len(ODD), 256, 0)))) == sorted(ODD)


def test_compressed_json_lines(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    documents = LocalDocuments(tmp_path, "jsonl", cut="documents", fractions=(1, 0, 0), buffer=1, workers=0)
    assert sorted(whole(next(documents.batches(60, 200, 0)))) == sorted(RAW)


def test_a_row_without_a_value_is_no_document(tmp_path):
    pyarrow.parquet.write_table(pa.table({"text": pa.array(["a", None, "", "b"])}), tmp_path / "a.parquet")
    documents = LocalDocuments(tmp_path, "parquet", cut="documents", fractions=(1, 0, 0), buffer=1, workers=0)
    assert whole(next(documents.batches(3, 4, 0))) == [b"a", b"b", b"a"]


# splits


def split_documents(documents):
    """The whole documents of train, validation and test."""
    train = {document for batch in take(documents.batches(10, 300, 0), 60) for document in whole(batch)}
    held = [{text for batch in agents_data.held_out(documents, split, 300, 4) for text in whole(batch)} for split in ("validation", "test")]
    return [train, *held]


def test_splits_by_hash_are_all_documents_and_overlap_nowhere():
    shards = RAW[:30], RAW[30:], RAW[:10]  # ten of them twice
    train, validation, test = split_documents(Given(*shards, cut="documents", fractions=(0.6, 0.2, 0.2), **SMALL))
    assert train | validation | test == set(RAW)
    assert len(train) + len(validation) + len(test) == 60 and 3 <= len(validation) <= 21 and 3 <= len(test) <= 21
    reordered = Given(RAW[::-1], cut="documents", fractions=(0.6, 0.2, 0.2), buffer=3, workers=2)
    assert split_documents(reordered) == [train, validation, test]


def test_named_splits_and_what_is_not_named(tmp_path):
    train = write(tmp_path / "train", "parquet", [RAW[:40]])
    valid = write(tmp_path / "valid", "parquet", [RAW[40:50]])
    documents = LocalDocuments(train, "parquet", validation=valid, fractions=(0.8, 0.1, 0.1), cut="documents", **SMALL)
    seen, validation, test = split_documents(documents)
    assert validation == set(RAW[40:50]) and test and not seen & test and seen | test == set(RAW[:40])


def test_held_out_is_read_once_and_bounded():
    documents = Given(RAW, RAW, held_out_bytes=100, fractions=(0.5, 0.5, 0), cut="documents", **SMALL)
    sets = [[whole(batch) for batch in agents_data.held_out(documents, "validation", 16, 4, seed=seed)] for seed in (0, 1)]
    assert sets[0] == sets[1] and documents.shards["train"].reads == 1
    total = sum(len(crop) for batch in sets[0] for crop in batch)
    assert 50 <= total <= 100
    (few,) = agents_data.held_out(documents, "validation", 16, 4, max_bytes=20)
    assert 0 < int(few.valid.sum()) <= 20 and whole(few) == sets[0][0][: len(few.bytes)]


@pytest.mark.parametrize("cut", CUTS)
def test_what_programs_ask_of_a_source(cut, local):
    folder, kind = local
    documents = LocalDocuments(folder, kind, cut=cut, fractions=(0.6, 0.2, 0.2), **SMALL)
    for split in ("validation", "test"):
        batches = list(agents_data.held_out(documents, split, 12, 5, seed=7))
        numbers = torch.cat([batch.sequence for batch in batches])
        assert numbers.tolist() == list(range(len(numbers))) and {batch.seed for batch in batches} == {7}
        assert len(agents_data.held_out_stream(documents, split).sequences(0, torch.arange(3), 8)[0]) == 3
    (text,) = agents_data.training_bytes(documents, 12, 0)
    assert len(text) > 300 and agents_data.train_stream(documents).sequences(0, torch.arange(2), 8)[1].all()
    x = torch.tensor([list(b"a b")])
    assert agents_data.reference_starts(documents, x).tolist() == [[True, False, True]]
    identity = agents_data.identity(documents)
    assert identity["data"] == folder.name and len(identity["data_sha256"]) == 64
    assert identity == agents_data.identity(LocalDocuments(folder, kind, cut=cut, **SMALL))


# mistakes


def refused(says, *arguments, **options):
    with pytest.raises(UserError, match=says) as error:
        documents = LocalDocuments(*arguments, **options)
        next(documents.batches(2, 8, 0))
        next(documents.held_out("validation", 8, 2))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_mistakes_about_files(workers, tmp_path):
    options = {"workers": workers}
    refused("no file or folder '.*nowhere'; give", tmp_path / "nowhere", "parquet", **options)
    refused("holds no parquet files; use files with one of the suffixes .parquet", tmp_path, "parquet", **options)
    refused("holds no text files", tmp_path, "text", **options)
    refused("no format 'csv'; use one of text, jsonl, parquet", tmp_path, "csv", **options)
    (tmp_path / "a.parquet").touch()
    refused("'.*a.parquet' is empty", tmp_path, "parquet", **options)
    (tmp_path / "a.parquet").write_text("no")
    refused("'.*a.parquet' is no Parquet file", tmp_path, "parquet", **options)
    write(tmp_path / "b", "parquet", [RAW], column="content")
    refused("0.parquet' has no column 'text'; use data.source.column with one of content, n", tmp_path / "b", "parquet", **options)
    refused("column 'n' of '.*0.parquet' holds int64; use a column of strings", tmp_path / "b", "parquet", "n", **options)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nno json\n')
    refused("cannot .*a.jsonl.*JSON parse error", tmp_path, "jsonl", **options)
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    refused("a.jsonl' has no column 'text'; use data.source.column with one of body", tmp_path, "jsonl", **options)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    refused("cannot .*a.jsonl.*changed from string to number", tmp_path, "jsonl", **options)


def test_mistakes_about_splits_and_numbers(tmp_path):
    folder = write(tmp_path / "x", "parquet", [RAW])
    refused("no document to train on; lower longer_than", folder, "parquet", longer_than=10**6, workers=0)
    refused("has no validation document longer than 80 bytes", folder, "parquet", longer_than=80, fractions=(1, 0, 0))
    refused("has no validation document; name data.source.validation", folder, "parquet", fractions=(1, 0, 0))
    refused("'.*0.parquet' is in both train and test", folder, "parquet", test=folder / "0.parquet")
    refused("no file or folder '.*nowhere'", folder, "parquet", validation=tmp_path / "nowhere")
    refused("fractions of train, validation, test must be three and sum to 1", folder, "parquet", fractions=(1, 1, 0))
    refused("no cut 'page'; use one of joined, documents, beginnings", folder, "parquet", cut="page")
    refused("data.source.workers must be a whole number of at least 0, got -1", folder, "parquet", workers=-1)
    refused("data.source.buffer must be a whole number of at least 1, got 0", folder, "parquet", buffer=0)
    few = write(tmp_path / "few", "parquet", [RAW[:1]])
    refused("no document to train on for worker 2 of 2; lower longer_than or workers", few, "parquet", fractions=(1, 0, 0), workers=2)


# the hub


@pytest.fixture
def repository(tmp_path):
    """A folder laid out as a data set of the hub, which the same code opens: Parquet shards, two splits, one configuration."""
    write(tmp_path / "data/train", "parquet", [RAW[i:50:3] for i in range(3)])
    write(tmp_path / "data/test", "parquet", [RAW[50:]])
    files = [{"split": split, "path": f"data/{split}/*.parquet"} for split in ("train", "test")]
    card = {"configs": [{"config_name": "sample-100BT", "data_files": files}]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    return str(tmp_path)


@pytest.fixture
def offline(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_a_data_set_of_the_hub_is_streamed_by_its_splits(repository, offline):
    documents = HubDocuments(repository, "sample-100BT", test="test", cut="documents", fractions=(0.8, 0.2, 0), **SMALL)
    train, validation, test = split_documents(documents)
    assert test == set(RAW[50:]) and validation and not train & validation and train | validation == set(RAW[:50])
    identity = agents_data.identity(documents)
    assert identity["data"] == repository and identity["data_config"] == "sample-100BT" and identity["data_revision"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"config": "sample-1BT"}, "cannot open the data set '.*': BuilderConfig 'sample-1BT' not found. Available: .'sample-100BT'."),
        ({"validation": "valid"}, "cannot open the split 'valid' of the data set '.*': .*train.*test"),
        ({"column": "content"}, "has no column 'content'; use data.source.column with one of text, n"),
        ({"test": "train"}, "train=train, test=train: splits must not overlap"),
    ],
)
def test_mistakes_about_the_hub(options, says, repository, offline):
    with pytest.raises(UserError, match=says) as error:
        HubDocuments(repository, **{"config": "sample-100BT", **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["fineweb", "codeparrot"])
def test_a_hub_that_cannot_be_reached_is_one_line(name, offline, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", f"data={name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    path = {"fineweb": "HuggingFaceFW/fineweb", "codeparrot": "transformersbook/codeparrot"}[name]
    assert line.startswith(f"segment-env: cannot open the data set '{path}': Couldn't reach '{path}' on the Hub")
    assert not list(tmp_path.iterdir())


# cost


def test_nothing_waits_for_the_library_of_data_sets():
    code = "import sys, segment_env.streams, agents.data; sys.exit(bool({'datasets', 'pyarrow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_flat(kind, workers, tmp_path):
    """Over 2,000 batches after 500, which cross every buffer and some epochs; a leak of every batch's bytes would be 16 MB."""
    document = "".join(chr(97 + i % 26) for i in range(5000))
    folder = write(tmp_path, kind, [[f"{shard} {i} {document}".encode() for i in range(500)] for shard in range(8)])
    batches = LocalDocuments(folder, kind, workers=workers, buffer=256).batches(16, 512, 0)
    take(batches, 500)
    seen = []
    for _ in range(40):
        take(batches, 50)
        seen.append(_resident())
    y, x = torch.tensor(seen, dtype=torch.float64), torch.arange(40.0, dtype=torch.float64) * 50
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    print(f"{kind}, {workers} workers: {slope:+.0f} bytes of memory a batch, from {seen[0] >> 20} to {seen[-1] >> 20} MiB")
    assert slope < 2000
