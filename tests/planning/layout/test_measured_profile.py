"""Measured layers in the place of computed ones."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import workloads
from dataservice.core.errors import PlanningError
from dataservice.planning.layout.costs import LayerShares, analytic_profile
from dataservice.planning.layout.layers import layer_shapes
from dataservice.planning.layout.measured import LayerMeasurement, fit_layers
from dataservice.planning.layout.measured_profile import measured_profile, require_measured
from dataservice.planning.layout.search import LayoutTask, search_layout
from tests.planning.layout.small_models import DECODER, MODEL, VISION, nodes

GROUP = nodes(80e9)
LOADS = (64, 128, 256, 512, 1024)


def measured(model=MODEL, *, slower: float = 1.0, weight_bytes: float = 2.0, trained: bool = True):
    """Layers measured `slower` than they are computed, and what is outside of them as one head."""
    computed = analytic_profile(model, GROUP)
    rows = []
    for module in model.module_names:
        mine = [k for k, each in enumerate(computed.modules) if each == module]
        layers = [k for k in mine if computed.names[k].rsplit(".", 1)[1].isdigit()]
        parts = {computed.names[k].rsplit(".", 1)[1]: [k] for k in layers}
        parts["head"] = [k for k in mine if k not in layers]
        for layer, places in parts.items():
            rows += [
                _row(model, computed, module, layer, places, tokens, slower, weight_bytes, trained)
                for tokens in LOADS
            ]
    return fit_layers(rows).profile


def _row(model, computed, module, layer, places, tokens, slower, weight_bytes, trained):
    shapes = layer_shapes(model)
    head = layer == "head"

    def seconds(pace):
        line = pace.token_s[places] * tokens + pace.square_s[places] * tokens**2
        return slower * float((line + pace.constant_s[places]).sum())

    def amount(values):
        return 0.0 if head else float(values[places].sum())

    weights = 0 if head else shapes[places[0]].parameters
    return LayerMeasurement(
        module=module, layer=layer, tokens=(tokens,),
        forward_s=seconds(computed.forward), backward_s=seconds(computed.backward),
        kept_bytes=amount(computed.kept_token_bytes["none"]) * tokens,
        output_bytes=amount(computed.output_bytes) * tokens,
        weight_bytes=weights * weight_bytes, trained=weights if trained else 0,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_was_measured_as_it_is_computed_gives_the_computed_seconds(ranks):
    computed = analytic_profile(MODEL, GROUP, shares=LayerShares(tensor_ranks=ranks))
    taken = measured_profile(measured(), MODEL, GROUP, tensor_ranks=ranks)
    assert taken.names == computed.names
    for passes in ("forward", "backward"):
        mine, theirs = getattr(taken, passes), getattr(computed, passes)
        assert mine.square_s == pytest.approx(theirs.square_s, rel=1e-4, abs=1e-18)
        for module in MODEL.module_names:  # what is outside of layers is known as a sum alone
            of = np.array(computed.modules) == module
            assert mine.token_s[of].sum() == pytest.approx(theirs.token_s[of].sum(), rel=1e-3)
    layers = np.array([name.rsplit(".", 1)[1].isdigit() for name in computed.names])
    none = [profile.kept_token_bytes["none"][layers] for profile in (taken, computed)]
    assert none[0] == pytest.approx(none[1], rel=1e-6)


def test_what_ranks_exchange_is_added_as_computed_however_slow_layers_are():
    near = replace(GROUP, inside_bytes_per_s=1e9)
    slow, fast = (
        measured_profile(measured(slower=k), MODEL, near, tensor_ranks=4) for k in (2.0, 1.0)
    )
    alone = [measured_profile(measured(slower=k), MODEL, near) for k in (2.0, 1.0)]
    at = slow.names.index("decoder.3")
    shrunk = (alone[0].forward.token_s[at] - alone[1].forward.token_s[at]) / 4
    assert slow.forward.token_s[at] - fast.forward.token_s[at] == pytest.approx(shrunk, rel=1e-3)


def test_what_is_outside_of_layers_keeps_its_computed_bytes():
    computed, taken = analytic_profile(MODEL, GROUP), measured_profile(measured(), MODEL, GROUP)
    at = computed.names.index("decoder.head")
    assert taken.state_bytes[at] == computed.state_bytes[at] > 0
    assert taken.kept_token_bytes["none"][at] == computed.kept_token_bytes["none"][at] > 0


def test_a_layout_by_layers_that_are_twice_as_slow_takes_about_twice_as_long():
    batches = (workloads.step_samples(workloads.vlm_sft(64, 0)),)
    steps = [
        search_layout(
            LayoutTask(
                model=MODEL, group=GROUP, batches=batches, measured=measured(slower=k)
            )
        ).best.step_s
        for k in (1.0, 2.0)
    ]  # fmt: skip
    assert 1.7 < steps[1] / steps[0] < 2.2


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (replace(MODEL, decoder=replace(DECODER, layers=16)), {},
         "12 layers of decoder were measured, and small has 16"),
        (replace(MODEL, decoder=replace(DECODER, ffn_size=4096)), {},
         r"decoder.0 was measured with [\d,]+ bytes of weights, and that of small has"),
        (replace(MODEL, encoders=(replace(VISION, frozen=True),)), {},
         "vision.0 was measured trained, and that of small is frozen"),
        (MODEL, {"trained": False}, "vision.0 was measured frozen, and that of small is trained"),
        (replace(MODEL, encoders=()), {}, "layers of vision were measured, and small has decoder"),
        (MODEL, {"weight_bytes": 3.0}, "of 1, 2, 4 or 8 bytes each"),
    ],
)  # fmt: skip
def test_layers_of_another_model_are_refused_with_what_differs(model, given, words):
    with pytest.raises(PlanningError, match=words):
        require_measured(measured(**given), model)


@pytest.mark.parametrize("weight_bytes", [1.0, 2.0, 4.0])
def test_layers_may_be_measured_in_any_precision(weight_bytes):
    require_measured(measured(weight_bytes=weight_bytes), MODEL)
