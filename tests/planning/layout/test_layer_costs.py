"""Operations and bytes of a layout's layers follow the published formulas."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from dataservice.planning import PlanningError
from dataservice.planning.layout.cluster import Cluster, Device, NodeGroup
from dataservice.planning.layout.costs import LayerShares, Precision, analytic_profile
from dataservice.planning.layout.layers import layer_shapes
from dataservice.planning.layout.model import (
    Decoder,
    Encoder,
    Experts,
    Generator,
    ModelDescription,
    Projector,
)
from dataservice.planning.layout.profile import LayerWork, joined

Noun = TypeVar("Noun")
HIDDEN, HEADS = 1024, 16
GPT = Decoder(
    layers=4, hidden_size=HIDDEN, heads=HEADS, ffn_size=4 * HIDDEN, norm="layer",
    biases=("qkv", "out", "ffn"), vocabulary=5000, other_parameters=2 * HIDDEN,
)  # fmt: skip
VISION = Encoder(
    layers=3, hidden_size=512, heads=8, ffn_size=2048, input_size=588, tokens_per_row=4.0,
    projector=Projector(widths=(2048, HIDDEN, HIDDEN)),
)  # fmt: skip
NODES = NodeGroup(
    nodes=2,
    device=Device(peak_flops=1e15, memory_bytes=80e9, memory_bytes_per_s=3e12),
    inside_bytes_per_s=4e11,
    between_bytes_per_s=5e10,
)


def model(**changes: object) -> ModelDescription:
    parts = {"name": "tiny", "decoder": GPT, "encoders": (VISION,)} | changes
    return ModelDescription(**parts)  # type: ignore[arg-type]


def of(description: ModelDescription) -> dict[str, object]:
    return {row.name: row for row in layer_shapes(description)}


def test_the_rows_of_a_model_hold_all_its_weights_and_run_in_order() -> None:
    generator = Generator(parameters=1001, flops_per_token=1e6, kept_bytes_per_token=100, layers=3)
    described = model(generator=generator)
    rows = layer_shapes(described)
    assert sum(row.parameters for row in rows) == described.parameters
    assert [row.name for row in rows] == [
        "vision.input", "vision.0", "vision.1", "vision.2", "vision.projector",
        "decoder.embedding", "decoder.0", "decoder.1", "decoder.2", "decoder.3", "decoder.head",
        "generator.0", "generator.1", "generator.2",
    ]  # fmt: skip


def test_operations_of_a_training_step_are_six_a_weight_and_token() -> None:
    """Kaplan et al. 2020, and 12·s·h a layer and token of attention, half of it under a causal
    mask: Narayanan et al. 2021."""
    rows = [row for row in layer_shapes(model()) if row.name.startswith("decoder.")]
    layer = rows[1]
    matrices = 12 * HIDDEN * HIDDEN
    assert layer.forward_flops == (2 * matrices, 2 * HIDDEN)
    assert layer.backward_flops == (4 * matrices, 4 * HIDDEN)
    assert rows[-1].forward_flops[0] == 2 * 5000 * HIDDEN


def test_a_frozen_encoder_has_no_backward_pass_and_its_projector_no_gradient_to_pass_on() -> None:
    frozen = of(model(encoders=(_with(VISION, frozen=True),)))
    assert {row.backward_flops for name, row in frozen.items() if name.startswith("vision.i")} == {
        (0.0, 0.0)
    }
    assert frozen["vision.2"].backward_flops == (0.0, 0.0)
    assert not frozen["vision.2"].keeps
    projector = frozen["vision.projector"]
    assert projector.backward_flops[0] == projector.forward_flops[0]


def test_a_frozen_decoder_behind_a_trained_encoder_still_passes_gradients_on() -> None:
    rows = of(model(decoder=_with(GPT, frozen=True)))
    matrices, attention = rows["decoder.2"].forward_flops
    assert rows["decoder.2"].backward_flops == (matrices, 2 * attention)
    nothing = of(
        model(
            decoder=_with(GPT, frozen=True),
            encoders=(
                _with(VISION, frozen=True, projector=Projector(widths=(2048, HIDDEN), frozen=True)),
            ),
        )
    )
    assert all(not row.keeps and row.backward_flops == (0.0, 0.0) for row in nothing.values())


def test_a_token_keeps_what_korthikanti_counts() -> None:
    """Korthikanti et al. 2022, table 2, for h = 1024, a = 16: s·b·h·(10 + 24/t + 5·a·s/(h·t)),
    (34 + 5·a·s/h)/t with sequence parallelism, 34/t with selective recomputation, and 2·s·b·h with
    full recomputation."""

    def kept(recompute: str, **shares: object) -> tuple[float, float]:
        profile = analytic_profile(
            model(), NODES, shares=LayerShares(stored_scores=True, **shares), dropout=True
        )
        at = profile.names.index("decoder.1")
        log_sum_exp = 4.0 * HEADS / shares.get("tensor_ranks", 1)
        flat = profile.kept_token_bytes[recompute][at]
        return flat - (log_sum_exp if recompute != "full" else 0), profile.kept_square_bytes[
            recompute
        ][at]

    assert kept("none") == (34 * HIDDEN, 5 * HEADS)
    assert kept("none", tensor_ranks=4, sequence_parallel=False) == (
        (10 + 24 / 4) * HIDDEN, 5 * HEADS / 4,
    )  # fmt: skip
    assert kept("none", tensor_ranks=4) == (34 / 4 * HIDDEN, 5 * HEADS / 4)
    assert kept("selective", tensor_ranks=4) == (34 / 4 * HIDDEN, 0)
    assert kept("full", sequence_parallel=False) == (2 * HIDDEN, 0)


def test_each_recomputation_keeps_less_and_adds_more_time() -> None:
    profile = analytic_profile(model(), NODES)
    work = LayerWork.of(vision=([4096.0], [4096.0**2]), decoder=([8192.0], [8192.0**2]))
    kept = [profile.kept_bytes(work, kind).sum() for kind in ("none", "selective", "full")]
    added = [profile.added_s(work, kind).sum() for kind in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2] > 0
    assert 0 == added[0] < added[1] < added[2]


def test_a_mix_of_lengths_takes_longer_than_as_many_tokens_of_the_mean_length() -> None:
    profile = analytic_profile(model(), NODES)
    mixed, mean = np.array([100, 100, 7992]), np.array([2730, 2731, 2731])
    work = LayerWork.of(
        vision=([0.0, 0.0], [0.0, 0.0]),
        decoder=(
            [float(mixed.sum()), float(mean.sum())],
            [float((mixed**2).sum()), float((mean**2).sum())],
        ),
    )
    forward, backward = profile.seconds(work)
    assert (forward[0, 6:10] > forward[1, 6:10]).all()
    assert (backward[0, 6:10] > backward[1, 6:10]).all()
    assert forward[:, :5].sum() == 0  # nothing to encode


def test_few_tokens_take_as_long_as_reading_the_weights() -> None:
    profile = analytic_profile(model(), NODES)
    work = LayerWork.of(vision=([1.0], [1.0]), decoder=([1.0], [1.0]))
    seconds = profile.seconds(work)[0][0, profile.names.index("decoder.0")]
    assert seconds == pytest.approx(GPT.layer_parameters(0) * 2 / (3e12 * 0.8), rel=1e-3)


def test_a_windowed_layer_grows_with_the_tokens_alone() -> None:
    windowed = _with(VISION, window_tokens=64, full_attention_layers=(2,))
    rows = of(model(encoders=(windowed,)))
    assert rows["vision.0"].square_flops == 0
    assert rows["vision.0"].window_flops == 4 * 512 * 64
    assert rows["vision.2"].square_flops == 4 * 512


def test_experts_hold_all_their_weights_and_work_with_a_few() -> None:
    experts = Experts(count=8, active=2, ffn_size=512, dense_layers=(0,))
    mixture = _with(GPT, experts=experts, gated=True, biases=())
    rows = of(model(decoder=mixture))
    attention = 2 * 4 * HIDDEN * HIDDEN
    one = 3 * HIDDEN * 512
    assert rows["decoder.1"].matrix_flops == attention + 2 * (2 * one + 8 * HIDDEN)
    assert rows["decoder.1"].expert_parameters == 8 * one
    assert rows["decoder.0"].expert_parameters == 0
    whole = analytic_profile(model(decoder=mixture), NODES)
    shared = analytic_profile(model(decoder=mixture), NODES, shares=LayerShares(expert_ranks=4))
    at = whole.names.index("decoder.1")
    assert whole.state_bytes[at] - shared.state_bytes[at] == 6 * 8 * one * 3 / 4
    # A quarter of the experts, over a quarter of the data-parallel ranks.
    assert shared.optimizer_bytes[at] == whole.optimizer_bytes[at]


def test_tensor_ranks_divide_the_work_and_add_what_they_exchange() -> None:
    one, eight, sixteen = (
        analytic_profile(model(), NODES, shares=LayerShares(tensor_ranks=ranks))
        for ranks in (1, 8, 16)
    )
    at = one.names.index("decoder.1")
    exchanged = 4 * 7 / 8 * HIDDEN * 2 / 4e11
    divided = one.forward.token_s[at] / 8
    assert eight.forward.token_s[at] == pytest.approx(divided + exchanged)
    assert sixteen.forward.token_s[at] > eight.forward.token_s[at]  # between nodes
    encoding = one.names.index("vision.1")
    assert sixteen.forward.square_s[encoding] == one.forward.square_s[encoding] / 8  # of 8 heads


def test_what_is_handed_on_between_encoders_carries_the_features_before_them() -> None:
    sound = _with(VISION, name="audio")
    profile = analytic_profile(model(encoders=(VISION, sound)), NODES)
    work = LayerWork.of(vision=([400.0], [0.0]), audio=([80.0], [0.0]), decoder=([1000.0], [0.0]))
    crossing = dict(zip(profile.names, profile.handed_on_bytes(work)[0], strict=True))
    assert crossing["vision.0"] == 400 * 512 * 2
    assert crossing["vision.projector"] == 100 * HIDDEN * 2
    assert crossing["audio.1"] == 80 * 512 * 2 + 100 * HIDDEN * 2
    assert crossing["audio.projector"] == 20 * HIDDEN * 2 + 100 * HIDDEN * 2
    assert crossing["decoder.1"] == 1000 * HIDDEN * 2


def test_layers_counted_as_papers_do_have_all_the_time() -> None:
    profile = analytic_profile(model(), NODES)
    work = LayerWork.of(vision=([400.0], [9e4]), decoder=([1000.0], [1e6]))
    forward, _ = profile.seconds(work)
    counted = joined(forward, profile.names)
    assert counted.shape == (1, 7)
    assert counted.sum() == pytest.approx(forward.sum())
    assert counted[0, 2] == forward[0, 3] + forward[0, 4]  # the projector is with the last layer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _with(GPT, heads=15), "15 heads do not divide"),
        (lambda: _with(GPT, kv_heads=5), "must divide the 16 heads"),
        (lambda: _with(GPT, layers=0), "decoder.layers is 0; it must be at least 1"),
        (lambda: _with(GPT, vocabulary=-1), "decoder.vocabulary is -1; it must be at least 0"),
        (lambda: Experts(count=4, active=5, ffn_size=8), "lower active"),
        (lambda: Projector(widths=(5,)), "give at least the width of its input"),
        (lambda: model(encoders=(VISION, VISION)), "two modules are called 'vision'"),
        (
            lambda: model(encoders=(_with(VISION, projector=None),)),
            "hands on vectors of 512 numbers, the decoder takes 1024",
        ),
        (lambda: _with(NODES.device, matrix_efficiency=1.5), "a part of the peak"),
        (lambda: _with(NODES, nodes=0), "cluster.nodes is 0; it must be above 0"),
        (lambda: Cluster(groups=()), "no groups of nodes"),
        (lambda: Precision(kept_bytes=float("nan")), "kept_bytes is nan; give a number"),
        (lambda: Precision(weight_bytes=-2.0), "weight_bytes is -2.0; give a number"),
        (
            lambda: analytic_profile(model(), NODES, shares={"sound": LayerShares()}),
            "shares for the module 'sound'; tiny has vision, decoder",
        ),
        (
            lambda: analytic_profile(
                model(decoder=_with(GPT, experts=Experts(count=8, active=2, ffn_size=8))),
                NODES,
                shares=LayerShares(expert_ranks=3),
            ),
            "expert_ranks is 3, which does not divide the 8 experts of decoder",
        ),
        (
            lambda: analytic_profile(model(), NODES).seconds(LayerWork.of(decoder=([1.0], [1.0]))),
            "no work for the module 'vision'",
        ),
    ],
)
def test_what_cannot_be_says_the_value_and_what_to_mend(make: object, said: str) -> None:
    with pytest.raises(PlanningError, match=said):
        make()  # type: ignore[operator]


def _with(noun: Noun, **changes: object) -> Noun:
    return replace(noun, **changes)
