"""Save and load networks: their parameters (NPZ), and ``model.json`` beside them."""

import json
import math
from pathlib import Path

import chainer

from chainer_compat.npz import open_npz
from chainermn.datasets.texts import Form
from chainermn.files import atomic_write, check_form, check_trained, read_json
from corpus import Corpus
from models import MODELS, Translator
from subwords import Subwords
from vocabulary import Vocabulary, tokenize

# Form of the description; that of the sizes is the network's.
ABOUT = {"model": set(MODELS), "sizes": dict, "subwords": bool, "vocabularies": ([str], [str])}
MOST_WEIGHTS = 10**9


def describe(kind: str, sizes: dict[str, int | bool], corpus: Corpus) -> dict:
    """Describe a network for its users; see `MODELS` for kinds and sizes."""
    return {
        "model": kind,
        "sizes": sizes,
        "subwords": corpus.settings.subwords is not None,
        "normalization": corpus.settings.normalization,
        "vocabularies": [vocabulary.tokens for vocabulary in corpus.vocabularies],
    }


def create(about: dict, dropout: float = 0) -> Translator:
    """Return a new network of this description."""
    source, target = map(len, about["vocabularies"])
    return MODELS[about["model"]](source, target, **about["sizes"], dropout=dropout)


def save_description(out: Path, about: dict, subwords: bytes | None) -> None:
    """Write the files that belong beside the parameters of a network."""
    if subwords is not None:
        (out / "subwords.model").write_bytes(subwords)
    with atomic_write(out / "model.json") as file:
        file.write(json.dumps(about, ensure_ascii=False) + "\n")


def load_network(path: Path) -> tuple[Translator, Vocabulary, Vocabulary, Form]:
    """Return the network whose parameters are in a file, its vocabularies, and its normal form.

    Raises
    ------
    OSError, ValueError
        If the file, or what has to lie beside it, cannot be used.
    """
    check_trained(path, __file__, "model.json")
    description = path.with_name("model.json")
    about = read_description(description)
    split = Subwords.read(path.with_name("subwords.model")) if about["subwords"] else tokenize
    try:
        source, target = (Vocabulary(tokens, split) for tokens in about["vocabularies"])
    except ValueError as error:
        raise ValueError(f"{description}: {error}") from None
    _check_size(path, about)
    model = create(about)
    load_parameters(path, model)
    return model, source, target, about["normalization"]


def read_description(path: Path) -> dict:
    """Return a description that `describe` made.

    Raises
    ------
    OSError, ValueError
        If the file is something else, or describes a network with too many weights to create.
    """
    about = read_json(path, ABOUT, most=1 << 28)
    if about.setdefault("normalization", None):  # older networks know text as it was
        check_form(about, {"normalization": {"NFC"}}, str(path))
    form = MODELS[about["model"]].SIZES
    check_form(about["sizes"], form, str(path), "sizes")
    sizes = about["sizes"] = {name: about["sizes"][name] for name in form}
    source, target = about["vocabularies"]
    if sizes["share_embedding"] and source != target:
        raise ValueError(f"{path}: expected one vocabulary for a shared embedding, got two")
    n_weights = _count_weights(about)
    if n_weights > MOST_WEIGHTS:
        expected = f"at most saved.MOST_WEIGHTS = {MOST_WEIGHTS}"
        raise ValueError(f"{path}: expected {expected}, got {n_weights}")
    return about


def normal_form(path: Path) -> Form:
    """Return the normal form of the text that a network knows, by the description beside it."""
    beside = path.with_name("model.json")
    return read_description(beside)["normalization"] if beside.exists() else "NFC"


def _count_weights(about: dict) -> int:
    """Return the number of weights in the matrices of a network; vectors have few."""
    sizes, (source, target) = about["sizes"], about["vocabularies"]
    n_units, n_layers = sizes["n_units"], sizes["n_layers"]
    matrices = MODELS[about["model"]].count_matrices(n_layers)
    tokens = len(source) + (0 if sizes["share_embedding"] else 2 * len(target))
    return n_units * (matrices * n_units + tokens)


def _check_size(path: Path, about: dict) -> None:
    """Check that a file has a network's weights before memory is allocated for them."""
    with open_npz(path) as saved:
        headers = {name: saved.header(name) for name in saved}
        found = sum(
            # An array of objects can promise any shape.
            saved[name].size if header.dtype.hasobject else math.prod(header.shape)
            for name, header in headers.items()
        )
    expected = _count_weights(about)
    if found < expected:
        raise ValueError(
            f"{path} has {found} weights, the network of model.json {expected} or more"
        )


def load_again(path: Path, model: Translator, about: dict) -> None:
    """Load the parameters of a network that was trained with these vocabularies.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or does not fit.
    """
    check_trained(path, __file__)
    beside = path.with_name("model.json")
    vocabularies = list(map(list, about["vocabularies"]))
    if beside.exists() and read_description(beside)["vocabularies"] != vocabularies:
        raise ValueError(
            f"{path} was trained on other text, or with other options: its vocabularies differ. "
            "translate.py and evaluate.py use its own"
        )
    load_parameters(path, model)


def load_parameters(path: Path, model: Translator) -> None:
    """Load the parameters of a network.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or does not fit.
    """
    try:
        chainer.serializers.load_npz(path, model)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not hold the parameters of this network: was it trained with other "
            f"options, or on other text? ({error})"
        ) from None
