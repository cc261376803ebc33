"""The name of a job's validation.

A job file with `validation` stands for two jobs: the one that trains, and one over the held-out
sources. The second is named after the first, with a colon that no job file can write into a name,
so that nobody else can claim it.
"""

SUFFIX = ":validation"


def validation_of(job: str) -> str:
    """The name of the validation of the job of this name, full or plain."""
    return f"{job}{SUFFIX}"


def validated_by(name: str) -> str | None:
    """The job whose validation this is, full or plain as `name` is; None where it is none."""
    return name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else None
