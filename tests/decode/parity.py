"""How much more than in CI the long tests compare with transformers: `make parity` sets it."""

import os

FACTOR = int(os.environ.get("PARITY_FACTOR", "1"))
