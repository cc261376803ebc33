"""From a user's model to a cost file: measure, fit, judge.

    model ──► trainer_client.runtime.measure ──► measurements.json ──► planning.calibration
              (ranks under torchrun)                                        │
                                                     cost.yaml ◄── CostFile ┘

Measuring runs in processes of its own, with torch; nothing of torch is imported here.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.errors import PlanningError, SpecError
from dataservice.core.memory import MemoryModel
from dataservice.decode.choose import choose_vision
from dataservice.decode.processors.base import VisionProcessor
from dataservice.jobs.cost_file import Coefficients, CostFile, HeldOut, MeasuredOn
from dataservice.jobs.job_file import JobSpec
from dataservice.jobs.layer_file import LayerFile, layer_file
from dataservice.planning.calibration import (
    BytesFit,
    Fit,
    Measurement,
    RelativeError,
    fit_bytes,
    fit_context,
    fit_phase,
    fit_step,
)
from dataservice.planning.layout.measured import LayerMeasurement, fit_layers

FORMAT = 1
RESERVE = 0.1  # of a device's memory, for the allocator and for communication
AnyFit = Fit[ContextCost] | Fit[PhaseCost] | Fit[StepCost]
LAST_WORDS = 1500  # characters from the end of the ranks' output that an error repeats
_PROGRESS = re.compile(r"measured (\d+)/(\d+) (.*)")

Tell = Callable[[int, int, str], None]
"""Called with (measurements done, measurements in all, description of the last one)."""


class MeasuredDevice(BaseModel):
    """Bytes of the device that one rank measured on, and of the model there: its weights, and the
    gradients of those that train."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    device_bytes: float
    weights_bytes: float
    gradients_bytes: float


class MeasurementFile(BaseModel):
    """What `trainer_client.runtime.measure` writes."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: int
    when: str
    model: str
    hardware: str
    ranks: int
    torch: str = ""
    memory: MeasuredDevice | None = None
    measurements: Mapping[str, list[Measurement]]
    layers: list[LayerMeasurement] | None = None
    """Each layer, where they were measured too."""

    @property
    def measured_on(self) -> MeasuredOn:
        """The model, hardware and versions that were measured."""
        return MeasuredOn(
            when=self.when,
            model=self.model,
            hardware=self.hardware,
            ranks=self.ranks,
            torch=self.torch,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A cost file and the fits it comes from: `fits` has one entry for each measured phase, and
    `bytes_fits` one for each whose memory was measured too."""

    file: CostFile
    fits: dict[str, AnyFit]
    bytes_fits: dict[str, BytesFit]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuringOptions:
    """How a model is measured; for a field that is None or empty the script's default holds."""

    model: str
    ranks: int = 4
    lengths: Sequence[int] = ()
    item_tokens: Sequence[int] = ()
    degrees: Sequence[int] = ()
    modalities: Sequence[str] | None = None
    repeats: int | None = None
    dtype: str | None = None
    device: str | None = None
    wrapped: bool = False
    layers: bool = False

    def arguments(self) -> list[str]:
        """The options as command-line arguments of the measuring script."""
        words = ["--model", self.model]
        many: dict[str, Sequence[int] | Sequence[str] | None] = {
            "--lengths": self.lengths or None,
            "--item-tokens": self.item_tokens or None,
            "--degrees": self.degrees or None,
            "--modalities": self.modalities,
        }
        for flag, values in many.items():
            words += [] if values is None else [flag, *map(str, values)]
        one = {"--repeats": self.repeats, "--dtype": self.dtype, "--device": self.device}
        for flag, value in one.items():
            words += [] if value is None else [flag, str(value)]
        flags = {"--wrapped": self.wrapped, "--layers": self.layers}
        return [*words, *(flag for flag, given in flags.items() if given)]


def measure_model(options: MeasuringOptions, out: Path, *, tell: Tell) -> None:
    """Measure with `options.ranks` processes on this host, and write `out`. Raises SpecError with
    the end of the ranks' output where they fail."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", str(options.ranks), "-m", "trainer_client.runtime.measure"]
    threads = max(1, (os.cpu_count() or 1) // options.ranks)
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*torchrun, *script, "--out", str(out), *options.arguments()],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
        ) as ranks,
    ):
        assert ranks.stdout is not None
        try:
            for line in ranks.stdout:
                if said := _PROGRESS.match(line):
                    tell(int(said[1]), int(said[2]), said[3])
        except BaseException:
            ranks.terminate()  # torchrun stops its ranks
            raise
        if ranks.wait() != 0:
            errors.seek(0)
            raise SpecError(f"the model could not be measured: {_last_words(errors.read())}")


def _last_words(said: str) -> str:
    """The error that a rank printed, or else the end of the output."""
    for line in said.splitlines():
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    kept = "\n".join(line for line in said.splitlines() if "elastic" not in line)
    return "...\n" + kept[-LAST_WORDS:] + "\nMend the model, or see --help for what is measured."


def read_measurements(path: Path) -> MeasurementFile:
    """Read what the measuring script wrote. Raises SpecError."""
    try:
        made = MeasurementFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(
            f"the measurements {path} cannot be read: {error.strerror}. Check the path."
        ) from error
    except (ValidationError, PlanningError) as error:
        first = str(error).splitlines()
        raise SpecError(
            f"{path} holds no measurements: {' '.join(first[:3])}. Write them with "
            "`torchrun -m trainer_client.runtime.measure`."
        ) from error
    if made.format != FORMAT:
        raise SpecError(
            f"the measurements {path} have format {made.format}; this release reads {FORMAT}. "
            "Measure again with this release."
        )
    return made


def calibrate(measured: MeasurementFile) -> Calibration:
    """Fit every phase that was measured. Raises PlanningError where there are too few
    measurements."""
    if "llm" not in measured.measurements:
        raise SpecError("the measurements have none of the decoder (llm). Measure the whole model.")
    llm = fit_context(measured.measurements["llm"])
    encoders = {
        name: fit_phase(measured.measurements[name])
        for name in ("vision", "audio")
        if name in measured.measurements
    }
    fits: dict[str, AnyFit] = {"llm": llm, **encoders}
    bytes_fits = {
        name: fit
        for name in fits
        if (fit := fit_bytes(measured.measurements[name], name)) is not None
    }
    moved = {name: measured.measurements.get(name, []) for name in ("exchange", "gradients")}
    step = fit_step(moved["exchange"], moved["gradients"]) if any(moved.values()) else None
    if step is not None:
        fits["step"] = step
    file = CostFile(
        measured=measured.measured_on,
        held_out={
            name: _held_out(error)
            for phase, fit in fits.items()
            for name, error in (
                (phase, fit.held_out),
                *((f"{phase}, {part}", error) for part, error in fit.apart),
            )
            if error.count
        }
        | {f"{phase}, bytes": _held_out(fit.held_out) for phase, fit in bytes_fits.items()},
        unmeasured=[
            *llm.unmeasured,
            *(f"{phase}.{name}" for phase, fit in encoders.items() for name in fit.unmeasured),
            *(step.unmeasured if step else ()),
        ],
        cost=Coefficients(
            llm=llm.cost,
            vision=encoders["vision"].cost if "vision" in encoders else None,
            audio=encoders["audio"].cost if "audio" in encoders else None,
            step=step.cost if step else None,
        ),
        memory=_memory(measured.memory, bytes_fits),
    )
    return Calibration(file=file, fits=fits, bytes_fits=bytes_fits)


def calibrate_layers(measured: MeasurementFile) -> LayerFile:
    """What each layer takes. Raises PlanningError where layers were not measured, or too little."""
    fit = fit_layers(measured.layers or [])
    return layer_file(
        fit.profile,
        measured=measured.measured_on,
        held_out={module: _held_out(error) for module, error in fit.held_out.items()},
    )


def _memory(device: MeasuredDevice | None, fits: Mapping[str, BytesFit]) -> MemoryModel | None:
    """The memory model of a rank that holds the whole model, without an optimizer. None where
    memory was not measured."""
    if device is None or "llm" not in fits or fits["llm"].token_bytes <= 0:
        return None
    of_token = {name: fit.token_bytes for name, fit in fits.items()}
    gradients = max(device.gradients_bytes, *(fit.base_bytes for fit in fits.values()))
    return MemoryModel(
        budget_bytes=float(int(device.device_bytes * (1.0 - RESERVE))),
        states_bytes=float(int(device.weights_bytes + gradients)),
        llm_token_bytes=of_token["llm"],
        vision_token_bytes=of_token.get("vision", 0.0),
        audio_token_bytes=of_token.get("audio", 0.0),
    )


def modalities_of(spec: JobSpec, custom: Mapping[str, type]) -> list[str]:
    """The job's encoders in the measuring script's notation, NAME:TOKENS_PER_ROW:GROWS: encoder
    tokens (as this job counts them) per feature row, and how an item grows."""
    found = []
    if (vision := choose_vision(spec.pipeline.vision, custom)) is not None:
        found.append(_vision(vision))
    if spec.pipeline.audio is not None:
        found.append(f"audio:{spec.pipeline.audio.pool}:area")
    return found


def _vision(processor: VisionProcessor) -> str:
    small = processor.plan_image(width=448, height=448)
    large = processor.plan_image(width=1792, height=896)
    # A larger image gives more tiles (frames) where their size is fixed, else a larger picture.
    grows = "frames" if small.shape[1:] == large.shape[1:] else "area"
    return f"vision:{large.encoder_tokens / large.llm_tokens:g}:{grows}"


def _held_out(error: RelativeError) -> HeldOut:
    """The errors, rounded to four digits."""
    return HeldOut(
        count=error.count,
        mean=round(error.mean, 4),
        median=round(error.median, 4),
        largest=round(error.largest, 4),
    )
