"""Commands of ``kvsim``, one a file; heavy imports happen inside them."""
