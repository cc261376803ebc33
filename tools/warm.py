"""Compile the planner's kernels into their cache: part of the set-up, once for a minute.

Run it wherever the package is installed (an image build, say), and no service start pays.
"""

from dataservice.planning.warm import warm_up

if __name__ == "__main__":
    warm_up()
