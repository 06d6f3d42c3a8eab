"""Evaluation on images that the network was not trained with."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import chainer
import chainer.functions as F
import numpy as np
from chainer.training import Extension, extensions

import chainermn
from chainermn.datasets.names import shown


class TopKEvaluator(extensions.Evaluator):
    """Reports the loss, and top-1 and top-5 accuracy.

    All are means over images, also under
    ``create_multi_node_evaluator(..., mean_over="examples")``.

    Parameters
    ----------
    iterator : chainer.dataset.Iterator
        Iterator that yields each image of this rank once.
    target : training.Classifier
    n_classes : int
    converter, device
        As for Chainer's evaluator.

    Attributes
    ----------
    confusion : array of int64
        Array of shape (classes, classes): how many images of this rank that show one class (row)
        were taken for another (column), in the latest evaluation.
    """

    def __init__(
        self,
        iterator: chainer.dataset.Iterator,
        target: chainer.Link,
        n_classes: int,
        converter: object,
        device: chainer.backend.Device,
    ) -> None:
        super().__init__(iterator, target, converter, device, eval_func=self.judge)
        self.confusion = np.zeros((n_classes, n_classes), np.int64)

    def evaluate(self) -> dict[str, float]:
        """Evaluate all images of the iterator."""
        self.confusion[:] = 0
        return super().evaluate()

    def judge(self, x: np.ndarray, t: np.ndarray) -> None:
        """Report a batch, which is empty if none of its images can be read."""
        if len(t) == 0:
            return
        classifier = self.get_target("main")
        scores = classifier.predictor(x)
        loss = F.softmax_cross_entropy(F.cast(scores, np.float32), t)
        t = chainer.get_device("@numpy").send(t)
        order = np.argsort(-chainer.get_device("@numpy").send(scores.array), axis=1)
        right = order[:, :5] == t[:, None]
        np.add.at(self.confusion, (t, order[:, 0]), 1)
        means = {
            "loss": float(loss.array),
            "accuracy": float(right[:, 0].mean()),
            "top5": float(right.any(axis=1).mean()),
        }
        # Weighted, because a batch may lack images that cannot be read.
        chainer.report({key: (mean, len(t)) for key, mean in means.items()}, classifier)


class ConfusionPicture(Extension):
    """Draws the confusion matrix of all ranks after each evaluation, on rank 0.

    Parameters
    ----------
    comm : CommunicatorBase
    evaluator : TopKEvaluator
        Evaluator of this rank.
    names : sequence of str
        Names of the classes.
    """

    def __init__(
        self, comm: chainermn.CommunicatorBase, evaluator: TopKEvaluator, names: Sequence[str]
    ) -> None:
        self.comm, self.evaluator, self.names = comm, evaluator, names

    def __call__(self, trainer: chainer.training.Trainer) -> None:
        """Draw. Collective."""
        confusion = self.comm.allreduce_obj(self.evaluator.confusion)
        if self.comm.rank == 0:
            draw_confusion(confusion, self.names, Path(trainer.out, "confusion.png"))


def draw_confusion(confusion: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Write a picture of a confusion matrix.

    Parameters
    ----------
    confusion : array of int
        Rows are the classes shown, columns the classes predicted.
    names : sequence of str
    path : path
        PNG file to write.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")
    few = len(names) <= 30
    side = 2 + 0.45 * len(names) if few else 9
    figure = Figure(figsize=(side + 1, side), layout="constrained", dpi=120 if few else 200)
    axes = figure.add_subplot()
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("seen")
    axes.set_ylabel("shown")
    if few:
        titles = [shown(name)[:40] for name in names]
        axes.set_xticks(range(len(names)), titles, rotation=90, parse_math=False)
        axes.set_yticks(range(len(names)), titles, parse_math=False)
        for (row, column), count in np.ndenumerate(confusion):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, count, ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(picture, shrink=0.7, label="share of the images shown")
    with warnings.catch_warnings():
        # Its font has no letters of some languages; the picture is useful without them.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(path)
