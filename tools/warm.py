"""Compile all kernels into their cache: part of the set-up, once for a minute and a half. The
planner's and the layouts' are called; those that resize pictures, round sound, look samples up and
shuffle them, and write fields of messages are compiled when they are imported.

Run it wherever the package is installed (an image build, say), and no service start pays, and no
first layout.
"""

import dataservice.decode.audio
import dataservice.decode.resample
import dataservice.engine.cut_fields
import dataservice.sources.gather
import dataservice.sources.shuffle  # noqa: F401
from dataservice.planning.layout.warm import warm_layouts
from dataservice.planning.warm import warm_up

if __name__ == "__main__":
    warm_up()
    warm_layouts()
