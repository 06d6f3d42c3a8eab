"""The exchange of gradients while backward still computes others."""
