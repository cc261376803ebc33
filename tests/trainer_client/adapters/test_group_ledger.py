"""Every replica works out alike which of Megatron's groups are kept."""

import random

from trainer_client.adapters.group_ledger import GroupLedger


def test_every_replica_works_out_the_same_groups_to_drop():
    draw = random.Random(1)
    ledgers = [GroupLedger(3) for _ in range(4)]
    admissions = set()
    for _ in range(60):
        order = draw.sample(range(12), 12)
        cuts = sorted(draw.sample(range(1, 12), 4))
        edges = zip([0, *cuts], [*cuts, 12], strict=True)
        groups = [tuple(sorted(order[a:b])) for a, b in edges]
        outcomes = [ledger.admit(iter(groups)) for ledger in ledgers]
        assert all(outcome == outcomes[0] for outcome in outcomes)
        admitted, dropped = outcomes[0]
        assert not admissions & set(admitted.values()), "a place in the store is used once"
        admissions |= set(admitted.values())
        assert not set(dropped) & set(groups)
        held = ledgers[0].groups()
        assert max(sum(replica in group for group in held) for replica in range(12)) <= 3


def test_a_group_that_is_planned_again_outlives_one_that_is_not():
    ledger = GroupLedger(2)
    ledger.admit([(0, 1)])
    ledger.admit([(0, 2)])
    ledger.admit([(0, 1)])
    _, dropped = ledger.admit([(0, 3)])
    assert dropped == [(0, 2)]


def test_groups_of_two_steps_are_kept_even_above_the_bound():
    ledger = GroupLedger(1)
    ledger.admit([(0, 1), (0, 2)])
    _, dropped = ledger.admit([(0, 3), (0, 4)])
    assert dropped == []
    _, dropped = ledger.admit([(0, 5)])
    assert dropped == [(0, 1), (0, 2)]
