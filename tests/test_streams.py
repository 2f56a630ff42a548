"""Streams: pure functions of (seed, index); corpora: bytes untouched; mistakes of the user's: one line each."""

import hashlib
import itertools
import math

import pytest
import torch

from agents.data import held_out
from segment_env.batch import Episodes
from segment_env.closed_form import CountingStream
from segment_env.errors import UserError
from segment_env.streams import Corpus, MadeUpLanguage, TextStream, crops, files, moby_dick, standard_library, whitespace_starts

TEXT = b"Call me Ishmael.  Some years ago\n- never mind how long\tprecisely -\n" * 20
STREAMS = {"text": TextStream(TEXT), "made_up": MadeUpLanguage(40), "counting": CountingStream()}


@pytest.fixture(params=STREAMS)
def stream(request):
    return STREAMS[request.param]


def random_bytes(rows, length, seed=0):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


# what every stream promises


def test_shapes_and_types(stream):
    x, valid, terminated = stream.sequences(0, torch.arange(5), 33)
    assert x.shape == valid.shape == (5, 33) and terminated.shape == (5,)
    assert x.dtype == torch.int64 and valid.dtype == terminated.dtype == torch.bool
    assert x.min() >= 0 and x.max() <= 255 and valid.all() and not terminated.any()
    assert stream.unit == "byte" and stream.sample_rate is None


def test_a_sequence_depends_on_seed_and_index_alone(stream):
    index = torch.tensor([9, 0, 10**9, 4])
    x = stream.sequences(3, index, 50)[0]
    assert torch.equal(x, stream.sequences(3, index, 50)[0])
    for s in range(4):
        assert torch.equal(stream.sequences(3, index[s : s + 1], 50)[0][0], x[s])
    others = stream.sequences(4, index, 50)[0]
    assert not torch.equal(x, others) and len(x.unique(dim=0)) > 1


def test_ranks_see_what_one_process_sees(stream):
    whole = Episodes(stream, 6, 20, seed=2)
    ranks = [Episodes(stream, 3, 20, seed=2, first=first, total=6) for first in (0, 3)]
    for episode in (0, 5):
        parts = [rank.batch(episode) for rank in ranks]
        assert torch.equal(torch.cat([part.bytes for part in parts]), whole.batch(episode).bytes)


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_sequences(stream, length):
    x, valid, _ = stream.sequences(0, torch.arange(3), length)
    assert x.shape == (3, length) and valid.all() and stream.reference(x)[:, 0].all()


@pytest.mark.parametrize("name", ["made_up", "counting"])
def test_reference_reads_the_past_alone(name):
    stream = STREAMS[name]
    x = torch.cat([stream.sequences(0, torch.arange(4), 60)[0], random_bytes(2, 60)])
    reference = stream.reference(x)
    for t in (1, 7, 30, 59):
        changed = x.clone()
        changed[:, t:] = random_bytes(6, 60 - t, seed=t)
        assert torch.equal(stream.reference(changed)[:, : t + 1], reference[:, : t + 1])


# text


def test_crops_at_random_are_pieces_of_the_text():
    x = STREAMS["text"].sequences(0, torch.arange(50), 64)[0]
    assert all(bytes(row.tolist()) in TEXT for row in x)
    exact = TextStream(TEXT[:64]).sequences(0, torch.arange(3), 64)[0]
    assert all(bytes(row.tolist()) == TEXT[:64] for row in exact)


def test_every_position_is_drawn():
    x = TextStream(bytes(range(8))).sequences(1, torch.arange(400), 3)[0]
    # 6 positions; the chance that 400 draws miss one is below 6 * (5/6)^400 < 10^-30
    assert set(x[:, 0].tolist()) == set(range(6))


def test_word_starts_by_whitespace():
    text = b"ab  c\n\x0bd \xe2\x80\x94e\x85f\x00g "
    starts = whitespace_starts(torch.tensor(list(text)))
    by_hand = [t == 0 or (text[t - 1] in b" \t\n\v\f\r" and text[t] not in b" \t\n\v\f\r") for t in range(len(text))]
    assert starts.tolist() == by_hand and starts.sum() == 4


def test_short_corpus_is_one_clear_line():
    stream = Corpus("x", b"a" * 100, (1.0, 0.0, 0.0)).stream("train")
    line = r"^corpus 'x' train split has 100 bytes, shorter than one crop of 512; use data.length <= 100 or a larger file$"
    with pytest.raises(UserError, match=line):
        stream.sequences(0, torch.arange(2), 512)
    with pytest.raises(UserError, match="use a larger file"):
        TextStream(b"").sequences(0, torch.arange(2), 512)


def test_bytes_are_one_dimensional():
    with pytest.raises(ValueError, match="uint8"):
        TextStream(torch.zeros(3))


# evaluation


@pytest.mark.parametrize(("size", "length", "rows"), [(67, 10, 4), (60, 10, 3), (1, 1, 1), (5, 8, 2), (41, 10, 4), (40, 1, 7)])
def test_crops_cover_every_byte_once(size, length, rows):
    data = TEXT[:size]
    batches = list(crops(data, length, rows, seed=3))
    total = math.ceil(size / length)
    assert torch.cat([batch.sequence for batch in batches]).tolist() == list(range(total))
    assert torch.cat([batch.terminated for batch in batches]).tolist() == [False] * (total - 1) + [True]
    assert all(batch.bytes.shape == batch.valid.shape and batch.bytes.shape[1] == length for batch in batches)
    assert all(len(batch.bytes) <= rows and batch.seed == 3 for batch in batches)
    assert bytes(itertools.chain.from_iterable(batch.bytes[batch.valid].tolist() for batch in batches)) == data
    assert all(batch.valid[:, 0].all() and not batch.bytes[~batch.valid].any() for batch in batches)


def test_crops_refuse_nothing_to_read():
    with pytest.raises(UserError, match="no bytes"):
        crops(b"", 10, 2)
    with pytest.raises(ValueError, match="at least 1"):
        crops(TEXT, 0, 2)


# corpora


def test_splits_are_the_corpus_in_three():
    corpus = Corpus("numbers", bytes(range(100)))
    parts = [corpus.split(name) for name in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [90, 5, 5]
    assert torch.cat(parts).tolist() == list(range(100))
    assert corpus.sha256 == hashlib.sha256(bytes(range(100))).hexdigest()
    halves = Corpus("numbers", bytes(101), (0.5, 0.25, 0.25))
    assert sum(len(halves.split(name)) for name in ("train", "validation", "test")) == 101


def test_mistakes_about_splits():
    with pytest.raises(UserError, match="no split 'valid'; use one of train, validation, test"):
        moby_dick().split("valid")
    for fractions in ((0.9, 0.1), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1)):
        with pytest.raises(UserError, match="sum to 1"):
            Corpus("x", b"abc", fractions)


def test_moby_dick_is_whole():
    corpus = moby_dick()
    assert len(corpus.data) == 1_218_684 and b"Call me Ishmael." in corpus.data
    assert corpus.sha256 == "e67a28c179b97c2a9bd608fc81732bb8cf6fc7f51c135ecfe94e03e3b9e0c38e"
    assert corpus is moby_dick()


def test_standard_library_is_large_and_plain_source():
    corpus = standard_library()
    assert len(corpus.data) > 10_000_000
    for split in ("train", "validation", "test"):
        x = corpus.stream(split).sequences(0, torch.arange(50), 1000)[0]
        assert (x < 128).double().mean() > 0.9  # program text is ASCII for the most part, compiled code is not


def test_one_file_is_taken_as_it_is(tmp_path):
    raw = b"\xff\xfe\r\nnot \x00 utf-8"
    (tmp_path / "sound.raw").write_bytes(raw)
    corpus = files(tmp_path / "sound.raw")
    assert corpus.data == raw and corpus.name == "sound.raw"


def test_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    contents = {"b/z.md": b"third", "c.py": b"fourth", "a.TXT": b"first", "b/a.txt": b"second", "empty.txt": b"", ".git/d.txt": b"no"}
    for name, data in {**contents, "image.png": b"no"}.items():
        (tmp_path / name).write_bytes(data)
    assert files(tmp_path).data == b"first\n\nsecond\n\nthird\n\nfourth"
    assert files(str(tmp_path)).name == tmp_path.name


def test_mistakes_about_files(tmp_path):
    with pytest.raises(UserError, match="no file or folder '.*nowhere'; give"):
        files(tmp_path / "nowhere")
    (tmp_path / "nothing.txt").touch()
    with pytest.raises(UserError, match="corpus 'nothing.txt' is empty; use"):
        files(tmp_path / "nothing.txt")
    with pytest.raises(UserError, match="holds no text; use") as error:
        files(tmp_path)
    assert "\n" not in str(error.value)


# the made-up language


def greedy_starts(words, text):
    """Word starts by matching whole words from the left: what the automaton must find."""
    starts, position = set(), 0
    while position < len(text):
        starts.add(position)
        fits = [word for word in words if text.startswith(word, position)]
        position += len(fits[0]) if fits else len(text)
    return starts


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_word_begins_another(seed):
    words = MadeUpLanguage(300, 2, 8, seed=seed).words
    assert len(set(words)) == 300 and {len(word) for word in words} == set(range(2, 9))
    assert all(word.isalpha() and word.islower() for word in words)
    assert not any(a != b and b.startswith(a) for a in words for b in words)


@pytest.mark.parametrize("lengths", [(2, 8), (1, 3), (4, 4)])
def test_reference_is_the_word_starts(lengths):
    language = MadeUpLanguage(12, *lengths, seed=4)
    x = language.sequences(0, torch.arange(20), 70)[0]
    reference = language.reference(x)
    for row, starts in zip(x.tolist(), reference, strict=True):
        assert set(starts.nonzero().flatten().tolist()) == greedy_starts(language.words, bytes(row))


def test_a_shorter_crop_is_the_beginning():
    language = STREAMS["made_up"]
    long = language.sequences(5, torch.arange(6), 100)[0]
    assert torch.equal(language.sequences(5, torch.arange(6), 31)[0], long[:, :31])


def test_frequencies_are_zipfs():
    language = MadeUpLanguage(5, 3, 3, exponent=1.0, seed=1)
    x = language.sequences(0, torch.arange(2000), 30)[0].view(-1, 3)
    spelled = torch.tensor([list(word) for word in language.words])
    counts = (x[:, None] == spelled).all(-1).sum(0)
    n, p = 20_000, language.frequency
    assert counts.sum() == n
    # each of five counts within 5 standard errors: a sound sampler fails with a chance below 3 * 10^-6
    assert ((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt()).all()
    assert language.entropy_per_byte == pytest.approx(float(-(p * p.log()).sum()) / 3)


def test_lexicon_and_sequences_have_seeds_of_their_own():
    one, same, other = MadeUpLanguage(30, seed=0), MadeUpLanguage(30, seed=0), MadeUpLanguage(30, seed=1)
    index = torch.arange(4)
    assert one.words == same.words != other.words
    assert torch.equal(one.sequences(8, index, 40)[0], same.sequences(8, index, 40)[0])


def test_any_bytes_have_a_reference():
    language = STREAMS["made_up"]
    x = random_bytes(50, 40)
    x[:, 0] = 0  # no word begins with this byte
    starts = language.reference(x)
    assert starts[:, 0].all() and not starts[:, 1:].any()


def test_a_lexicon_must_fit():
    with pytest.raises(UserError, match="do not fit; use a larger min_length or fewer words"):
        MadeUpLanguage(30, 1, 1)
    with pytest.raises(UserError, match="lexicon_size >= 1"):
        MadeUpLanguage(10, 5, 4)


# counting


def test_counting_stream_counts():
    x = CountingStream(7, noise=0.0).sequences(0, torch.arange(30), 25)[0]
    assert torch.equal(x[:, 1:], (x[:, :-1] + 1) % 7) and len(x[:, 0].unique()) > 1
    assert torch.equal(CountingStream(7).reference(x)[:, 1:], x[:, 1:] == 0)


def test_counting_goes_on_under_the_noise():
    clean, noisy = (CountingStream(5, noise).sequences(2, torch.arange(40), 500)[0] for noise in (0.0, 0.2))
    replaced = noisy >= 5
    assert torch.equal(noisy[~replaced], clean[~replaced])
    # 20,000 bytes: 5 standard errors of the share of noise are 0.0141
    assert abs(replaced.double().mean() - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 20_000)
    reference = CountingStream(5).reference(noisy)
    known = ((~replaced).cumsum(1) > 0)[:, :-1]
    assert torch.equal(reference[:, 1:][known], clean[:, 1:][known] == 0)


@pytest.mark.parametrize(("period", "noise"), [(1, 0.1), (256, 0.1), (8, 1.0), (8, -0.1)])
def test_counting_needs_a_circle(period, noise):
    with pytest.raises(ValueError, match="counting stream"):
        CountingStream(period, noise)


def test_the_noise_seed_changes_no_held_out_byte():
    one, other = (next(held_out(MadeUpLanguage(), "validation", 32, 2, seed=seed)) for seed in (0, 1))
    assert one.bytes.equal(other.bytes) and (one.seed, other.seed) == (0, 1)
    assert not one.bytes.equal(next(held_out(MadeUpLanguage(), "test", 32, 2)).bytes)
