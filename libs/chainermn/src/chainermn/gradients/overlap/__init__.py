"""The exchange of gradients beside backward, which still computes others."""
