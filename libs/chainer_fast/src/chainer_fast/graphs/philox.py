"""The CUDA source of Philox4x32-10, which makes random numbers by counting.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

#: ``chainer_fast_philox(seed, step, call, index, words)`` writes four random words: functions
#: of a seed, of the number of a step and of a call in it, and of an index.
PHILOX = """
typedef unsigned int chainer_fast_word;
typedef unsigned long long chainer_fast_words;
__device__ void chainer_fast_philox(chainer_fast_words seed, chainer_fast_words step,
        chainer_fast_word call, chainer_fast_word index, chainer_fast_word* words) {
    chainer_fast_word keys[2] = {(chainer_fast_word)seed, (chainer_fast_word)(seed >> 32)};
    chainer_fast_word c[4] = {index, call, (chainer_fast_word)step,
                              (chainer_fast_word)(step >> 32)};
    for (int round = 0; round < 10; ++round) {
        const chainer_fast_words first = 0xD2511F53ull * c[0], second = 0xCD9E8D57ull * c[2];
        c[0] = (chainer_fast_word)(second >> 32) ^ c[1] ^ keys[0];
        c[1] = (chainer_fast_word)second;
        c[2] = (chainer_fast_word)(first >> 32) ^ c[3] ^ keys[1];
        c[3] = (chainer_fast_word)first;
        keys[0] += 0x9E3779B9u;
        keys[1] += 0xBB67AE85u;
    }
    for (int k = 0; k < 4; ++k) words[k] = c[k];
}
"""
