"""Compile all kernels into their cache, which takes a minute and a half: `python -m
dataservice.warm`, once wherever the package is installed. No service start pays then, and no first
layout.
"""

import dataservice.decode.audio
import dataservice.decode.resample
import dataservice.engine.cut_fields
import dataservice.sources.gather
import dataservice.sources.length_records
import dataservice.sources.lengths_file
import dataservice.sources.shuffle  # noqa: F401
from dataservice.core.kernels import load_kernels
from dataservice.planning.layout.warm import warm_layouts
from dataservice.planning.warm import warm_up

if __name__ == "__main__":
    load_kernels()
    warm_up()
    warm_layouts()
