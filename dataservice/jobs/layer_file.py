"""The file of measured layers: what `dataservice calibrate --layers` writes and a layout reads."""

from pathlib import Path

import numpy as np
import yaml
from pydantic import Field

from dataservice.core.errors import PlanningError, SpecError
from dataservice.core.quoting import quoted
from dataservice.jobs.cost_file import HeldOut, MeasuredOn
from dataservice.jobs.yaml_file import Strict, read_text, validated, written
from dataservice.planning.layout.profile import Floats, LayerProfile, Pace

FORMAT = 1


class LayerPace(Strict):
    """Seconds of a layer: token_s for each token, square_s for each squared length, constant_s."""

    token_s: float
    square_s: float
    constant_s: float


class LayerRow(Strict):
    """One layer, or what runs outside of them (`head`), of one rank that holds all of it."""

    name: str
    module: str
    forward: LayerPace
    backward: LayerPace
    kept_token_bytes: float
    """Bytes that a token keeps until its backward pass."""
    kept_square_bytes: float = 0.0
    """The same for a squared length."""
    recomputed_token_bytes: float
    """Bytes that a token keeps where the layer is recomputed."""
    state_bytes: float
    """Weights and gradients."""
    gradient_bytes: float
    """Gradients alone."""
    optimizer_bytes: float
    """Optimizer states."""
    output_bytes: float
    """Bytes that a token hands to the next layer."""


class LayerFile(Strict):
    """Measured layers, in the order in which they run."""

    format: int = FORMAT
    measured: MeasuredOn | None = None
    held_out: dict[str, HeldOut] = Field(default={})
    """By module, errors of a whole pass on loads that were not fitted."""
    layers: list[LayerRow]


def layer_file(
    profile: LayerProfile, *, measured: MeasuredOn | None, held_out: dict[str, HeldOut]
) -> LayerFile:
    """A profile as its file has it."""
    rows = [
        LayerRow(
            name=name,
            module=profile.modules[at],
            forward=_pace_row(profile.forward, at),
            backward=_pace_row(profile.backward, at),
            kept_token_bytes=float(profile.kept_token_bytes["none"][at]),
            kept_square_bytes=float(profile.kept_square_bytes["none"][at]),
            recomputed_token_bytes=float(profile.kept_token_bytes["full"][at]),
            state_bytes=float(profile.state_bytes[at]),
            gradient_bytes=float(profile.gradient_bytes[at]),
            optimizer_bytes=float(profile.optimizer_bytes[at]),
            output_bytes=float(profile.output_bytes[at]),
        )
        for at, name in enumerate(profile.names)
    ]
    return LayerFile(measured=measured, held_out=held_out, layers=rows)


def _pace_row(pace: Pace, at: int) -> LayerPace:
    return LayerPace(
        token_s=float(pace.token_s[at]),
        square_s=float(pace.square_s[at]),
        constant_s=float(pace.constant_s[at]),
    )


def write_layer_file(path: Path, made: LayerFile) -> None:
    """Write it as YAML. Raises SpecError."""
    plain = made.model_dump(mode="json", exclude_none=True)
    head = "# Written by `dataservice calibrate --layers`: seconds and bytes of each layer.\n"
    try:
        path.write_text(head + yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the layer file {path} cannot be written: {error.strerror}. Give another to --layers."
        ) from error


def read_layer_file(path: Path) -> LayerProfile:
    """The profile that a file holds. Raises SpecError."""
    what = f"layer file {path}"
    file = written(read_text(path, "layer file"), what)
    if (given := file.plain.get("format", FORMAT)) != FORMAT:
        raise SpecError(
            f"the {what} has format {quoted(given)}; this release reads {FORMAT}. Use the release "
            "that wrote it, or calibrate again."
        )
    remedy = "`dataservice calibrate --layers` writes a new one."
    made = validated(LayerFile, file, what, remedy=remedy)
    try:
        return _profile(made.layers)
    except PlanningError as error:
        raise SpecError(f"the {what} cannot be right: {error}. {remedy}") from error


def _profile(rows: list[LayerRow]) -> LayerProfile:
    def column(name: str) -> Floats:
        return np.array([getattr(row, name) for row in rows], np.float64)

    none = np.zeros(len(rows))
    kept, squares = column("kept_token_bytes"), column("kept_square_bytes")
    return LayerProfile(
        names=tuple(row.name for row in rows),
        modules=tuple(row.module for row in rows),
        forward=_pace([row.forward for row in rows]),
        backward=_pace([row.backward for row in rows]),
        again=Pace(token_s=none, square_s=none, constant_s=none, least_s=none),
        kept_token_bytes={
            "none": kept, "selective": kept, "full": column("recomputed_token_bytes"),
        },
        kept_square_bytes={"none": squares, "selective": squares, "full": none},
        state_bytes=column("state_bytes"),
        gradient_bytes=column("gradient_bytes"),
        optimizer_bytes=column("optimizer_bytes"),
        output_bytes=column("output_bytes"),
    )  # fmt: skip


def _pace(rows: list[LayerPace]) -> Pace:
    return Pace(
        token_s=np.array([row.token_s for row in rows]),
        square_s=np.array([row.square_s for row in rows]),
        constant_s=np.array([row.constant_s for row in rows]),
        least_s=np.zeros(len(rows)),
    )
