"""The networks, by their names for ``--model``; see `Translator` for how to use them."""

from models.lstm import LSTM
from models.transformer import Transformer
from models.translator import Translator, count_tokens

MODELS: dict[str, type[Translator]] = {"lstm": LSTM, "transformer": Transformer}

__all__ = ["MODELS", "Translator", "count_tokens"]
