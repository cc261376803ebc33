"""The keys of a job that `dataservice layout` wrote, read without the planners of layouts."""

from pathlib import Path
from typing import Any

from dataservice.core.errors import SpecError
from dataservice.core.quoting import quoted
from dataservice.jobs.yaml_file import read_text, written

LAYOUT_FORMAT = 1


def read_layout_keys(path: Path) -> dict[str, dict[str, Any]]:
    """`topology` and `plan` of a layout file, as a job file has them. Raises SpecError."""
    what = f"layout file {path}"
    plain = written(read_text(path, "layout file"), what).plain
    if (given := plain.get("format")) != LAYOUT_FORMAT:
        raise SpecError(
            f"the {what} has format {quoted(given)}; this release reads {LAYOUT_FORMAT}. Write it "
            "again with `dataservice layout`."
        )
    job = plain.get("job")
    if job is None and "own_gpus" in plain:
        raise SpecError(
            f"the {what} gives each module GPUs of its own, and a job's ranks are replicas of one "
            "shape: leave `layout` out, and set `topology` to the decoder's."
        )
    keys = ("topology", "plan")
    if not (isinstance(job, dict) and all(isinstance(job.get(key), dict) for key in keys)):
        raise SpecError(
            f"the {what} has no `job` with `topology` and `plan`. Write it again with `dataservice "
            "layout`."
        )
    return {key: job[key] for key in keys}
