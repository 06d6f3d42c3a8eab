"""Subwords, by sentencepiece (Kudo and Richardson, 2018)."""

import contextlib
import importlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from chainermn.files import read_bytes

MOST_BYTES = 1 << 26  # of a model; of 8000 subwords it has 0.4 million


class Subwords:
    """Divides lines into subwords, which `vocabulary.detokenize` puts together again.

    Parameters
    ----------
    model : bytes
        Model from `train_subwords`.

    Raises
    ------
    ModuleNotFoundError
        If sentencepiece is not installed.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = _sentencepiece().SentencePieceProcessor(model_proto=model)

    @classmethod
    def read(cls, path: Path) -> "Subwords":
        """Read a model from a file.

        Raises
        ------
        OSError, ModuleNotFoundError
        ValueError
            If the file is something else.
        """
        model = read_bytes(path, MOST_BYTES)
        with contextlib.suppress(RuntimeError):
            if model:  # sentencepiece takes an empty one for none at all
                return cls(model)
        raise ValueError(f"{path} is not a model of subwords, as prepare.py makes")

    def __call__(self, line: str) -> list[str]:
        """Return the subwords of a line."""
        return self._processor.encode(line, out_type=str)

    def __reduce__(self) -> tuple[type, tuple[bytes]]:
        return Subwords, (self.model,)


def train_subwords(lines: Iterable[str], kind: str, size: int) -> bytes:
    """Return a model of the subwords of lines.

    Parameters
    ----------
    lines : iterable of str
    kind : {'unigram', 'bpe'}
    size : int
        Largest size of the vocabulary. Each digit is a separate subword.

    Raises
    ------
    ModuleNotFoundError
        If sentencepiece is not installed.
    ValueError
        If there is too little text for this number of subwords, or too much. What the lines
        raise is raised as well.
    """
    model = io.BytesIO()
    fault: Exception | None = None

    def watched() -> Iterator[str]:
        nonlocal fault
        try:
            yield from lines
        except Exception as error:
            fault = error
            raise

    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=watched(),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            hard_vocab_limit=kind != "unigram",  # only there fewer may be enough
            character_coverage=0.9999,
            normalization_rule_name="identity",  # or translations would differ from references
            split_digits=True,
            input_sentence_size=2_000_000,
            shuffle_input_sentence=True,
            bos_id=-1,
            eos_id=-1,
            num_threads=1,  # the same model each time
            minloglevel=2,
        )
    except RuntimeError as error:
        if fault is not None:  # sentencepiece makes one of its own of it
            raise fault from None
        raise ValueError(f"sentencepiece: {str(error).strip()}") from None
    return model.getvalue()


def _sentencepiece() -> Any:
    try:
        return importlib.import_module("sentencepiece")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "subwords need sentencepiece: pip install sentencepiece"
        ) from None
