"""Files of text: tokens, vocabularies, indices, batches."""

import gzip
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import chainer
import numpy as np
import pytest

import chainermn


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("May 12, 1984", "▁May ▁1 2 , ▁1 9 8 4"),
        ("  zwölf\tUhr ", "▁zwölf ▁Uhr"),
        ("1984-05-12", "▁1 9 8 4 - 0 5 - 1 2"),
        ("<eos>", "▁< eos >"),
        (" \u3000", ""),
    ],
)
def test_lines_are_divided_and_put_together(app, line, tokens):
    assert app.vocabulary.tokenize(line) == tokens.split()
    assert app.vocabulary.detokenize(tokens.split()) == " ".join(line.split())


def test_vocabulary_keeps_the_most_frequent_tokens(app):
    counts = Counter({"▁a": 5, "▁c": 2, "▁b": 2, "▁d": 1})
    tokens = app.vocabulary.most_frequent(counts, min_count=2, max_size=4)
    assert tokens == ["<eos>", "<unk>", "▁a", "▁b"]
    assert app.vocabulary.Vocabulary(tokens).encode("b a d").tolist() == [3, 2, 1]
    assert len(app.vocabulary.most_frequent(counts, min_count=2, max_size=9)) == 5


def write_files(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    paths = folder / "a.source", folder / "a.target"
    for path, content in zip(paths, (source, target), strict=True):
        path.write_bytes(content)
    return paths


class Alone:
    """A communicator of one rank."""

    rank, size, intra_rank, inter_rank = 0, 1, 0, 0

    def bcast_obj(self, value: object, root: int = 0) -> object:
        return value

    def allgather_obj(self, value: object) -> list[object]:
        return [value]


@pytest.fixture
def prepare(app) -> Callable:
    """Return a function that indexes two files and makes their vocabularies."""

    def run(files: tuple[Path, Path], folder: Path, **settings: int):
        return app.corpus.load_corpus(files, folder, app.corpus.Settings(**settings), 0, Alone())

    return run


def test_what_cannot_be_used_is_counted(app, prepare, tmp_path, capsys):
    source = b"one\n\n\xff\nfour five six\nseven\r\neight"
    files = write_files(tmp_path, source, b"1\n2\n3\n4\n7\n8\n")
    corpus, index = prepare(files, tmp_path, max_length=2)
    assert corpus.skipped == {"empty": 1, "not UTF-8": 1, "too long": 1}
    said = f"{files[0]}:3: not UTF-8 (1 of 6 lines, which are left out). If this is Latin-1: iconv"
    assert said in capsys.readouterr().out
    text = app.corpus.ParallelText(corpus, index)
    lines = [text.get_lines(i) for i in range(len(text))]
    text.close()
    assert lines == [("one", "1"), ("seven", "7"), ("eight", "8")]


def test_cache_is_used_for_the_same_files_and_settings_only(
    app, prepare, dates, tmp_path, monkeypatch
):
    first, index = prepare(dates, tmp_path)
    calls = []
    original = app.corpus.build_index
    counted = lambda *args: calls.append(args) or original(*args)  # noqa: E731
    monkeypatch.setattr(app.corpus, "build_index", counted)
    again, same = prepare(dates, tmp_path)
    assert not calls
    assert again.digest() == first.digest()
    np.testing.assert_array_equal(index, same)
    other, _ = prepare(dates, tmp_path, max_size=20)
    assert len(calls) == 1
    assert len(other.vocabularies[0]) == 20
    assert other.digest() != first.digest()


def test_changes_that_leave_size_and_time_are_noticed(app, prepare, tmp_path):
    files = write_files(tmp_path, b"one two\nthree four\n", b"1\n2\n")
    first, _ = prepare(files, tmp_path)
    time = files[1].stat().st_mtime_ns
    files[1].write_bytes(b"2\n1\n")
    os.utime(files[1], ns=(time, time))
    with pytest.raises(ValueError, match=r"a\.target is not the same file on all hosts"):
        replace(first.stamps[1], time=0).of_this_host()
    second, index = prepare(files, tmp_path)
    text = app.corpus.ParallelText(second, index)
    assert text.get_lines(0) == ("one two", "2")
    text.close()
    # As many tokens of each kind, at the same places: only the lines tell.
    assert first.digest() != second.digest()


def test_letters_and_their_accents_are_one_letter(app, prepare, tmp_path):
    files = write_files(
        tmp_path, "\ufeffu\u0308ber\nüber\n".encode(), "\ufeffgru\u0308n\r\ngrün\r\n".encode()
    )
    corpus, index = prepare(files, tmp_path)
    assert [v.tokens[2:] for v in corpus.vocabularies] == [("▁über",), ("▁grün",)]
    text = app.corpus.ParallelText(corpus, index)
    for reader in (text, pickle.loads(pickle.dumps(text))):  # for processes that are spawned
        assert [reader.get_lines(i) for i in range(2)] == [("über", "grün")] * 2
        reader.close()
    older, _ = prepare(files, tmp_path, normalization=None)
    assert len(older.vocabularies[1]) > 3
    assert older.digest() != corpus.digest()


@pytest.mark.mpi(3)
def test_each_host_has_its_own_times(app, dates, monkeypatch, shared_tmp_path):
    """Ranks 0 and 1 are on one host, rank 2 on another."""
    comm = chainermn.create_communicator("naive")
    places = [(0, 0), (0, 1), (1, 0)]
    inter_rank, intra_rank = places[comm.rank]
    seen = SimpleNamespace(
        rank=comm.rank,
        size=3,
        intra_rank=intra_rank,
        inter_rank=inter_rank,
        bcast_obj=comm.bcast_obj,
        allgather_obj=comm.allgather_obj,
    )
    of_this_host = lambda stamp: replace(stamp, time=comm.rank)  # noqa: E731
    monkeypatch.setattr(app.corpus.Stamp, "of_this_host", of_this_host)
    files = comm.bcast_obj(dates)
    corpus, _ = app.corpus.load_corpus(files, shared_tmp_path, app.corpus.Settings(), 0, seen)
    assert [stamp.time for stamp in corpus.stamps] == [2 * inter_rank] * 2


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"a\nb\nc", b"1\n2\n", "a.source has 3 lines and .*a.target has 2"),
        (b"a\n\n", b"1\n2\n3\n4", "a.source has 2 lines and .*a.target has 4"),
        (b"\n\na\n", b"1\n2\n3\n", "two pairs of lines or more.* have 1 .*'empty': 2"),
    ],
)
def test_error_for_files_that_do_not_fit(prepare, source, target, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare(write_files(tmp_path, source, target), tmp_path)


def test_messages_name_the_file_that_was_given(prepare, tmp_path, capsys):
    """Neither its copy in the cache, nor in characters that no terminal can print."""
    files = tmp_path / os.fsdecode(b"z\xfcrich.gz"), tmp_path / "a"
    cache, name = tmp_path / "cache", ascii(str(files[0]))
    files[1].write_bytes(b"1\n2\n3\n")
    for content, expected in (
        (b"a\nb\n", f"but {name} has 2 lines and {files[1]} has 3"),
        (b"\n\na\n", f"{name} and {files[1]} need two pairs of lines"),
        ("grün\nüber\na\n".encode("latin-1"), f"{name}:1: expected text in UTF-8, got another"),
    ):
        files[0].write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=re.escape(expected)):
            prepare(files, cache)
    files[0].write_bytes(gzip.compress(b"a\n\xff\nc\n"))
    prepare(files, cache)
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith(f"{name}:2: not UTF-8 (1 of 3 lines, ")]
    assert str(cache) not in "".join(shown)


def test_text_to_validate_with_that_is_swapped(app, prepare, tmp_path):
    files = write_files(tmp_path, b"one two\nthree\n", b"eins zwei\ndrei\n")
    corpus, _ = prepare(files, tmp_path)
    more = lambda *files: app.corpus.load_more(files, tmp_path, corpus, Alone())  # noqa: E731
    expected = f"{files[1]}: 100.0% of the tokens are not in the vocabulary of the training: exp"
    with pytest.raises(ValueError, match=re.escape(expected)):
        more(*files[::-1])
    files[0].write_bytes(b"one\nthree four five\n")
    assert more(*files)[0].unknown == (0.5, 0)


def test_longer_file_with_a_line_of_gigabytes(app, tmp_path):
    files = write_files(tmp_path, b"a\nb\n", b"1\n2\n3\n")
    os.truncate(files[1], 1 << 30)
    with pytest.raises(ValueError, match=rf"{files[1]}:4: expected text in UTF-8, got NUL"):
        app.index.build_index(files, files, 50)


def test_cached_index_of_something_else(prepare, dates, tmp_path):
    _, index = prepare(dates, tmp_path)
    (path,) = tmp_path.glob("index-*.npy")
    np.save(tmp_path / "other.npy", index[::-1])
    del index
    (tmp_path / "other.npy").replace(path)
    message = f"{path}: not the index of these files: delete it"
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(dates, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabularies": [["<eos>", "<unk>"]]}, "'vocabularies': expected a list of 2"),
        ({"vocabularies": [[], [1]]}, "'vocabularies'[1][0]: expected a string, got 1"),
        (
            {"vocabularies": [["a"], ["b"]]},
            "a vocabulary that begins with <eos>, <unk>, got ['a']",
        ),
        ({"skipped": {"empty": "x"}}, "'skipped': 'empty': expected an integer, got 'x'"),
        ({"index": None}, "'index': expected a string, got None"),
    ],
)
def test_cached_vocabulary_of_something_else(change, message, prepare, dates, tmp_path):
    prepare(dates, tmp_path)
    (path,) = tmp_path.glob("vocabulary-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        prepare(dates, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/")


def test_progress_is_shown(prepare, capsys, dates, tmp_path):
    prepare(dates, tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"vocabulary: {share}%" for share in range(10, 101, 10)]


def test_buckets_visit_every_pair_once_with_little_padding(app):
    random = np.random.RandomState(0)
    index = np.zeros((1003, 4), np.int64)
    index[:, app.index.SOURCE_LENGTH] = random.randint(1, 40, size=1003)
    index[:, app.index.TARGET_LENGTH] = random.randint(1, 40, size=1003)

    class Rows:
        def __init__(self) -> None:
            self.index = index

        def __len__(self) -> int:
            return len(index)

        def __getitem__(self, i: int) -> int:
            return i

        def close(self) -> None:
            pass

    batches = app.batches.BucketIterator(Rows(), 20, 0)
    epochs = []
    for _ in range(2):
        epoch = [next(batches) for _ in range(51)]
        assert batches.is_new_epoch
        assert sorted(i for batch in epoch for i in batch) == list(range(1003))
        padded = sum(len(b) * index[b, app.index.SOURCE_LENGTH].max() for b in epoch)
        assert index[:, app.index.SOURCE_LENGTH].sum() > 0.9 * padded
        epochs.append(epoch)
    assert epochs[0] != epochs[1]
    assert (batches.epoch, batches.epoch_detail) == (2, 2.0)
    again = app.batches.BucketIterator(Rows(), 20, 0)
    assert [next(again) for _ in range(51)] == epochs[0]

    state = chainer.serializers.DictionarySerializer()
    for _ in range(20):
        next(batches)
    batches.serialize(state)
    again.serialize(chainer.serializers.NpzDeserializer(state.target))
    assert [next(again) for _ in range(40)] == [next(batches) for _ in range(40)]
    # With another number of ranks, a batch may have another size. The share of the epoch that is
    # over stays the same.
    other = app.batches.BucketIterator(Rows(), 10, 0)
    other.serialize(chainer.serializers.NpzDeserializer(state.target))
    assert (other.epoch, other.position) == (2, 20 * 101 // 51)


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [(1, "first", "erste"), (12, "twelfth", "zwölfte"), (21, "twenty-first", "einundzwanzigste")],
)
def test_days_are_written_out(app, number, english, german):
    assert app.generated.english_ordinal(number) == english
    assert app.generated.german_ordinal(number) == german


@pytest.mark.parametrize(
    ("year", "english", "german"),
    [
        (1900, "nineteen hundred", "neunzehnhundert"),
        (1905, "nineteen oh five", "neunzehnhundertfünf"),
        (2000, "two thousand", "zweitausend"),
        (2001, "two thousand and one", "zweitausendeins"),
        (2084, "twenty eighty-four", "zweitausendvierundachtzig"),
    ],
)
def test_years_are_written_out(app, year, english, german):
    assert app.generated.english_year(year) == english
    assert app.generated.german_year(year) == german
