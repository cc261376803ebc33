"""How well packs are filled and how alike those of a wave are, on vlm-sft."""

from dataclasses import asdict

import numpy as np

from benchmarks import rivals, workloads
from benchmarks.harness import Peer, Row, Scale
from dataservice.planning import (
    Packing,
    assign_packs_to_waves,
    dist_ratio,
    isf_limits,
    pack_isf,
    pad_ratio,
)
from dataservice.planning.packs.padded import pack_length_grouped, pack_random


def packing(scale: Scale) -> list[Row]:
    """ISF and pack-to-wave on vlm-sft: padding, Dist ratios, packs over the certificate."""
    mix = workloads.vlm_sft(scale.packing_samples)
    text, vision = mix.llm_tokens, mix.encoder_tokens
    packed: dict[str, Packing] = {}
    capped: dict[str, Packing] = {}
    for method in ("search", "paper"):
        limits = isf_limits(text, vision, method=method)
        packed[method] = pack_isf(text, vision, **asdict(limits))
        limits = isf_limits(text, vision, method=method, cap_text=8192)
        capped[method] = pack_isf(text, vision, **asdict(limits))
    ours = packed["search"]
    random = pack_random(text, vision, samples_per_pack=5)
    grouped = pack_length_grouped(text, vision, samples_per_pack=5)
    waves = {
        "ISF, searched Q": _wave_ratios(ours, assign=True),
        "ISF, the paper's Q": _wave_ratios(packed["paper"], assign=True),
        "ISF, waves as they come": _wave_ratios(ours, assign=False),
        "batches of 5 at random": _wave_ratios(random, assign=False),
    }
    first, *others = waves
    what = f"vlm-sft, {scale.packing_samples:,} samples, 16 replicas × 8 waves"
    rows = [
        Row(
            group="packing",
            what=f"Dist ratio {phase}, {what}",
            figure=waves[first][axis],
            unit="",
            limit=limit,
            peers=tuple(Peer(name=name, figure=waves[name][axis]) for name in others),
            paper=f"OmniBal {paper}",
            explanation="Mean over waves: replicas meet after every microbatch.",
        )
        for axis, phase, limit, paper in ((0, "ViT", 0.02, "0.02"), (1, "LLM", 0.03, "0.14"))
    ]
    excess = {name: 100 * (plan.packs / plan.lower_bound - 1) for name, plan in packed.items()}
    first_fit = rivals.first_fit_decreasing(text, int(ours.text_tokens.max()))
    vision_of_bin = np.bincount(first_fit, weights=vision)
    return [
        Row(
            group="packing",
            what=f"Pad ratio, {what}",
            figure=pad_ratio(ours.text_tokens, np.arange(ours.packs)),
            unit="",
            peers=(
                Peer(name="batches of 5 at random", figure=pad_ratio(text, random.pack_of)),
                Peer(name="length-grouped", figure=pad_ratio(text, grouped.pack_of)),
            ),
            paper="OmniBal 0, its baseline 0.31",
            explanation="A pack is one sequence, so nothing is padded to another's length: no bar.",
        ),
        *rows,
        Row(
            group="packing",
            what=f"packs over those of the paper's Q, memory of 8,192 tokens, {what}",
            figure=capped["search"].packs / capped["paper"].packs,
            unit="×",
            limit=1.0,
            peers=(
                Peer(
                    name="tokens over memory, a bound",
                    figure=capped["search"].lower_bound / capped["paper"].packs,
                ),
            ),
            explanation="Dist ratios stay within the goals, or within those of the paper's Q.",
        ),
        Row(
            group="packing",
            what=f"packs over the certificate at searched Q, {what}",
            figure=excess["search"],
            unit="%",
            limit=1.0,
            peers=(
                Peer(name="ISF, the paper's Q", figure=excess["paper"]),
                Peer(
                    name="first-fit decreasing on text alone: largest ViT load over our limit",
                    figure=100 * (vision_of_bin.max() / ours.vision_tokens.max() - 1),
                ),
            ),
            explanation=(
                "⌈max(ΣT/Q_t, ΣV/Q_v)⌉ is the certificate. First-fit as axolotl's fills text and "
                "knows no second limit: its worst pack overloads the ViT by this share."
            ),
        ),
    ]


def _wave_ratios(plan: Packing, *, assign: bool) -> tuple[float, float]:
    """Mean Dist ratio (vision, text) over the waves of steps of 16 × 8 packs."""
    replicas, waves = 16, 8
    chosen = np.random.default_rng(1).permutation(plan.packs)
    steps = min(len(chosen) // (replicas * waves), 24)
    ratios = []
    for step in chosen[: steps * replicas * waves].reshape(steps, -1):
        tokens = np.stack((plan.vision_tokens[step], plan.text_tokens[step]), axis=1)
        order = np.arange(len(step))
        if assign:
            wave_of = assign_packs_to_waves(tokens / tokens.mean(axis=0), replicas=replicas)
            order = np.argsort(wave_of, kind="stable")
        in_waves = tokens[order].reshape(waves, replicas, 2)
        ratios.append([dist_ratio(in_waves[:, :, phase]) for phase in range(2)])
    vision, text = np.mean(ratios, axis=0)
    return float(vision), float(text)
