"""A layer profile is fitted to measured layers, and judged on loads that it has not seen."""

import pytest

from dataservice.planning import PlanningError
from dataservice.planning.layout.measured import LayerMeasurement, fit_layers
from dataservice.planning.layout.profile import LayerWork

LOADS = [(n,) for n in (64, 128, 256, 512, 1024, 2048)] + [(n,) * 4 for n in (16, 64, 256)]


def rows(module: str, layer: str, *, a: float, b: float, c: float = 0.0, trained: int = 10):
    """Forward seconds on the line; backward takes twice as long where it trains."""
    return [
        LayerMeasurement(
            module=module, layer=layer, tokens=tokens,
            forward_s=a * sum(tokens) + b * sum(n * n for n in tokens) + c,
            backward_s=(2.0 if trained else 0.0) * a * sum(tokens),
            kept_bytes=float(100 * sum(tokens) if trained else 0),
            output_bytes=float(16 * sum(tokens)), weight_bytes=40.0, trained=trained,
        )
        for tokens in LOADS
    ]  # fmt: skip


def test_the_coefficients_of_the_truth_are_found_again():
    measured = rows("decoder", "0", a=1e-4, b=1e-8, c=2e-3) + rows("decoder", "head", a=5e-4, b=0)
    fit = fit_layers([*measured, *rows("vision", "0", a=3e-5, b=4e-9, trained=0)])
    assert fit.profile.names == ("vision.0", "decoder.0", "decoder.head"), "encoders come first"
    assert fit.profile.forward.token_s == pytest.approx([3e-5, 1e-4, 5e-4])
    assert fit.profile.forward.square_s == pytest.approx([4e-9, 1e-8, 0.0], abs=1e-15)
    assert fit.profile.forward.constant_s == pytest.approx([0, 2e-3, 0], abs=1e-9)
    assert fit.profile.backward.token_s == pytest.approx([0, 2e-4, 1e-3])
    assert fit.profile.kept_token_bytes["none"] == pytest.approx([0, 100, 100])
    assert fit.profile.kept_token_bytes["full"] == pytest.approx([0, 16, 16])
    assert fit.profile.state_bytes == pytest.approx([40, 80, 80])
    assert fit.profile.optimizer_bytes == pytest.approx([0, 120, 120])
    assert all(error.largest < 1e-6 for error in fit.held_out.values())
    work = LayerWork.of(vision=([0.0], [0.0]), decoder=([100.0], [1e4]))
    forward, _ = fit.profile.seconds(work)
    assert forward[0] == pytest.approx([0.0, 1e-2 + 1e-4 + 2e-3, 5e-2])


def test_too_few_loads_are_refused_with_how_many_are_needed():
    with pytest.raises(PlanningError, match=r"decoder.0 was measured at 4 loads; a fit needs 5"):
        fit_layers(rows("decoder", "0", a=1, b=0)[:4])
    with pytest.raises(PlanningError, match="measure with --layers"):
        fit_layers([])
