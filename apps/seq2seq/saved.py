"""What is saved of a network: its parameters (NPZ), and beside them ``model.json``."""

import json
from pathlib import Path

import chainer

from chainermn.files import atomic_write
from corpus import Corpus
from models import MODELS, Translator
from subwords import Subwords
from vocabulary import Vocabulary, tokenize


def describe(kind: str, sizes: dict[str, int | bool], corpus: Corpus) -> dict:
    """Return what has to be known to use a network; see `MODELS` for kinds and sizes."""
    return {
        "model": kind,
        "sizes": sizes,
        "subwords": corpus.settings.subwords is not None,
        "vocabularies": [vocabulary.tokens for vocabulary in corpus.vocabularies],
    }


def create(about: dict, dropout: float = 0) -> Translator:
    """Return a new network of this description."""
    source, target = map(len, about["vocabularies"])
    return MODELS[about["model"]](source, target, **about["sizes"], dropout=dropout)


def save_description(out: Path, about: dict, subwords: bytes | None) -> None:
    """Write what has to lie beside the parameters of a network."""
    if subwords is not None:
        (out / "subwords.model").write_bytes(subwords)
    with atomic_write(out / "model.json") as file:
        file.write(json.dumps(about, ensure_ascii=False) + "\n")


def load_network(path: Path) -> tuple[Translator, Vocabulary, Vocabulary]:
    """Return the network whose parameters are in a file, and its vocabularies.

    Raises
    ------
    OSError, ValueError
        If the file, or what has to lie beside it, cannot be used.
    """
    description = path.with_name("model.json")
    about = json.loads(description.read_text(encoding="utf-8"))
    try:
        model = create(about)
        has_subwords = about["subwords"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{description} does not describe a network ({error})") from None
    load_parameters(path, model)
    split = Subwords.read(path.with_name("subwords.model")) if has_subwords else tokenize
    source, target = (Vocabulary(tokens, split) for tokens in about["vocabularies"])
    return model, source, target


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
