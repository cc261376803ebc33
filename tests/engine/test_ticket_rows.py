"""What tickets give is the same, whether it is made for all replicas at once or one by one."""

from itertools import islice, product

import pytest
from dataservice_proto.columns import TICKET, read_all
from dataservice_proto.v1 import worker_pb2

from dataservice.core.cursor import Cursor
from dataservice.core.orders import EVERYTHING, WantedParts
from dataservice.core.topology import Topology
from dataservice.engine import ticket_rows
from dataservice.engine.planner import plan_step
from dataservice.engine.shards import StepParts, cut_step, packs_of
from dataservice.engine.ticket_rows import StepTickets, TicketRows
from tests.engine.support import Held, make_setup

KINDS = [
    EVERYTHING,
    *(WantedParts(tokens=t, media=m, labels=False) for t, m in product((True, False), repeat=2)),
]


@pytest.fixture(params=[1, 3, 256], ids="{} at once".format)
def at_once(request, monkeypatch):
    monkeypatch.setattr(ticket_rows, "MADE_AT_ONCE", request.param)


@pytest.fixture(params=[3, 200], ids="{} workers".format)
def step(request) -> tuple[StepParts, Held]:
    setup = make_setup(samples=300, batch=40)
    planned = plan_step(setup, Cursor(), Topology(world_size=7))
    assert planned is not None
    return cut_step(planned.plan), Held(planned.plan.packs, request.param)


def given(rows: TicketRows) -> list[tuple[str, str, str, int, int, list[tuple[int, ...]]]]:
    """Every piece: kind, worker, address, pack, member or items, and the items' places."""
    of = read_all(TICKET, rows.columns, {"sequences": rows.sequences, "parts": rows.parts})
    places = zip(of["place"].tolist(), strict=True)
    found = [
        ("sequence", rows.workers[w], rows.addresses[w], pack, member, [])
        for w, pack, member in zip(
            of["sequence_worker"].tolist(),
            of["sequence_pack"].tolist(),
            of["sequence_member"].tolist(),
            strict=True,
        )
    ]
    return found + [
        ("part", rows.workers[w], rows.addresses[w], pack, items, list(islice(places, items)))
        for w, pack, items in zip(
            of["part_worker"].tolist(),
            of["part_pack"].tolist(),
            of["part_items"].tolist(),
            strict=True,
        )
    ]


def test_each_ticket_names_who_holds_each_of_its_packs_in_the_order_of_the_packs(at_once, step):
    parts, held = step
    tickets = StepTickets(parts, held)
    for replica, wanted in product(range(7), KINDS):
        packs = packs_of(parts, replica, wanted)
        rows = tickets.of(replica, wanted, held.holder[packs])
        workers = [held.workers[number] for number in held.holder[packs].tolist()]
        assert [piece[3] for piece in given(rows)] == packs.tolist()
        assert [piece[1:3] for piece in given(rows)] == [(w.worker, w.address) for w in workers]
        assert list(rows.workers) == list(dict.fromkeys(w.worker for w in workers))
        assert (rows.parts > 0) == wanted.media
        message = worker_pb2.Ticket.FromString(rows.written)
        assert {name: getattr(message, name) for name in rows.columns} == rows.columns


def test_a_rank_is_sent_where_its_packs_are_now(step):
    parts, held = step
    tickets = StepTickets(parts, held)
    before = tickets.of(2, EVERYTHING, held.holder[packs_of(parts, 2)])
    held.holder = (held.holder + 1) % len(held.workers)
    packs = packs_of(parts, 2)
    rows = tickets.of(2, EVERYTHING, held.holder[packs])
    assert [piece[1] for piece in given(rows)] == [f"w{n}" for n in held.holder[packs].tolist()]
    assert [piece[3:] for piece in given(rows)] == [piece[3:] for piece in given(before)]


def test_packs_that_nobody_holds_yet_spoil_no_other_ranks_ticket(step):
    parts, held = step
    whole = held.holder.copy()
    held.holder[packs_of(parts, 0)] = -1
    tickets = StepTickets(parts, held)
    for replica in range(7):
        packs = packs_of(parts, replica)
        rows = tickets.of(replica, EVERYTHING, whole[packs])
        assert [piece[1] for piece in given(rows)] == [f"w{n}" for n in whole[packs].tolist()]
