"""What a worker itself reads of a job, in the form of `sample_pipeline.worker_pipeline`, without
the libraries that decode: only its processes load those."""

import contextlib
import json
from collections.abc import Iterator

from dataservice.core.errors import SpecError
from dataservice.sources.filesystem import is_far


def code_owner(worker_pipeline: str) -> str | None:
    """The team whose own code the pipeline runs, "" where there are no teams; None where it runs
    none."""
    with understood():
        owner: str | None = json.loads(worker_pipeline).get("code_of")
        return owner


def far_sources(worker_pipeline: str) -> frozenset[str]:
    """The names of its sources on other machines."""
    with understood():
        sources = json.loads(worker_pipeline)["sources"]
        return frozenset(source["name"] for source in sources if is_far(source["url"]))


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Turn the errors of json and pydantic over a pipeline of another release into SpecError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(
            f"this is no job's pipeline: {type(error).__name__}: {str(error)[:200]}. Coordinator "
            "and workers must be of one release."
        ) from error
