"""The picture of a pipeline before and after its layout, as SVG or PNG.

planning.layout.before_after ──► panels, one over the other on one time scale ──► FILE.svg, FILE.png

Hues tell encoders from the decoder, and lightness forward from backward: the picture can be read
without telling red from green, and printed in grey.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dataservice.core.distribution import installing
from dataservice.core.errors import SpecError
from dataservice.planning.layout.before_after import BeforeAfter, TimedLayout, chunk_layers
from dataservice.planning.layout.search import LayoutTask
from dataservice.planning.step_timeline import WORK, StepTimeline, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
FILLS: dict[Work, str] = {
    "encoder_forward": "#f7c97f",
    "forward": "#a9cbe6",
    "backward": "#3a6ea5",
    "encoder_backward": "#c8791b",
    "gradients": "#b9b9b9",
}
_LEGEND: dict[Work, str] = {
    "forward": "forward",
    "backward": "backward, with what recomputes",
    "encoder_forward": "encoders and their features, forward",
    "encoder_backward": "… backward",
    "gradients": "gradients' sum",
}
_INK, _QUIET, _HAIR = "#222222", "#666666", "#cccccc"
_WHITE_TEXT: tuple[Work, ...] = ("backward", "encoder_backward")

# Inches.
_WIDTH, _LEFT, _RIGHT = 12.0, 0.95, 0.35
_HEAD, _PANEL_HEAD, _BETWEEN, _FOOT = 1.08, 0.5, 0.32, 0.42
_LANE, _THIN_LANE, _THICK_LANES = 0.3, 0.22, 8
_NUMBER = 0.075  # of each digit
_EDGED = 0.03  # the narrowest bar, in the middle, that has room for an edge
_NUMBERED = 0.6  # where fewer of the bars have room for their numbers, none has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One timeline: what it is called, what was laid out how, and its bars."""

    name: str
    words: str
    timeline: StepTimeline


def require_drawable(paths: Sequence[Path]) -> None:
    """Raises SpecError where a picture has another ending than .svg and .png, lies in no folder, or
    cannot be drawn here: asked before a search takes minutes."""
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise SpecError(
                f"the picture {path} ends with {path.suffix or 'nothing'!r}; it is drawn as .svg "
                "or .png: give --draw a name with one of these"
            )
        if not path.parent.is_dir():
            raise SpecError(f"the picture {path} has no folder {path.parent}: make it first")
    if paths and find_spec("matplotlib") is None:
        raise SpecError(
            f"pictures are drawn by matplotlib, which is not installed: {installing('draw')}; or "
            "leave --draw out"
        )


def draw_before_after(
    paths: Sequence[Path], task: LayoutTask, compared: BeforeAfter, *, step_words: str = "one step"
) -> None:
    """Draw what `time_before_after` gives, into each of `paths`. Raises SpecError."""
    after, before = compared.after, compared.before
    panels = [Panel(name="after", words=_words(after), timeline=after.timeline)]
    title = f"{task.model.name} on {task.group.gpus:,} GPUs"
    words = f"{step_words}. "
    if before is None:
        words += "No plain layout fits, so that there is nothing to compare with."
    else:
        panels.insert(0, Panel(name="before", words=_words(before), timeline=before.timeline))
        gain = before.timeline.step_s / after.timeline.step_s
        title += f": {gain:.2f} × as fast" if gain > 1.005 else ": as fast as the plainest layout"
        words += (
            "Before: the plainest layout that fits, with equal layers a stage, packs as they "
            "fill, and each item encoded where its text is."
        )
    draw_timelines(paths, panels, title=title, words=words)


def _words(timed: TimedLayout) -> str:
    """How the model lies, and how packs are made."""
    parallel = timed.replica.parallel
    parts = [f"TP {parallel.tensor_ranks}", f"PP {parallel.pipeline_stages}"]
    parts.append(f"{parallel.replicas:,} replicas" if parallel.replicas > 1 else "1 replica")
    if parallel.virtual_stages > 1:
        parts.append(f"{parallel.virtual_stages} virtual stages")
    places = {
        "first": "encoders on the first stage",
        "own": "encoders on a stage of their own",
        "spread": "encoders on all stages",
        "cut": "encoders cut over the first stages",
        "bubbles": "encoders in the decoder's bubbles",
    }
    if any(module != "decoder" for module in timed.replica.profile.modules):
        parts.append(places.get(parallel.encoder_stage, f"encoders {parallel.encoder_stage}"))
    if parallel.pipeline_stages > 1:
        parts.append(f"decoder layers {_runs(chunk_layers(timed.replica))}")
    parts.append(f"{timed.microbatch_tokens:,} tokens a microbatch")
    parts.append("packs as filled" if timed.strategy == "packing" else "balanced packs")
    return "  ·  ".join(parts)


def _runs(counts: Sequence[int]) -> str:
    """`34 7 7 8`; many of them as `34 7×6 8`; and of many kinds the least and the most."""
    if len(counts) <= 8:
        return " ".join(map(str, counts))
    found: list[list[int]] = []
    for count in counts:
        if found and found[-1][0] == count:
            found[-1][1] += 1
        else:
            found.append([count, 1])
    if len(found) > 10:
        return f"{min(counts)} to {max(counts)} a chunk"
    return " ".join(f"{count}×{times}" if times > 1 else str(count) for count, times in found)


def draw_timelines(
    paths: Sequence[Path], panels: Sequence[Panel], *, title: str, words: str = ""
) -> None:
    """Draw timelines over one another on one time scale, into each of `paths` (.svg or .png). The
    same timelines give the same bytes, as long as matplotlib is the same. Raises SpecError."""
    require_drawable(paths)
    from matplotlib import rc_context

    with rc_context(
        {
            "font.family": ["sans-serif"],
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
            "svg.fonttype": "none",  # text stays text: to be found, and to be edited
            "svg.hashsalt": "dataservice",
        }
    ):
        figure = _figure(panels, title, words)
        for path in paths:
            date = {"Date": None} if path.suffix.lower() == ".svg" else {}
            try:
                figure.savefig(path, dpi=160, metadata=date)
            except OSError as error:
                raise SpecError(
                    f"the picture {path} cannot be written: {error.strerror}. Give another to "
                    "--draw."
                ) from error


def _figure(panels: Sequence[Panel], title: str, words: str) -> "Figure":
    from matplotlib.figure import Figure

    lanes = [len(panel.timeline.lanes) for panel in panels]
    lane = _LANE if max(lanes) <= _THICK_LANES else _THIN_LANE
    heights = [count * lane for count in lanes]
    gaps = len(panels) * _PANEL_HEAD + (len(panels) - 1) * _BETWEEN
    tall = _HEAD + _FOOT + gaps + sum(heights)
    figure = Figure(figsize=(_WIDTH, tall), facecolor="white")
    figure.text(_LEFT / _WIDTH, 1 - 0.34 / tall, title, fontsize=14, weight="bold", color=_INK)
    figure.text(_LEFT / _WIDTH, 1 - 0.58 / tall, words, fontsize=9, color=_QUIET)
    _legend(figure, panels, 1 - 0.88 / tall)
    scale = _Scale.of(max(panel.timeline.step_s for panel in panels))
    top = tall - _HEAD
    for number, (panel, height) in enumerate(zip(panels, heights, strict=True)):
        top -= _PANEL_HEAD + height
        box = (_LEFT / _WIDTH, top / tall, 1 - (_LEFT + _RIGHT) / _WIDTH, height / tall)
        axes = figure.add_axes(box)
        _panel(axes, panel, scale, height, last=number == len(panels) - 1)
        top -= _BETWEEN
    return figure


def _legend(figure: "Figure", panels: Sequence[Panel], at: float) -> None:
    from matplotlib.patches import Patch

    seen = {WORK[k] for panel in panels for k in np.unique(panel.timeline.bars.work)}
    handles = [
        Patch(facecolor=FILLS[work], label=label) for work, label in _LEGEND.items() if work in seen
    ]
    handles.append(Patch(facecolor="white", edgecolor=_HAIR, label="idle"))
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(_LEFT / _WIDTH, at), ncols=6,
        frameon=False, fontsize=8.5, labelcolor=_QUIET, handlelength=1.3, handleheight=1.0,
        columnspacing=1.6, handletextpad=0.5, borderpad=0, borderaxespad=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """The time axis: `longest` in `unit`s, of which a second has `per_s`."""

    longest: float
    unit: str
    per_s: float

    @staticmethod
    def of(longest_s: float) -> "_Scale":
        per_s, unit = (1.0, "s") if longest_s >= 2.0 else (1e3, "ms")
        return _Scale(longest=max(longest_s, 1e-12) * per_s, unit=unit, per_s=per_s)

    @property
    def inches(self) -> float:
        """Of one unit."""
        return (_WIDTH - _LEFT - _RIGHT) / self.longest


def _panel(axes: "Axes", panel: Panel, scale: _Scale, height: float, *, last: bool) -> None:
    timeline = panel.timeline
    count = len(timeline.lanes)
    axes.set_xlim(0, scale.longest)
    axes.set_ylim(count - 0.5, -0.5)  # the first lane on top
    axes.set_yticks(range(count), timeline.lanes, fontsize=8.5, color=_QUIET)
    axes.tick_params(length=0, pad=6)
    axes.tick_params(axis="x", labelsize=8.5, labelcolor=_QUIET, labelbottom=last)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(axis="x", color=_HAIR, linewidth=0.5)
    axes.set_axisbelow(True)
    end = timeline.step_s * scale.per_s
    axes.plot([end, end], [-0.5, count - 0.5], color=_INK, linewidth=1.0, clip_on=False)
    for work in FILLS:
        _bars(axes, timeline, work, scale)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} {scale.unit}")
    seconds = f"{end:#.4g}".rstrip(".")
    over = 1 + 0.11 / height
    axes.text(0, over + 0.19 / height, panel.name, transform=axes.transAxes, fontsize=11,
              weight="bold", color=_INK)  # fmt: skip
    axes.text(1, over + 0.19 / height, f"step {seconds} {scale.unit}   idle {timeline.idle:.0%}",
              transform=axes.transAxes, fontsize=11, ha="right", color=_INK)  # fmt: skip
    axes.text(0, over, panel.words, transform=axes.transAxes, fontsize=8.5, color=_QUIET)


def _bars(axes: "Axes", timeline: StepTimeline, work: Work, scale: _Scale) -> None:
    """All bars of one kind as one path, so that tens of thousands are drawn in a second; edges and
    numbers where they have room."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    bars = timeline.bars
    mine = bars.work == WORK.index(work)
    if not mine.any():
        return
    lane, start, end = bars.lane[mine], bars.start_s[mine], bars.end_s[mine]
    corners = _corners(lane, start * scale.per_s, end * scale.per_s)
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * len(lane)
    wide = (end - start) * scale.per_s * scale.inches
    axes.add_patch(
        PathPatch(
            Outline(corners, codes),
            facecolor=FILLS[work],
            edgecolor="white" if np.median(wide) > _EDGED else "none",
            linewidth=0.6,
        )
    )
    if work != "gradients":
        _numbers(axes, timeline, work, scale)


def _numbers(axes: "Axes", timeline: StepTimeline, work: Work, scale: _Scale) -> None:
    """The microbatches of bars of one kind, where most have room; those of encoders where their
    stage has nothing else."""
    bars = timeline.bars
    mine = (bars.work == WORK.index(work)) & (bars.microbatch >= 0)
    if work.startswith("encoder"):
        decode = np.unique(bars.lane[bars.work == WORK.index("forward")])
        mine &= ~np.isin(bars.lane, decode)
    numbers = [str(number) for number in bars.microbatch[mine].tolist()]
    wide = bars.seconds[mine] * scale.per_s * scale.inches
    fits = wide > np.array([_NUMBER * len(number) for number in numbers]) + 0.03
    if not numbers or fits.mean() < _NUMBERED:
        return
    middle = (bars.start_s[mine] + bars.end_s[mine]) / 2 * scale.per_s
    color = "white" if work in _WHITE_TEXT else _INK
    for k in np.flatnonzero(fits).tolist():
        axes.text(middle[k], bars.lane[mine][k], numbers[k], fontsize=7, color=color, ha="center",
                  va="center_baseline")  # fmt: skip


def _corners(
    lane: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rectangles as closed outlines: float64[5 · bars, 2]."""
    low, high = lane - 0.42, lane + 0.42
    x = np.stack([start, end, end, start, start], axis=1)
    y = np.stack([low, low, high, high, low], axis=1)
    outline: NDArray[np.float64] = np.stack([x, y], axis=2).reshape(-1, 2)
    return outline
