"""Nearest neighbors among sentences, by their characters."""

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from chainermn.progress import Progress

N_COLUMNS = 2**20  # of hashes of n-grams
LENGTHS = (2, 3, 4)
BLOCK = 64  # sentences compared with all others at a time


def nearest(sentences: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return the most similar of the others for each sentence, with a progress bar.

    Similarity is the cosine of the counts of character n-grams, weighted by tf-idf, without regard
    to case. Of equally similar ones, the first is returned.

    Parameters
    ----------
    sentences, others : sequence of str

    Returns
    -------
    array of int64, shape (sentences,)
        Indices into ``others``.
    """
    counts, counts_of_others = _count_ngrams(sentences), _count_ngrams(others)
    n_with = np.bincount(counts_of_others.indices, minlength=N_COLUMNS)
    weights = np.log((1 + len(others)) / (1 + n_with)) + 1
    vectors, columns = _weigh(counts, weights), _weigh(counts_of_others, weights).T.tocsr()
    bar = Progress(len(sentences), "nearest neighbors")
    found = np.zeros(len(sentences), np.int64)
    for at in range(0, len(sentences), BLOCK):
        similar = (vectors[at : at + BLOCK] @ columns).toarray()
        found[at : at + BLOCK] = similar.argmax(axis=1)
        bar.step(len(similar))
    return found


def _count_ngrams(sentences: Sequence[str]) -> sparse.csr_matrix:
    """Count n-grams, a row per sentence, a column per hash."""
    text = "".join(f"\n {sentence.casefold()} " for sentence in sentences) + "\n"
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    n_breaks = np.concatenate([[0], (codes == ord("\n")).cumsum()])
    rows, columns = [], []
    for length in LENGTHS:
        last = len(codes) - length + 1
        hashes = np.full(last, length, np.uint64)
        for i in range(length):
            hashes = (hashes + codes[i : last + i]) * np.uint64(0x9E3779B97F4A7C15)
        inside = n_breaks[:last] == n_breaks[length : last + length]
        rows.append(n_breaks[:last][inside] - 1)
        columns.append((hashes >> np.uint64(44))[inside])  # the upper bits are mixed best
    places = np.concatenate(rows), np.concatenate(columns)
    ones = np.ones(len(places[0]), np.float32)
    return sparse.coo_matrix((ones, places), (len(sentences), N_COLUMNS)).tocsr()


def _weigh(counts: sparse.csr_matrix, weights: np.ndarray) -> sparse.csr_matrix:
    vectors = counts.copy()
    vectors.data = ((1 + np.log(counts.data)) * weights[counts.indices]).astype(np.float32)
    lengths = np.sqrt(vectors.multiply(vectors).sum(axis=1)).A1
    return sparse.diags(1 / np.maximum(lengths, 1e-9)).astype(np.float32) @ vectors
