"""What people see before a training: a table of at most so many lines, and a page of examples."""

import numpy as np
import pytest
from PIL import Image

from chainermn.datasets.overview import choose_examples, class_table, draw_examples, show_classes


def test_many_classes_are_the_largest_and_the_smallest():
    sizes = [7, 7, 1, 9, 8, 2, 3]
    table = class_table([f"n{i}" for i in range(7)], {"train": sizes, "validate": [1] * 7}, most=6)
    assert table == [
        "class      train  validate",
        "    3 n3       9         1",
        "    4 n4       8         1",
        "  ... 3 classes of a size between these",
        "    5 n5       2         1",
        "    2 n2       1         1",
    ]


def test_names_that_nobody_could_read_are_quoted_and_cut():
    _, first, second = class_table(["a\u2028b", "x" * 50], {"train": [1, 2]}, most=11)
    assert first == rf"    0 'a\u2028b'{' ' * 30}       1"
    assert second == f"    1 {'x' * 37}...       2"


@pytest.mark.parametrize("names", [[], list("abcdefghij")])
def test_up_to_ten_classes_are_shown_in_their_order(names, tmp_path, capsys):
    labels = list(range(len(names)))
    show_classes(tmp_path, names, {"train": labels}, lambda i: np.eye(8))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["class", "train"]
    assert [line.split() for line in lines[1:]] == [
        [str(i), name, "1"] for i, name in enumerate(names)
    ]
    assert (tmp_path / "examples.png").exists()


@pytest.mark.parametrize(
    ("labels", "n", "found"),
    [
        ([5, 5, 5, 5, 5], 3, [0, 1, 3]),
        ([1, 0, 1, 0], 4, [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4, 0], 3, [0, 2, 4]),
        ([0, 0, 0, 0, 1], 4, [0, 1, 2, 4]),
        ([], 4, []),
    ],
)
def test_examples_are_of_all_classes(labels, n, found):
    assert choose_examples(labels, n).tolist() == found


def test_a_page_of_examples(tmp_path):
    pictures = [
        np.full((8, 8), 0.5),
        np.zeros((4, 6, 3), np.uint8),
        np.full((8, 8), 255, np.uint8),
    ]
    draw_examples(tmp_path / "examples.png", pictures, ["$a_", "'b\\udce9'", "\u732b"])
    with Image.open(tmp_path / "examples.png") as image:
        width, height = image.size
    assert (width, height) == (780, 148)
