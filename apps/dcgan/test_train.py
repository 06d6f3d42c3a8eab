"""Train on a few ranks and check what comes out."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.backends import cuda
from PIL import Image

import chainermn
from chainermn.testing.mpiexec import run_job
from chainermn.testing.traps import set_traps

HERE = Path(__file__).resolve().parent
DISTANCE = "validation/distance"
# Seconds after which ranks count as hung, even on a busy machine.
LIMIT = 600
EPOCHS = 4
TINY = ["--unit", "4", "--batchsize", "180", "--epoch", str(EPOCHS)]


def call(main, *options: object) -> str:
    """Call a script's main on all ranks, wait for them, and return what this rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        main(list(map(str, options)))
    chainermn.create_communicator("naive").mpi_comm.Barrier()
    return shown.getvalue()


def check_refused(main, options: list[object], message: str) -> None:
    """Call a main that ends every rank with one line."""
    comm = chainermn.create_communicator("naive")
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
        main(list(map(str, options)))
    first, *others = comm.allgather_obj(end.value.code)
    assert others == [1] * len(others)
    assert re.match(f"error: .*{message}", first)
    assert first.count("error: ") == 1
    assert "\n" not in first


def read_log(out: Path) -> list[dict[str, float]]:
    return json.loads((out / "log").read_text())


# Training


@pytest.fixture(scope="module")
def trained(app, tmp_path_factory) -> tuple[str, Path]:
    """Train on all ranks; return what this rank prints, and the folder."""
    comm = chainermn.create_communicator("naive")
    out = Path(comm.bcast_obj(tmp_path_factory.mktemp("trained") / "result"))
    shortly = partial(app.evaluation.train_features, steps=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.evaluation, "train_features", shortly)
        return call(app.train.main, *TINY, "--out", out), out


@pytest.mark.each_mpi
@pytest.mark.mpi(2, timeout=LIMIT)
def test_what_is_written(app, trained):
    _, out = trained
    train_images, _ = app.data.load("digits", "", 0)
    files = [path for path in out.rglob("[!.]*") if path.is_file()]
    written = {str(path.relative_to(out)) for path in files}
    log = read_log(out)
    assert [row["epoch"] for row in log] == list(range(1, EPOCHS + 1))
    assert all(row[name] > 0 for row in log for name in ("generator/loss", "discriminator/loss"))
    assert written == {
        *("best.json", "best.npz", "curves.png", "examples.png", "log", "model.npz"),
        *("ranks.png", "run.json"),
        f"features-{app.data.digest(train_images)}.npz",
        *(f"snapshot_iter_{row['iteration']}.0" for row in log[-3:]),
        *(f"pictures/epoch_{n:03d}.png" for n in range(1, EPOCHS + 1)),
    }
    best = json.loads((out / "best.json").read_text())
    assert best["value"] == min(row[DISTANCE] for row in log)
    with Image.open(out / "curves.png") as curves:
        assert curves.format == "PNG"
    assert not np.array_equal(*map(read_picture, sorted(out.glob("pictures/*"))[-2:]))


def read_picture(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_only_rank_0_prints(trained):
    shown, out = trained
    if chainermn.create_communicator("naive").rank > 0:
        assert shown == ""
        return
    first, scale, kind, header, *rows, last, best, files = shown.splitlines()
    assert first == "ranks: 2, hosts: 1, communicator: SingleNodeCommunicator"
    expected = (
        r"distance from 360 validation images: (0\.\d{3}) of training images, (\S+) of noise"
    )
    of_training, of_noise = map(float, re.fullmatch(expected, scale).groups())
    assert of_training < 1 < 20 < of_noise
    assert kind == "1437 images to train on, 360 to compare with: 8x8 pixels, gray"
    assert read_picture(out / "examples.png").shape == (592, 780, 3)
    assert header.split()[:2] == ["epoch", "generator/loss"]
    assert [row.split()[0] for row in rows] == [str(n) for n in range(1, EPOCHS + 1)]
    assert last == f"distance {read_log(out)[-1][DISTANCE]:.3f} after {EPOCHS} epochs"
    assert best.startswith("the best: ")
    names = f"pictures/epoch_{EPOCHS:03d}.png,curves.png,log,best.npz,model.npz"
    assert files == f"pictures, curves, log and generators: {out}/{{{names}}}"


@pytest.mark.mpi(2, timeout=LIMIT)
def test_run_that_goes_on_ends_as_one_never_interrupted(app, trained, shared_tmp_path):
    _, whole = trained
    out = shared_tmp_path / "result"
    # The folder of a job that was killed right after that snapshot.
    iteration = read_log(whole)[EPOCHS - 3]["iteration"]
    snapshot = f"snapshot_iter_{iteration}.0"
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        out.mkdir()
        for name in (snapshot, next(whole.glob("features-*")).name):
            shutil.copy(whole / name, out)
    comm.mpi_comm.Barrier()
    shown = call(app.train.main, *TINY, "--out", out)
    expected = f"resuming after iteration {iteration}, epoch {EPOCHS - 2}, from {out}/{snapshot}"
    assert (expected in shown.splitlines()) == (comm.rank == 0)
    for row, straight in zip(read_log(out), read_log(whole), strict=True):
        for key in ("iteration", "generator/loss", "discriminator/loss", DISTANCE):
            assert row[key] == straight[key]
    with np.load(out / "model.npz") as first, np.load(whole / "model.npz") as second:
        assert sorted(first) == sorted(second)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    last = f"pictures/epoch_{EPOCHS:03d}.png"
    np.testing.assert_array_equal(read_picture(out / last), read_picture(whole / last))


@pytest.mark.mpi(2, timeout=LIMIT)
def test_best_generator_is_evaluated(app, trained):
    """`test_distance_of_all_ranks_is_that_of_one` shows the same of other numbers of ranks."""
    _, out = trained
    comm = chainermn.create_communicator("naive")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    comm.mpi_comm.Barrier()
    shown = call(app.train.main, "--evaluate", "--out", out)
    best = json.loads((out / "best.json").read_text())["value"]
    if comm.rank == 0:
        assert shown.splitlines()[-1] == f"distance {best:.3f} of images by best.npz"
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


@pytest.mark.gpu
@pytest.mark.parametrize("cudnn", ["0", "1"], ids=["", "cuDNN"])
def test_learns_on_a_gpu(cudnn, tmp_path, monkeypatch):
    if not cuda.available:
        pytest.skip("CuPy is not installed, or finds no GPU")
    monkeypatch.setenv("CHAINER_COMPAT_CUDNN", cudnn)
    options = ["--gpu", "--epoch", "8", "--out", tmp_path / "result"]
    run_job(1, [HERE / "train.py", *options], timeout=LIMIT).check()
    assert read_log(tmp_path / "result")[-1][DISTANCE] < 20


@pytest.mark.nightly
def test_two_ranks_learn_to_draw_digits(tmp_path):
    command = [HERE / "train.py", "--epoch", "8", "--out", tmp_path / "result"]
    shown = run_job(2, command, timeout=LIMIT).check().stdout
    of_noise = float(re.search(r"([\d.]+) of noise", shown)[1])
    assert read_log(tmp_path / "result")[-1][DISTANCE] < of_noise / 10


def test_image_files_of_any_kind(app, tmp_path, capsys):
    random = np.random.RandomState(0)
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    for i in range(118):
        colors = random.randint(256, size=(1, 2, 3)).astype(np.uint8)
        Image.fromarray(colors).resize((40, 30)).save(photos / f"{i}.png")
    Image.new("L", (20, 50), 255).save(photos / "more" / "gray.jpg")
    Image.new("RGBA", (20, 50), (255, 0, 0, 255)).save(photos / "more" / "red.gif")
    (photos / "notes.txt").touch()
    (photos / "@eaDir").mkdir()
    shutil.copy(photos / "0.png", photos / "@eaDir")
    (tmp_path / "linked").symlink_to("photos")
    parts = app.data.load("images", tmp_path / "linked", 16)
    shown = capsys.readouterr().out
    assert shown.splitlines()[:3] == [
        f"120 images in {tmp_path}/linked",
        f"left out: 1 file .txt, such as {tmp_path}/linked/notes.txt",
        "left out: 1 file, hidden or a system's",
    ]
    assert "reading images: 100%\n" in shown
    assert [part.shape[1:] for part in parts] == [(3, 16, 16)] * 2
    assert sum(map(len, parts)) == 120
    everything = np.concatenate(parts)
    for color in ([255] * 3, [255, 0, 0]):
        assert sum((image.transpose(1, 2, 0) == color).all() for image in everything) == 1


@pytest.mark.mpi(2, timeout=LIMIT)
def test_training_on_image_files(app, shared_tmp_path, monkeypatch, capfd):
    out, photos = shared_tmp_path / "result", shared_tmp_path / "photos"
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        photos.mkdir()
        for i, color in enumerate(np.random.RandomState(0).randint(256, size=(100, 3))):
            Image.new("RGB", (20, 16), tuple(map(int, color))).save(photos / f"{i}.png")
    comm.mpi_comm.Barrier()
    shortly = partial(app.evaluation.train_features, steps=2)
    monkeypatch.setattr(app.evaluation, "train_features", shortly)
    options = ["--dataset", "images", "--data", str(photos), "--size", "16", "--unit", "4"]
    options += ["--out", str(out)]
    with open(1, "w", closefd=False) as stream:  # pytest's own does not use the descriptor
        monkeypatch.setattr(sys, "stdout", stream)
        print("before")
        app.train.main([*options, "--epoch", "1", "--batchsize", "20", "--quiet"])
        print("after")
    assert capfd.readouterr().out == "before\n"
    assert read_log(out)[-1]["iteration"] == 3
    settings = app.model.load_generator(out / "best.npz").settings
    assert settings.tolist() == [3, 16, 4]
    message = r"best.npz draws images of \(3, 16\) .*, the data has \(1, 8\)"
    check_refused(app.train.main, ["--out", out, "--evaluate"], message)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_input_that_is_wrong_ends_all_ranks_with_one_line(
    app, trained, shared_tmp_path, monkeypatch
):
    monkeypatch.chdir(shared_tmp_path)
    comm = chainermn.create_communicator("naive")
    if comm.rank == 0:
        for name in ("empty", "bombs", "strange"):
            Path(name).mkdir()
        for i in range(100):
            Path(f"bombs/{i:02}.png").write_bytes(b"P6 40000 40000 255\n")
        set_traps(next(trained[1].glob("snapshot_*.0")), "snapshot.0", "trapped")
        set_traps(trained[1] / "best.npz", "strange/best.npz", "trapped")
        features = next(trained[1].glob("features-*"))
        for folder in ("strange", "absent"):
            Path(folder).mkdir(exist_ok=True)
            shutil.copy(features, folder)
    comm.mpi_comm.Barrier()
    for options, message in [
        (["--dataset", "images", "--data", "bombs"], "00.png: .*exceeds limit of 10000"),
        (["--evaluate", "--out", "absent"], "no trained network absent/best.npz: train first"),
        (["--evaluate", "--out", "strange"], r"in strange/best\.npz is a pickle of more than"),
        (["--resume", "snapshot.0"], r"in snapshot\.0 is a pickle of more than None, numbers and"),
        (["--unit", "20"], r"with other settings \(unit: 4, now 20\)"),
        (["--dataset", "images", "--data", "empty"], "at least 100 image files in .*, got 0"),
    ]:
        check_refused(app.train.main, [*TINY, "--out", trained[1], *options], message)
    assert not Path("trapped").exists()


def test_error_for_channels_last_without_what_it_needs(app, monkeypatch, capsys):
    monkeypatch.delenv("CHAINER_COMPAT_CUDNN", raising=False)
    with pytest.raises(SystemExit, match="2"):
        app.train.main(["--channels-last", "--gpu"])
    message = "--channels-last needs --mixed16, CHAINER_COMPAT_CUDNN=1\n"
    assert capsys.readouterr().err.endswith(message)


# The updater


@pytest.mark.mpi(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_are_those_of_one_process_on_all_batches(app, overlap, monkeypatch):
    comm = chainermn.create_communicator("naive")
    n_steps, batchsize = 5, 5
    images = np.random.RandomState(1).randint(256, size=(25 * comm.size, 1, 8, 8)).astype("u1")
    seen = {"latents": [], "real": []}

    def draw(*args):
        seen["latents"].append(draw_latents(*args))
        return seen["latents"][-1]

    @chainer.dataset.converter()
    def convert(batch, device):
        seen["real"].append(to_pixels(batch, device))
        return seen["real"][-1]

    draw_latents, to_pixels = app.updater.draw_latents, app.train.data.to_pixels
    monkeypatch.setattr(app.updater, "draw_latents", draw)
    monkeypatch.setattr(app.train.data, "to_pixels", convert)
    create_optimizer = partial(chainermn.create_multi_node_optimizer, overlap=overlap)
    monkeypatch.setattr(chainermn, "create_multi_node_optimizer", create_optimizer)
    args = SimpleNamespace(unit=4, lr=0.01, seed=0, batchsize=batchsize, epoch=1, mixed16=False)
    args.out = "unused"
    with chainer.using_config("dtype", np.float64):
        np.random.seed(0)
        trainer = app.train.create_trainer(args, comm, chainer.get_device("@numpy"), images)
        np.random.seed(0)
        alone = [
            chainer.optimizers.Adam(alpha=0.01, beta1=0.5).setup(kind(1, 8, 4))
            for kind in (app.model.Generator, app.model.Discriminator)
        ]
        trainer.run()
        latents, real = (
            np.concatenate(comm.allgather_obj(np.stack(seen[name])), axis=1) for name in seen
        )
        assert latents.shape == (n_steps, batchsize * comm.size, app.model.N_LATENT)
        assert len(np.unique(latents)) == latents.size
        for step in range(n_steps):
            take_step(alone, latents[step], real[step], moves=step > 0)
    for name, expected in zip(("generator", "discriminator"), alone, strict=True):
        found = arrays_of(trainer.updater.get_optimizer(name).target)
        wanted = arrays_of(expected.target)
        assert sorted(found) == sorted(wanted)
        for key in wanted:
            np.testing.assert_allclose(found[key], wanted[key], 1e-9, 1e-12, err_msg=name + key)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_mixed_precision(app, tmp_path, monkeypatch):
    args = SimpleNamespace(unit=4, lr=0.01, seed=0, batchsize=5, epoch=1, mixed16=True)
    args.out = "unused"
    comm = chainermn.create_communicator("naive")
    images = np.random.RandomState(1).randint(256, size=(40, 1, 8, 8)).astype(np.uint8)
    shortly = partial(app.evaluation.train_features, steps=2)
    monkeypatch.setattr(app.evaluation, "train_features", shortly)
    expected = app.evaluation.create_reference(images, images, tmp_path / "float32")

    chainer.global_config.dtype = chainer.mixed16
    trainer = app.train.create_trainer(args, comm, chainer.get_device("@numpy"), images)
    networks = [each.target for each in trainer.updater.get_all_optimizers().values()]
    weights = [W for each in networks for name, W in each.namedparams() if name.endswith("/W")]
    before = [W.array.copy() for W in weights]
    for _ in range(2):  # the first one only distributes parameters
        trainer.updater.update()
    for W, earlier in zip(weights, before, strict=True):
        assert W.dtype == np.float16
        assert W.update_rule.state["m"].dtype == np.float32
        assert (W.array != earlier).any()

    generator, discriminator = networks
    before = [W.array.copy() for W in weights]
    if comm.rank == 0:
        discriminator.judge.b.array[:] = np.nan
    with pytest.warns(UserWarning, match="Non finite number found in param.grad"):
        trainer.updater.update()
    for W, earlier in zip(weights, before, strict=True):  # all ranks have skipped the step
        np.testing.assert_array_equal(W.array, earlier)

    latents = np.random.RandomState(2).standard_normal((50, app.model.N_LATENT))
    with chainer.using_config("train", False):
        pixels = generator(latents.astype(np.float16)).array.astype(np.float64)
    found = app.model.generate(generator, latents)
    np.testing.assert_array_equal(found, np.rint((pixels + 1) * 127.5))
    found = app.evaluation.create_reference(images, images, tmp_path / "mixed")
    assert found.distances == expected.distances


def arrays_of(link):
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(link)
    return serializer.target


def take_step(optimizers, latents, real, moves):
    """Compute gradients, and step if ``moves``: a multi-node optimizer first takes no step."""
    generator, discriminator = (optimizer.target for optimizer in optimizers)
    fake = generator(latents)
    share_of_fake = F.sigmoid(discriminator(fake))
    share_of_real = F.sigmoid(discriminator(real))
    losses = [
        -F.average(F.log(share_of_fake)),
        -F.average(F.log(share_of_real)) - F.average(F.log(1 - share_of_fake)),
    ]
    for optimizer, loss in zip(optimizers, losses, strict=True):
        parameters = list(optimizer.target.params())
        gradients = chainer.grad([loss], parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.array
    if moves:
        for optimizer in optimizers:
            optimizer.update()


# The distance


@pytest.mark.mpi(1, 3)
def test_distance_of_all_ranks_is_that_of_one(app):
    comm = chainermn.create_communicator("naive")
    evaluation, device = app.evaluation, chainer.get_device("@numpy")
    np.random.seed(0)
    generator = chainermn.links.create_mnbn_model(app.model.Generator(1, 8, 4), comm)
    network = evaluation.FeatureNetwork(1, 8)
    images = np.random.RandomState(1).randint(256, size=(200, 1, 8, 8)).astype(np.uint8)
    real = network.describe(images)
    reference = evaluation.Reference(network, evaluation.Gaussian.fit(real), {})
    evaluator = evaluation.DistanceEvaluator(comm, generator, reference, device)
    with chainer.reporter.Reporter().scope(observation := {}):
        found = evaluator(None)
    if comm.rank > 0:
        assert (found, observation) == (None, {})
        return
    latents = np.random.RandomState(0).standard_normal((1000, 100)).astype(np.float32)
    drawn = network.describe(app.model.generate(generator, latents))
    covariances = np.cov(drawn.T), np.cov(real.T)
    # The trace of a matrix's square root is the sum of the square roots of its eigenvalues.
    shared = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).astype(complex)).real
    of_means = np.sum((drawn.mean(0) - real.mean(0)) ** 2)
    expected = of_means + np.trace(covariances[0] + covariances[1]) - 2 * shared.sum()
    assert found == observation[DISTANCE] == pytest.approx(expected, rel=1e-5)


def test_distance_of_known_distributions(app):
    gaussian, distance = app.evaluation.Gaussian, app.evaluation.frechet_distance
    # Dimension by dimension: (mean - mean)**2 + (deviation - deviation)**2.
    p = gaussian(np.array([1.0, 0.0, 2.0]), np.diag([4.0, 0.0, 9.0]))
    q = gaussian(np.array([3.0, 0.0, 1.0]), np.diag([1.0, 0.25, 0.0]))
    turn = np.linalg.qr(np.random.RandomState(0).standard_normal((3, 3)))[0]
    turned = [gaussian(turn @ one.mean, turn @ one.covariance @ turn.T) for one in (p, q)]
    assert distance(p, q) == pytest.approx(4 + 1 + 0.25 + 1 + 9)
    assert distance(*turned) == pytest.approx(distance(q, p))
    assert distance(p, p) == pytest.approx(0, abs=1e-12)


def test_features_are_kept_and_known_by_their_images(app, tmp_path, monkeypatch):
    random = np.random.RandomState(0)
    images = random.randint(256, size=(2, 30, 1, 8, 8)).astype(np.uint8)
    shortly = partial(app.evaluation.train_features, steps=2)
    monkeypatch.setattr(app.evaluation, "train_features", shortly)
    first = app.evaluation.load_features(tmp_path, images[0])
    monkeypatch.setattr(app.evaluation, "train_features", None)  # is not called again
    again = app.evaluation.load_features(tmp_path, images[0])
    np.testing.assert_array_equal(first.describe(images[1]), again.describe(images[1]))
    with pytest.raises(TypeError):
        app.evaluation.load_features(tmp_path, images[1])
    (path,) = tmp_path.iterdir()
    strange = tmp_path / "strange"
    set_traps(path, strange, tmp_path / "trapped")
    strange.replace(path)
    with pytest.raises(ValueError, match=r"cannot be used \(.* is a pickle of more than None"):
        app.evaluation.load_features(tmp_path, images[0])
    assert not (tmp_path / "trapped").exists()
    path.write_bytes(b"?")
    with pytest.raises(ValueError, match=f"{path.name} cannot be used"):
        app.evaluation.load_features(tmp_path, images[0])


# Networks and pictures


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 32), (3, 64), (1, 9)])
def test_networks_of_any_size(app, channels, size):
    generator = app.model.Generator(channels, size, 2)
    images = app.model.generate(generator, app.model.draw_latents(3))
    assert (images.shape, images.dtype) == ((3, channels, size, size), np.uint8)
    pixels = app.data.to_pixels(images, chainer.get_device("@numpy"))
    assert np.abs(pixels).max() <= 1
    with chainer.using_config("train", False):
        assert app.model.Discriminator(channels, size, 2)(pixels).shape == (3, 1)


@pytest.mark.mpi(2, timeout=LIMIT)
def test_pictures_of_a_trained_generator(app, trained, tmp_path, capsys):
    _, out = trained
    found = []
    for name, options in (("a", []), ("b", []), ("c", ["--seed", "1"])):
        options = ["--number", "7", "--picture", str(tmp_path / f"{name}.png"), *options]
        app.generate.main([str(out / "best.npz"), *options])
        found.append(read_picture(tmp_path / f"{name}.png"))
    assert capsys.readouterr().out.count("picture: ") == 3
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])

    for wrong, message in [
        ([out / "log"], "log is not an NPZ file"),
        (["absent/best.npz"], "there is no trained network absent/best.npz: train first"),
        ([out / "best.npz", "--picture", "absent/a.png"], "file or directory: 'absent/a.png'"),
    ]:
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            app.generate.main(list(map(str, wrong)))

    strange = tmp_path / "strange.npz"
    set_traps(out / "best.npz", strange, tmp_path / "trapped")
    with pytest.raises(SystemExit, match=r"^error: .* in .*strange\.npz is a pickle of more"):
        app.generate.main([str(strange)])
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("kind", ["many units", "objects"])
def test_file_that_asks_for_a_network_it_does_not_hold(app, kind, monkeypatch, tmp_path):
    path = tmp_path / "best.npz"
    generator = app.model.Generator(1, 8, 4)
    if kind == "many units":
        generator.settings[2] = 10**9  # would fill any memory
    chainer.serializers.save_npz(path, generator)
    if kind == "objects":  # their header can promise any shape
        with np.load(path) as arrays:
            found = dict(arrays)
        found["project/W"] = found["project/W"].astype(object)
        np.savez(path, **found)
    monkeypatch.setattr(app.model, "Generator", pytest.fail)
    message = r"best\.npz is not a generator \(its weights are not those of settings"
    with pytest.raises(ValueError, match=message):
        app.model.load_generator(path)


@pytest.mark.parametrize("channels", [1, 3])
def test_grid(app, channels, tmp_path):
    images = np.random.RandomState(0).randint(1, 256, size=(4, channels, 150, 150)).astype("u1")
    app.reports.save_grid(images, tmp_path / "grid.png")
    pixels = read_picture(tmp_path / "grid.png").reshape(309, -1, channels)
    # Three side by side, nine pixels apart, and the fourth below the first.
    assert pixels.shape == (309, 468, channels)
    for image, (row, column) in zip(images, [(0, 0), (0, 1), (0, 2), (1, 0)], strict=True):
        found = pixels[159 * row :, 159 * column :][:150, :150]
        np.testing.assert_array_equal(found, image.transpose(1, 2, 0))
    assert not pixels[159:, 159:].any()


# Data


def test_digits_are_those_of_scikit_learn(app):
    from sklearn.datasets import load_digits  # takes a second, which every rank would wait for

    order = np.random.RandomState(0).permutation(1797)
    found = np.concatenate(app.data.load("digits", None, 0))
    np.testing.assert_array_equal(found[:, 0], np.rint(load_digits().images[order] * 255 / 16))


def test_digits_are_split_always_alike(app):
    parts, again = (app.data.load("digits", None, 0) for _ in range(2))
    assert [part.shape for part in parts] == [(1437, 1, 8, 8), (360, 1, 8, 8)]
    for part, same in zip(parts, again, strict=True):
        assert (part.dtype, part.min(), part.max()) == (np.uint8, 0, 255)
        np.testing.assert_array_equal(part, same)
        assert app.data.digest(part) == app.data.digest(same)
    assert app.data.digest(parts[0]) != app.data.digest(parts[1])


def idx(images: np.ndarray) -> bytes:
    shape = b"".join(length.to_bytes(4, "big") for length in images.shape)
    return b"\0\0\x08\x03" + shape + images.tobytes()


def test_mnist_from_idx_files(app, tmp_path):
    images = np.random.RandomState(0).randint(256, size=(5, 28, 28)).astype(np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[:2])))
    train_images, validation = app.data.load("mnist", tmp_path, 0)
    np.testing.assert_array_equal(train_images, images[:, None])
    np.testing.assert_array_equal(validation, images[:2, None])
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images[:, :9]))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(idx(images[:, :9]))
    with pytest.raises(ValueError, match=f"{tmp_path}: expected square images, got 9x28 pixels"):
        app.data.load("mnist", tmp_path, 0)


def test_error_for_a_file_that_is_no_image(app, tmp_path):
    for i in range(100):
        (tmp_path / f"{i:02d}.png").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"00.png: expected a picture in one of"):
        app.data.load("images", tmp_path, 32)


@pytest.mark.parametrize("kind", ["claims much", "pipe", "other format"])
def test_images_that_may_do_harm(app, kind, tmp_path):
    path = tmp_path / "a.png"
    for i in range(100):  # there must be that many
        (tmp_path / f"b{i}.png").touch()
    if kind == "pipe":
        os.mkfifo(path)
        message = "expected a regular file, got a pipe or a device"
    elif kind == "other format":
        Image.new("RGB", (9, 9)).save(path, "EPS")
        message = "expected a picture in one of"
    else:
        path.write_bytes(b"P6 40000 40000 255\n")
        message = r"DecompressionBombError: Image size \(1600000000 pixels\) exceeds limit of 100"
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        app.data.load("images", tmp_path, 32)


@pytest.mark.parametrize(
    ("dataset", "directory", "message"),
    [
        ("digits", ".", "--dataset digits takes no folder; got --data ."),
        ("mnist", None, "--dataset mnist needs a folder; got --data None"),
    ],
)
def test_error_for_options_that_do_not_fit(app, dataset, directory, message):
    with pytest.raises(ValueError, match=message):
        app.data.load(dataset, directory, 32)


def test_readme_shows_lines_of_the_script():
    (shown,) = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    assert shown in (HERE / "train.py").read_text()
