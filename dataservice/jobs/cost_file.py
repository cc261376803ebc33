"""The cost file: coefficients that a job can name, with their origin and their errors.

    dataservice calibrate ──► cost.yaml ──► plan: {cost: cost.yaml}   read when the job is
                                       └──► dataservice job recost    submitted; the job keeps
                                                                      the coefficients

Its `version` is the digest of its coefficients, the same that plans and the ledger name.
"""

from pathlib import Path

import yaml
from pydantic import Field

from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.errors import SpecError
from dataservice.core.memory import MemoryModel
from dataservice.core.plan_options import CostModel
from dataservice.core.quoting import quoted
from dataservice.jobs.yaml_file import Strict, read_text, validated, written

FORMAT = 1


class MeasuredOn(Strict):
    """Where the coefficients come from."""

    when: str
    """Date and time, ISO 8601."""
    model: str
    """Import path of the model that was measured, as `package.module:build`."""
    hardware: str
    """Name of the device."""
    ranks: int
    """Number of replicas that took part."""
    torch: str = ""
    """Version of torch."""


class HeldOut(Strict):
    """Relative errors on lengths that were not fitted."""

    count: int
    mean: float
    median: float
    largest: float


class Coefficients(Strict):
    """Coefficients of the phases that were measured. Defaults hold for an encoder left out."""

    llm: ContextCost
    vision: PhaseCost | None = None
    audio: PhaseCost | None = None
    step: StepCost | None = None

    @property
    def model(self) -> CostModel:
        """The cost model that the planner takes."""
        default = CostModel()
        return CostModel(
            llm=self.llm,
            vision=self.vision or default.vision,
            audio=self.audio or default.audio,
            step=self.step or default.step,
        )


class CostFile(Strict):
    """A calibration. `version` is the digest of the coefficients, defaults included."""

    format: int = FORMAT
    version: str = ""
    measured: MeasuredOn | None = None
    held_out: dict[str, HeldOut] = Field(default={})
    unmeasured: list[str] = Field(default=[])
    """Names of the coefficients that were not measured but assumed."""
    cost: Coefficients
    memory: MemoryModel | None = None
    """Bytes of a rank, where they were measured: for a job's `plan.memory`."""


def write_cost_file(path: Path, made: CostFile) -> None:
    """Write it as YAML, with its version filled in. Raises SpecError."""
    plain = made.model_copy(update={"version": made.cost.model.version}).model_dump(
        mode="json", exclude_none=True
    )
    names = f"cost: {path.name}" + (f", memory: {path.name}" if made.memory else "")
    head = f"# Written by `dataservice calibrate`. In a job file: plan: {{{names}}}\n"
    try:
        path.write_text(head + yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the cost file {path} cannot be written: {error.strerror}. Give another with --out."
        ) from error


def read_cost_file(path: Path) -> CostFile:
    """Read and check a cost file. Raises SpecError where it cannot be read, has unknown keys or an
    unknown format, or its coefficients do not match its version."""
    what = f"cost file {path}"
    file = written(read_text(path, "cost file"), what)
    if (given := file.plain.get("format", FORMAT)) != FORMAT:
        raise SpecError(
            f"the {what} has format {quoted(given)}; this release reads {FORMAT}. "
            "Use the release that wrote it, or calibrate again."
        )
    made = validated(CostFile, file, what, remedy="`dataservice calibrate` writes a new one.")
    version = made.cost.model.version
    if made.version not in ("", version):
        raise SpecError(
            f"the cost file {path} says version {made.version}, its coefficients have {version}: "
            "they were edited. Leave its version out if that is meant, or calibrate again."
        )
    return made
