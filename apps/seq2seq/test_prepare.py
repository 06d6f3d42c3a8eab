"""Text that prepare.py makes from catalogs, subwords, and evaluate.py on that text."""

import json
import os
import random
import re
import shutil
import subprocess
import tarfile
import unicodedata
from pathlib import Path

import chainer
import numpy as np
import polib
import pytest
from sacrebleu.metrics import BLEU, CHRF

import chainermn

NOUNS = ["file", "folder", "image", "layer", "window", "page"]
VERBS = ["open", "close", "save", "delete", "rename"]
# Seconds after which ranks count as hung, even on a busy machine.
LIMIT = 600


def entries(package: str) -> list[polib.POEntry]:
    """Return a package's messages: one that all packages have, and some of its own."""
    own = [
        polib.POEntry(
            msgid=f"_{verb.title()} the {noun} of {package}",
            msgstr=f"{noun} dieses Pakets jetzt {verb}ßen",
        )
        for verb in VERBS
        for noun in NOUNS
    ]
    return [polib.POEntry(msgid="&Cancel", msgstr="&Abbrechen"), *own]


def write_catalog(path: Path, content: list[polib.POEntry]) -> None:
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=UTF-8"}
    catalog.extend(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    (catalog.save_as_mofile if path.suffix == ".mo" else catalog.save)(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder like /usr/share/locale, with catalogs of twelve packages."""
    folder = tmp_path_factory.mktemp("locale")
    for i in range(12):
        suffix = "po" if i % 2 else "mo"
        messages = entries(f"P{i}")
        write_catalog(folder / f"de/LC_MESSAGES/package{i}.{suffix}", messages)
    write_catalog(folder / "fr/LC_MESSAGES/package0.mo", [polib.POEntry(msgid="a", msgstr="b")])
    return folder


@pytest.fixture(scope="module")
def prepared(app, folder, call, tmp_path_factory) -> Path:
    """Return a folder with text from the catalogs, and a model of subwords."""
    out = tmp_path_factory.mktemp("prepared")
    limits = ["--validation", "40", "--test", "75"]
    shown = call(app.prepare.main, "gettext", folder, "-l", "de", "--out", out, *limits)
    assert "test: 60 pairs of 2 packages\n" in shown
    text = out / "train.en", out / "train.de"
    size = ["--vocabulary-size", "90"]
    shown = call(app.prepare.main, "subwords", *text, *size, "-o", out / "subwords.model")
    assert shown == f"written: {out}/subwords.model\n"
    return out


def read(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


# Catalogs


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ("_Open\n  file…", "_Datei\töffnen…", ("Open file…", "Datei öffnen…")),
        ("E&xit", "Beenden", ("Exit", "Beenden")),
        ("Save _As", "Speichern _unter", ("Save As", "Speichern unter")),
        ("a &lt; b", "a &lt; b", ("a &lt; b", "a &lt; b")),
        ("set my_own_name", "my_own_name setzen", ("set my_own_name", "my_own_name setzen")),
        ("one_name", "ein_a_b", ("one_name", "ein_a_b")),
        ("Cut & paste", "Kopieren & einfügen", ("Cut & paste", "Kopieren & einfügen")),
    ],
)
def test_accelerators_and_line_breaks_are_taken_out(app, source, target, wanted):
    assert app.catalogs.normalize(source, target) == wanted


@pytest.mark.parametrize("suffix", ["po", "mo"])
def test_messages_of_a_catalog(app, tmp_path, suffix):
    entry = polib.POEntry
    content = [
        entry(msgid="one", msgstr="eins"),
        entry(msgid="one", msgstr="eine", msgctxt="article"),
        entry(msgid="one", msgstr="eins", msgctxt="again"),
        entry(msgid="%d day", msgid_plural="%d days", msgstr_plural={0: "%d Tag", 1: "%d Tage"}),
        entry(msgid="...", msgstr="..."),
        entry(msgid="no translation", msgstr=""),
        entry(msgid="a long story", msgstr="eine lange Geschichte"),
        entry(msgid="uncertain", msgstr="unsicher", flags=["fuzzy"]),
        entry(msgid="gone", msgstr="weg", obsolete=True),
    ]
    path = tmp_path / f"a.{suffix}"
    write_catalog(path, content)
    messages = app.catalogs.Messages()
    messages.read(path, "a", max_characters=12)
    pairs = [("one", "eins"), ("one", "eine"), ("%d day", "%d Tag"), ("%d days", "%d Tage")]
    assert sorted(messages.packages["a"]) == sorted(pairs)
    skipped = {"without letters": 1, "too long": 1}
    if suffix == "po":  # a .mo has none of these
        skipped |= {"fuzzy": 1, "obsolete": 1, "empty": 1}
    assert messages.skipped == skipped
    assert messages.catalogs == 1


def test_catalogs_are_found_by_language(app, folder, tmp_path):
    with app.catalogs.find_catalogs([folder], "de") as found:
        assert sorted(package for _, package in found) == sorted(f"package{i}" for i in range(12))
    for path in ("app/po/de.po", "app/po/fr.po", "django/auth/locale/de/LC_MESSAGES/django.po"):
        write_catalog(tmp_path / path, [polib.POEntry(msgid="a", msgstr="b")])
    with app.catalogs.find_catalogs([tmp_path], "de") as found:
        assert [package for _, package in found] == ["app", "django"]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_catalogs_of_a_debian_package(app, tmp_path, monkeypatch):
    root = tmp_path / "root"
    write_catalog(root / "usr/share/locale/de/LC_MESSAGES/x.mo", entries("x"))
    (root / "DEBIAN").mkdir()
    about = "Package: hello\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: b\n"
    (root / "DEBIAN/control").write_text(about)
    file = tmp_path / "hello_1_all.deb"
    subprocess.run(["dpkg-deb", "--build", root, file], check=True, capture_output=True)
    with app.catalogs.find_catalogs([file], "de") as found:
        ((path, package),) = found
        assert path.read_bytes() == (root / "usr/share/locale/de/LC_MESSAGES/x.mo").read_bytes()
    assert package == "hello"
    monkeypatch.setattr(app.catalogs, "MOST_BYTES", 1000)
    with (
        pytest.raises(ValueError, match=r"hello_1_all\.deb: catalogs of \d{4} bytes and more"),
        app.catalogs.find_catalogs([file], "de"),
    ):
        pass
    file.write_bytes(b"something else")
    with (
        pytest.raises(ValueError, match=r"hello_1_all\.deb: not a Debian package"),
        app.catalogs.find_catalogs([file], "de"),
    ):
        pass


def tar(name: str) -> bytes:
    member = tarfile.TarInfo(name)
    return member.tobuf() + bytes(10_240 - tarfile.BLOCKSIZE)


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_package_with_a_catalog_outside(app, tmp_path):
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar": tar("control"),
        "data.tar": tar("usr/../../x.mo"),
    }
    content = b"!<arch>\n"
    for name, part in parts.items():
        content += b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name.encode(), 0, 0, 0, b"644", len(part))
        content += part
    file = tmp_path / "a.deb"
    file.write_bytes(content)
    with (
        pytest.raises(ValueError, match=r"a\.deb: usr/\.\./\.\./x\.mo leads out of the package"),
        app.catalogs.find_catalogs([file], "de"),
    ):
        pass


def test_what_is_tested_has_not_been_trained_on(prepared):
    pairs = {
        name: list(zip(read(prepared / f"{name}.en"), read(prepared / f"{name}.de"), strict=True))
        for name in ("train", "valid", "test")
    }
    assert {name: len(found) for name, found in pairs.items()} == {
        "train": 9 * 30 + 1,
        "valid": 30,
        "test": 60,
    }
    assert ("Cancel", "Abbrechen") in pairs["train"]
    together = [pair for found in pairs.values() for pair in found]
    assert len(set(together)) == len(together) == 12 * 30 + 1
    assert ("Open the file of P3", "file dieses Pakets jetzt openßen") in together
    packages = {
        name: {source.rpartition(" ")[2] for source, _ in found} - {"Cancel"}
        for name, found in pairs.items()
    }
    assert not packages["train"] & packages["test"] | packages["train"] & packages["valid"]
    counts = json.loads((prepared / "counts.json").read_text())
    assert counts["pairs"] == {name: len(found) for name, found in pairs.items()}
    for name, found in packages.items():
        assert sorted(counts["packages"][name]) == sorted(f"package{p[1:]}" for p in found)


def test_messages_that_differ_by_punctuation_are_the_same(app):
    packages = {name: [(f"{name} {i}", "x") for i in range(9)] for name in "abcd"}
    packages["a"].append(("Open file…", "1"))
    packages["b"].append(("open FILE", "2"))
    parts, _ = app.prepare.split(packages, 9, 9, seed=0)
    assert {("Open file…", "1"), ("open FILE", "2")} <= set(parts["train"])
    assert [len(parts[name]) for name in ("train", "valid", "test")] == [20, 9, 9]
    assert app.prepare.split(packages, 9, 9, seed=0)[0] == parts
    with pytest.raises(ValueError, match="nothing for valid and test: 4 packages"):
        app.prepare.split(packages, 8, 8, seed=0)


def test_error_for_catalogs_that_cannot_be_read(app, error_of, tmp_path):
    path = tmp_path / "a.mo"
    for content, message in [
        (None, "No such file or directory: '.*a.mo'"),
        (b"something else", "a.mo: not a catalog of gettext"),
        (b"\xde\x12\x04\x95" + bytes(4) + b"\xff" * 16, "a.mo: not a catalog of gettext"),
    ]:
        if content is not None:
            path.write_bytes(content)
        shown = error_of(app.prepare.main, "gettext", path, "-l", "de", "-o", tmp_path)
        assert re.search(message, shown)
        assert "\n" not in shown


# Subwords


def test_subwords_are_put_together_again(app, prepared):
    split = app.subwords.Subwords((prepared / "subwords.model").read_bytes())
    lines = [*read(prepared / "test.en"), *read(prepared / "test.de"), "漢 of 1984", ""]
    for line in lines:
        assert app.vocabulary.detokenize(split(line)) == line
    assert split("12")[-2:] == ["1", "2"]
    n_words = sum(len(app.vocabulary.tokenize(line)) for line in lines)
    assert n_words != sum(len(split(line)) for line in lines)


def test_lines_that_are_no_text_make_no_subwords(app, call, error_of, prepared, tmp_path):
    """What remains makes the same model."""
    lines = (prepared / "train.de").read_text("utf-8")
    spoilt = "\ufeff".encode() + unicodedata.normalize("NFD", lines).encode() + b"\xff\n" * 2
    (tmp_path / "a").write_bytes(spoilt)
    (tmp_path / "b").write_text(lines, "utf-8")
    for name in "ab":
        options = ["--vocabulary-size", "60", "--out", tmp_path / f"{name}.model"]
        shown = call(app.prepare.main, "subwords", tmp_path / name, *options)
        assert (f"{tmp_path}/a:" in shown and ": not UTF-8 (2 of " in shown) == (name == "a")
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    (tmp_path / "a").write_text(lines, "utf-16")
    shown = error_of(app.prepare.main, "subwords", tmp_path / "a", *options)
    assert shown.startswith(f"error: {tmp_path}/a:1: expected text in UTF-8, got UTF-16")
    (tmp_path / "a").write_text("\n \n")
    shown = error_of(app.prepare.main, "subwords", tmp_path / "b", tmp_path / "a", *options)
    assert shown == f"error: {tmp_path}/a: expected lines of text, got none"
    odd = tmp_path / os.fsdecode(b"z\xfcrich")
    shown = call(app.prepare.main, "subwords", tmp_path / "b", *options, "--out", odd)
    assert shown == f"written: {str(odd)!a}\n"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_subwords_are_the_same_each_time(app, prepared, kind):
    lines = read(prepared / "train.en")
    models = [app.subwords.train_subwords(lines, kind, 80) for _ in range(2)]
    assert models[0] == models[1]


def test_error_for_more_subwords_than_there_are(app, error_of, prepared, tmp_path):
    options = ["--kind", "bpe", "--vocabulary-size", "30000", "-o", tmp_path / "model"]
    shown = error_of(app.prepare.main, "subwords", prepared / "train.en", *options)
    assert shown.startswith("error: sentencepiece: ")


def text_options(prepared: Path) -> list[str | Path]:
    return [
        *("--source", prepared / "train.en", "--target", prepared / "train.de"),
        *("--validation-source", prepared / "valid.en"),
        *("--validation-target", prepared / "valid.de"),
        *("--subwords", prepared / "subwords.model", "--share-embedding"),
        *(
            "--model",
            "transformer",
            "--unit",
            "32",
            "--head",
            "2",
            "--batchsize",
            "16",
            "--lr",
            "0.02",
        ),
    ]


@pytest.fixture(scope="module")
def trained(app, call, prepared, tmp_path_factory) -> Path:
    """Train on all ranks with the text of rank 0; return the folder."""
    comm = chainermn.create_communicator("naive")
    out = comm.bcast_obj(tmp_path_factory.mktemp("trained") / "result")
    call(app.train.main, *text_options(comm.bcast_obj(prepared)), "--epoch", "2", "--out", out)
    comm.mpi_comm.Barrier()
    return out


@pytest.mark.mpi(2, timeout=LIMIT)
def test_training_with_subwords(app, call, trained, prepared, refused, shared_tmp_path):
    assert len(json.loads((trained / "model.json").read_text())["vocabularies"][0]) < 95
    (translation,) = call(
        app.translate.main, trained / "best.npz", text="Open the file of P3"
    ).splitlines()
    assert " " in translation  # words, not parts of words
    assert "\u2581" not in translation
    # Another model of subwords makes this another run.
    comm = chainermn.create_communicator("naive")
    other, out = shared_tmp_path / "other.model", shared_tmp_path / "result"
    if comm.rank == 0:
        text = prepared / "train.en", prepared / "train.de"
        options = ["--kind", "bpe", "--vocabulary-size", "70", "--out", other]
        call(app.prepare.main, "subwords", *text, *options)
        shutil.copytree(trained, out)
    comm.mpi_comm.Barrier()
    options = [other if o == prepared / "subwords.model" else o for o in text_options(prepared)]
    shown = refused(app.train.main, *options, "--epoch", "1", "--out", out)
    assert re.search(r"error: .* was written with other settings \(.*text: ", shown)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_error_for_something_else_than_subwords(app, prepared, refused, shared_tmp_path):
    options = [o if o != prepared / "subwords.model" else __file__ for o in text_options(prepared)]
    shown = refused(app.train.main, *options, "--out", shared_tmp_path)
    assert "error: " + __file__ + " is not a model of subwords" in shown


# Evaluation


@pytest.mark.mpi(2, timeout=LIMIT)
def test_scores_beside_those_of_baselines(app, call, trained, prepared, tmp_path):
    if chainermn.create_communicator("naive").rank > 0:
        return
    test, text = (
        [
            f"--{prefix}source",
            prepared / f"{name}.en",
            f"--{prefix}target",
            prepared / f"{name}.de",
        ]
        for prefix, name in (("", "test"), ("train-", "train"))
    )
    options = ["--beam", "2", "--batchsize", "20"]
    out = tmp_path / "scores.json"
    weights = trained / "best.npz"
    shown = call(app.evaluate.main, weights, *test, *text, *options, "--out", out)
    scores = json.loads(out.read_text())
    sources, references = read(prepared / "test.en"), read(prepared / "test.de")
    # In the order in which evaluate.py translates: what is in a batch changes its translations.
    _, source, *_ = app.saved.load_network(weights)
    order = sorted(range(60), key=lambda i: len(source.encode(sources[i])))
    lines = "\n".join(sources[i] for i in order)
    translations = call(app.translate.main, weights, *options, text=lines).splitlines()
    found = [line for _, line in sorted(zip(order, translations, strict=True))]
    wanted = {"network": found, "copy of the source": sources}
    for name, found in wanted.items():
        assert scores[name] == {
            "bleu": BLEU().corpus_score(found, [references]).score,
            "chrf": CHRF().corpus_score(found, [references]).score,
            "exact": sum(map(str.__eq__, found, references)) / 60,
        }
    # The same sentence about another package has the same translation.
    assert scores["nearest neighbor"] == pytest.approx({"bleu": 100, "chrf": 100, "exact": 1})
    assert scores["network"]["chrf"] > scores["copy of the source"]["chrf"]
    assert "nearest neighbor" in shown.splitlines()[-1]
    assert "100.00%" in shown.splitlines()[-1]


def test_error_for_files_that_do_not_fit_each_other(app, error_of, prepared, tmp_path):
    tokens = ["<eos>", "<unk>"]
    sizes = {"n_units": 8, "n_layers": 1, "share_embedding": False}
    about = {"model": "lstm", "sizes": sizes, "subwords": False, "vocabularies": [tokens] * 2}
    chainer.serializers.save_npz(tmp_path / "best.npz", app.saved.create(about))
    (tmp_path / "model.json").write_text(json.dumps(about))
    options = ["--source", prepared / "test.en", "--target", prepared / "train.de"]
    shown = error_of(app.evaluate.main, tmp_path / "best.npz", *options)
    assert shown.startswith("error: the files must be translations line for line, but ")
    assert "has 60 lines" in shown
    shown = error_of(app.evaluate.main, prepared / "best.npz", *options)
    assert shown.startswith(f"error: there is no trained network {prepared}/best.npz: train first")


def test_nearest_neighbors_by_hand(app):
    """Compare with the formula, computed with dictionaries."""
    rng = random.Random(1)
    others = ["".join(rng.choices("abcd ", k=rng.randint(1, 12))) for _ in range(150)]
    sentences = [*others[:70], *("".join(rng.choices("abCD ", k=8)) for _ in range(10)), "xyz"]

    def grams(line: str) -> list[str]:
        line = f" {line.casefold()} "
        return [line[i : i + n] for n in (2, 3, 4) for i in range(len(line) - n + 1)]

    n_with: dict[str, int] = {}
    for other in others:
        for gram in set(grams(other)):
            n_with[gram] = n_with.get(gram, 0) + 1

    def vector(line: str) -> dict[str, float]:
        found = grams(line)
        weights = {
            gram: (1 + np.log(found.count(gram))) * (np.log(151 / (1 + n_with.get(gram, 0))) + 1)
            for gram in set(found)
        }
        length = np.sqrt(sum(w * w for w in weights.values()))
        return {gram: w / length for gram, w in weights.items()}

    vectors = [vector(other) for other in others]
    for sentence, found in zip(sentences, app.neighbors.nearest(sentences, others), strict=True):
        own = vector(sentence)
        similar = [sum(w * v.get(g, 0) for g, w in own.items()) for v in vectors]
        assert similar[found] == pytest.approx(max(similar), abs=1e-5)
