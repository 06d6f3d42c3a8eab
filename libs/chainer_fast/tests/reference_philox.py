"""Philox4x32-10 as the paper defines it, in Python's integers, and the masks of dropout."""

import numpy as np

WORD = 2**32


def philox(counter, key):
    """Return four random words."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            second // WORD ^ b ^ low,
            second % WORD,
            first // WORD ^ d ^ high,
            first % WORD,
        )
        low, high = (low + 0x9E3779B9) % WORD, (high + 0xBB67AE85) % WORD
    return [a, b, c, d]


def kept(size, ratio, seed, step, call):
    """Return which elements of an array dropout keeps."""
    quarter = -(-size // 4)
    key = seed % WORD, seed // WORD
    words = [philox([i, call, step % WORD, step // WORD], key) for i in range(quarter)]
    return (np.array(words, np.uint32).T.ravel()[:size] >> 8) / 2**24 >= np.float32(ratio)
