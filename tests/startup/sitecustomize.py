"""Python of all processes that tests launch: a fifth of the time that their imports take goes to the garbage collector."""

import gc

gc.set_threshold(100_000, 20, 20)
