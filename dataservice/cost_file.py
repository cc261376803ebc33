"""The cost file: coefficients that a job can name, with where they come from and how far off
they are.

    dataservice calibrate ──► cost.yaml ──► plan: {cost: cost.yaml}   read when the job is
                                       └──► dataservice job recost    submitted; the job keeps
                                                                      the coefficients

Its `version` is the digest of its coefficients, the same that plans and the ledger name.
"""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dataservice.core.errors import SpecError
from dataservice.planning.calibration import RelativeError
from dataservice.planning.cost import ContextCost, PhaseCost
from dataservice.planning.options import CostModel

FORMAT = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class MeasuredOn(_Strict):
    """Where the coefficients come from."""

    when: str
    """Date and time, ISO 8601."""
    model: str
    """What was measured, as `package.module:build`."""
    hardware: str
    """The device's name."""
    ranks: int
    """Replicas that took part."""
    torch: str = ""
    """Its version."""


class HeldOut(_Strict):
    """Relative errors on lengths that were not fitted."""

    count: int
    mean: float
    median: float
    largest: float

    @classmethod
    def of(cls, error: RelativeError) -> "HeldOut":
        """As a fit reports it; four digits are plenty."""
        return cls(
            count=error.count,
            mean=round(error.mean, 4),
            median=round(error.median, 4),
            largest=round(error.largest, 4),
        )


class Coefficients(_Strict):
    """The phases that were measured. A job takes the default for an encoder left out."""

    llm: ContextCost
    vision: PhaseCost | None = None
    audio: PhaseCost | None = None

    @property
    def model(self) -> CostModel:
        """As the planner takes them."""
        default = CostModel()
        return CostModel(
            llm=self.llm,
            vision=self.vision or default.vision,
            audio=self.audio or default.audio,
        )


class CostFile(_Strict):
    """A calibration. `version` is the digest of the coefficients, defaults included."""

    format: int = FORMAT
    version: str = ""
    measured: MeasuredOn | None = None
    held_out: dict[str, HeldOut] = {}
    unmeasured: list[str] = []
    """Coefficients that no measurement speaks of, and which were assumed."""
    cost: Coefficients


def write_cost_file(path: Path, made: CostFile) -> None:
    """Write it as YAML, its version filled in. Raises SpecError."""
    plain = made.model_copy(update={"version": made.cost.model.version}).model_dump(
        mode="json", exclude_none=True
    )
    head = "# Written by `dataservice calibrate`. In a job file: plan: {cost: " + path.name + "}\n"
    try:
        path.write_text(head + yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the cost file {path} cannot be written: {error.strerror}. Give another with --out."
        ) from error


def read_cost_file(path: Path) -> CostFile:
    """Read and check one. Raises SpecError: unreadable, unknown keys, an unknown format, or
    coefficients that are not those of its version."""
    try:
        plain: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"the cost file {path} cannot be read: {error.strerror}. Check the path; "
            "`dataservice calibrate` writes one."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(
            f"the cost file {path} is not YAML: {' '.join(str(error).split())}. Write it anew "
            "with `dataservice calibrate`."
        ) from error
    if isinstance(plain, dict) and plain.get("format", FORMAT) != FORMAT:
        raise SpecError(
            f"the cost file {path} has format {plain['format']}; this release reads {FORMAT}. "
            "Use the release that wrote it, or calibrate again."
        )
    try:
        made = CostFile.model_validate(plain)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in found["loc"]) or "the file"
        raise SpecError(
            f"the cost file {path} is not one: {where}: {found['msg']}. Write it anew with "
            "`dataservice calibrate`."
        ) from error
    version = made.cost.model.version
    if made.version not in ("", version):
        raise SpecError(
            f"the cost file {path} says version {made.version}, its coefficients have {version}: "
            "they were edited. Leave its version out if that is meant, or calibrate again."
        )
    return made
