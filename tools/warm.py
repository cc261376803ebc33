"""Compile all kernels into their cache: part of the set-up, once for a minute. The planner's are
called; those that resize pictures are compiled when they are imported.

Run it wherever the package is installed (an image build, say), and no service start pays.
"""

import dataservice.decode.resample  # noqa: F401
from dataservice.planning.warm import warm_up

if __name__ == "__main__":
    warm_up()
