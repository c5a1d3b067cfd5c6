"""Fixed-reduction-order kernels for tokenspeed: every one of them batch invariant."""
