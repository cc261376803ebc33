"""`dataservice preview`: samples as a job trains them, before it does."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from dataservice.cli import show_preview as show
from dataservice.cli.progress import asking
from dataservice.cli.show_mixture import mixture_fields, mixture_shown
from dataservice.cli.terminal import Terminal
from dataservice.core.errors import SourceError, SpecError
from dataservice.jobs.yaml_file import read_text

if TYPE_CHECKING:  # they load codecs
    from dataservice.jobs.job_file import JobFile
    from dataservice.jobs.preview import SamplePreview

MOST_SAMPLES = 100


def preview(
    job_file: Annotated[Path, typer.Argument(help="The job file (YAML).")],
    source: Annotated[
        list[str] | None, typer.Option(help="Only this source; may be given several times.")
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="The sample with this key, or number from 0; key=17 is never a number."),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(help="Random samples of each source.", min=1, max=MOST_SAMPLES),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(help="The longest samples of each source.", min=1, max=MOST_SAMPLES),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of --random.")] = 0,
    epoch: Annotated[
        int, typer.Option(help="Augment samples as in this epoch, counted from 0.", min=0)
    ] = 0,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="Show the mixture of the sources, and no samples.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write one HTML page, with pictures and wave forms.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The service's config (YAML).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, without pixels and sound.")
    ] = False,
) -> None:
    """Show samples as the job trains them: their text with what is learnt, their media as the
    encoders get them, and their lengths. By default the first sample of each source, behind the
    mixture of the sources as they were indexed.

    The index is used where it is current; without one, files are read from their beginning. Samples
    that cannot be used are shown with the reason.

    Example: `dataservice preview job.yaml --source ocr --random 5 --out page.html`
    """
    from dataservice.jobs.find_samples import Wanted
    from dataservice.jobs.job_file import read_job
    from dataservice.jobs.preview import preview_job
    from dataservice.operate.config import read_config

    if out is not None and as_json:
        raise SpecError("give --out for a page or --json for data, not both.")
    spec = read_job(read_text(job_file, "job file"), job_file.parent.absolute())
    if mixture:
        if out or source or sample or random or longest:
            raise SpecError(
                "--mixture shows all sources and no samples. Leave out --source, --sample, "
                "--random, --longest and --out."
            )
        _print_mixture(spec, as_json)
        return
    settings = read_config(config, {})
    warnings = Terminal(stderr=True)
    previews = preview_job(
        spec,
        Wanted(sample=sample, random=random, longest=longest, seed=seed),
        sources=source or (),
        custom_processors=settings.custom_processors,
        limits=settings.limits,
        storage_profiles=settings.storage_profiles,
        epoch=epoch,
        note=lambda text: warnings.print(Text(text, style="yellow"), soft_wrap=True),
    )
    shown = _Shown(previews)
    if out is not None:
        _write_page(out, spec, shown)
    elif as_json:
        print(json.dumps([show.preview_fields(each) for each in shown], indent=2))
    else:
        if not source:
            _print_mixture_if_indexed(spec)
        _print_text(shown)
    if shown.problem is not None:
        raise shown.problem


class _Shown:
    """Previews as they are made, with a sign on a terminal while the next one is. Sources that
    cannot be read end them without an error, which is kept: what was shown stays."""

    def __init__(self, previews: "Iterator[SamplePreview]") -> None:
        self._previews = previews
        self.samples = 0
        self.problem: SourceError | None = None

    def __iter__(self) -> "Iterator[SamplePreview]":
        while (each := self._next()) is not None:
            self.samples += 1
            yield each

    def _next(self) -> "SamplePreview | None":
        try:
            with asking("reading and decoding"):
                return next(self._previews, None)
        except SourceError as error:
            self.problem = error
            return None


def _print_mixture(spec: "JobFile", as_json: bool) -> None:
    """Of training, then of validation. Raises IndexStaleError where a source has no index."""
    from dataservice.jobs.mixture import mixture_as_indexed

    found = [(job.job, mixture_as_indexed(job)) for job in spec.jobs]
    if as_json:
        training, *held_out = ({"job": job, **mixture_fields(each)} for job, each in found)
        both = {**training, "validation": held_out[0]} if held_out else training
        print(json.dumps(both, indent=2))
        return
    for job, mixture in found:
        for each in mixture_shown(job, mixture):
            Terminal().print(each)


def _print_mixture_if_indexed(spec: "JobFile") -> None:
    """Samples can be shown without an index; what is wrong with it is told with them."""
    with suppress(SourceError):
        _print_mixture(spec, as_json=False)


def _print_text(previews: "Iterable[SamplePreview]") -> None:
    console = Terminal()
    marks = not console.is_terminal or console.no_color
    console.print(show.legend(marks=marks))
    for each in previews:
        for line in show.preview_text(each, marks=marks):
            console.print(line, highlight=False, soft_wrap=True)


def _write_page(out: Path, spec: "JobFile", shown: _Shown) -> None:
    """Write the page under another name first: a page that is there is whole."""
    from dataservice.cli.preview_page import page  # it loads PIL

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(page(spec.job, shown))
        temporary.replace(out)
    except OSError as error:
        raise SpecError(f"{out} cannot be written: {error.strerror}. Check --out.") from error
    finally:
        temporary.unlink(missing_ok=True)
    Terminal().print(f"wrote {out}, samples: {shown.samples}", markup=False, highlight=False)
