"""Tokens: how lines are divided into them, and their numbers."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

EOS, UNK = 0, 1  # the first two entries of every vocabulary
PADDING = -1  # after the end of a sentence that is shorter than others in its batch

SPACE = "\u2581"  # before a token: there was a space, or it is the first of its line
# Words, single digits, and other single characters.
TOKEN = re.compile(r"(\s*)([^\W\d_]+|\S)")


def tokenize(line: str) -> list[str]:
    """Divide a line into tokens, from which `detokenize` restores it.

    Examples
    --------
    >>> tokenize("May 12, 1984")
    ['▁May', '▁1', '2', ',', '▁1', '9', '8', '4']
    """
    tokens = [(SPACE if space else "") + token for space, token in TOKEN.findall(line)]
    return [SPACE + tokens[0].removeprefix(SPACE), *tokens[1:]] if tokens else []


def detokenize(tokens: Sequence[str]) -> str:
    """Return the line that was divided, except for the kind and number of its spaces."""
    return "".join(tokens).replace(SPACE, " ").strip()


class Vocabulary:
    """Tokens and their numbers.

    Parameters
    ----------
    tokens : sequence of str
        Tokens; the first two stand for the end of a sentence and for all tokens not in the
        vocabulary.
    split : callable
        Function that divides a line into tokens, from which `detokenize` restores it.
    """

    SPECIAL = ("<eos>", "<unk>")  # numbers EOS and UNK; no line has tokens like these

    def __init__(
        self, tokens: Sequence[str], split: Callable[[str], list[str]] = tokenize
    ) -> None:
        self.tokens, self.split = tuple(tokens), split
        self._numbers = {token: number for number, token in enumerate(tokens)}
        if self.tokens[EOS : UNK + 1] != self.SPECIAL:
            begin = ", ".join(self.SPECIAL)
            raise ValueError(f"expected a vocabulary that begins with {begin}, got {tokens[:2]}")

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, line: str) -> np.ndarray:
        """Return the numbers of a line's tokens, int32."""
        return np.array([self._numbers.get(token, UNK) for token in self.split(line)], np.int32)

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the line of such numbers."""
        return detokenize([self.tokens[number] for number in numbers])


def most_frequent(counts: Counter[str], min_count: int, max_size: int) -> list[str]:
    """Return up to ``max_size`` tokens of a vocabulary, each found at least ``min_count`` times.

    Tokens that are equally frequent come in alphabetical order.
    """
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    kept = [token for token in frequent if counts[token] >= min_count]
    return [*Vocabulary.SPECIAL, *kept][:max_size]
