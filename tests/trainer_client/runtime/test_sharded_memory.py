"""What FSDP2's choices hold and send: the rows of docs/gpus.md, counted in bytes and calls."""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    whole,
    worst_difference,
)
from trainer_client.runtime import FsdpReduction, GroupPool, run_step

RANKS = 2
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
SUMS_IN_FULL = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(model, policy, reshard):
    """The model with every part sharded; in what they compute, and whether forward reshards."""
    for part in (*model.encoders.values(), *model.layers, model):
        fully_shard(part, mp_policy=policy, reshard_after_forward=reshard)
    return model


def parameters_of(model):
    """FSDP2's own account of each parameter; torch shows it to nobody else."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    groups = [group for part in parts for group in fully_shard.state(part)._fsdp_param_groups]
    return [parameter for group in groups for parameter in group.fsdp_params]


def weights_bytes(model):
    """Bytes of gathered weights."""
    outputs = [out for p in parameters_of(model) for out in p.all_gather_outputs]
    return sum(out.untyped_storage().nbytes() for out in outputs)


def gradients_bytes(model):
    """Bytes of gradients that are whole on this rank."""
    grads = [
        grad
        for parameter in parameters_of(model)
        for grad in (parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad)
    ]
    return sum(grad.nbytes for grad in grads if grad is not None)


class Weighed(FsdpReduction):
    """Notes what is held after each microbatch but the last."""

    def watch(self, model):
        self.model, self.weights, self.gradients = model, [], []
        return self

    @contextmanager
    def microbatch(self, *, last):
        with super().microbatch(last=last):
            yield
        if not last:
            self.weights.append(weights_bytes(self.model))
            self.gradients.append(gradients_bytes(self.model))


class CountingTypes(TorchDispatchMode):
    """Counts collectives of each kind, and notes the types that they send."""

    def __init__(self):
        super().__init__()
        self.counts, self.types = Counter(), {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            name = operation.overloadpacket.__name__
            self.counts[name] += 1
            sent = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.types.setdefault(name, set()).add(sent.dtype)
        return operation(*args, **(kwargs or {}))


CHOICES = {
    "default": (SUMS_IN_FULL, True, {}),
    "gradients in bf16": (HALF, True, {}),
    "every microbatch": (SUMS_IN_FULL, True, {"every_microbatch": True}),
    "not resharded": (SUMS_IN_FULL, False, {}),
    "weights kept": (SUMS_IN_FULL, False, {"keep_weights": True}),
}


def held_by_choice(rank, size):
    samples = random_samples(12)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 12), size, rank, 12)
    loss, grads = single_process(make_model(()), samples)
    found = {}
    with GroupPool(timeout_s=60) as pool:
        for name, (policy, reshard, options) in CHOICES.items():
            model = sharded(make_model(()).float(), policy, reshard)
            reduction = Weighed(model, pool.everyone, **options).watch(model)
            while_decoding = []
            model.head.register_forward_hook(
                lambda *_, model=model, into=while_decoding: into.append(weights_bytes(model))
            )
            with CountingTypes() as sent:
                result = run_step(model, shard, pool, gradients=reduction)
            found[name] = {
                "weights": set(reduction.weights),
                "weights in forward": set(while_decoding),
                "gradients": reduction.gradients[-1],
                "gathers": sent.counts["_allgather_base_"],
                "reductions": sent.counts["_reduce_scatter_base_"],
                "reduced in": sent.types["_reduce_scatter_base_"],
                "difference": worst_difference(result, whole(model), loss, grads)[1],
                "left": weights_bytes(model),
            }
    return found, len(shard.microbatches)


def exact(rank, size):
    """Two steps in fp64, with weights that are kept for each step and change between them."""
    samples = random_samples(12)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 12), size, rank, 12)
    alone, model = make_model(()), sharded(make_model(()), MixedPrecisionPolicy(), True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    found = []
    with GroupPool(timeout_s=60) as pool:
        reduction = FsdpReduction(model, pool.everyone, keep_weights=True)
        for _ in range(2):
            loss, grads = single_process(alone, samples)
            result = run_step(model, shard, pool, gradients=reduction)
            found.append(worst_difference(result, whole(model), loss, grads)[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return found


def elements(padded_to=1):
    """Numbers of parameters; gathered, each is padded along its first dimension."""
    shapes = [p.shape for p in make_model(()).parameters()]
    return sum(-(-s[0] // padded_to) * padded_to * (s.numel() // s[0]) for s in shapes)


PARTS = 5  # two encoders, two layers, the rest


def test_each_choice_of_fsdp_holds_and_sends_what_is_written(world):
    answers = world(held_by_choice, RANKS)
    gathered = 2 * elements(padded_to=RANKS)  # in bf16
    for found, microbatches in answers.values():
        assert microbatches > 2
        default = found["default"]
        assert default["gradients"] == 4 * elements(), "4·P: unsharded, in fp32"
        assert found["gradients in bf16"]["gradients"] == 2 * elements(), "2·P"
        assert found["every microbatch"]["gradients"] == 0
        assert found["every microbatch"]["reductions"] > default["reductions"] == PARTS
        for name in ("default", "not resharded"):
            assert found[name]["weights"] == {0}
        assert max(default["weights in forward"]) < gathered
        assert found["not resharded"]["weights in forward"] == {gathered}, "2·P"
        assert found["weights kept"]["weights"] == {gathered}
        assert found["weights kept"]["gathers"] == PARTS, "once a step"
        assert default["gathers"] > found["not resharded"]["gathers"] > 2 * PARTS
        for name, choice in found.items():
            in_half = name == "gradients in bf16"
            assert choice["reduced in"] == {torch.bfloat16 if in_half else torch.float32}
            assert choice["difference"] < 0.1
            assert choice["left"] == 0


def test_weights_that_are_kept_for_a_step_give_the_gradients_of_a_single_process(world):
    for found in world(exact, RANKS).values():
        assert max(found) <= 1e-10
