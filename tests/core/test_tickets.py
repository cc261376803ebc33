from dataclasses import replace

import pytest

from dataservice.core.errors import TicketError
from dataservice.core.orders import PackKey, PartSpec, UnitRange
from dataservice.core.tickets import (
    check_ticket,
    holder_key,
    holder_of,
    parts_at,
    prove,
    sign_ticket,
    ticket_for,
)

SECRET = b"a secret of the service"
KEY = PackKey(job="job", step=3, plan_digest="d", pack=1)
OWN_KEY = holder_key(holder_of("session"), SECRET)
ABOUT = {"rank": 0, "holder": holder_of("session"), "expires_unix_s": 100}
SEQUENCE, ITEMS = PartSpec(key=KEY, cp_rank=0), PartSpec(key=KEY, items=(1, 2))
CUT = replace(ITEMS, ranges=(UnitRange(0, 1, 2), UnitRange(0, 2, 2)))


def signed(parts, secret=SECRET, **about):
    return sign_ticket(ticket_for({"w1": parts}, **{**ABOUT, **about}), secret)


SIGNED = signed([SEQUENCE, ITEMS])


def check(ticket, *, proof=None, worker="w1", now_unix_s=0.0):
    proof = prove(ticket, worker, OWN_KEY) if proof is None else proof
    check_ticket(ticket, proof, SECRET, worker=worker, now_unix_s=now_unix_s)


def test_a_signed_ticket_opens_its_worker_until_it_expires():
    check(SIGNED, now_unix_s=100.0)


@pytest.mark.parametrize(
    "forged",
    [
        replace(SIGNED, rank=1),
        replace(SIGNED, holder=holder_of("another")),
        replace(SIGNED, expires_unix_s=10_000),
        replace(SIGNED, columns=signed([replace(SEQUENCE, cp_rank=1), ITEMS]).columns),
        replace(SIGNED, columns=signed([SEQUENCE, CUT]).columns),
        replace(SIGNED, job="other"),
        replace(SIGNED, step=4),
        replace(SIGNED, plan_digest="e"),
        replace(SIGNED, tensors=("labels",)),
        replace(SIGNED, workers=("w1", "w2")),
        replace(SIGNED, parts=0),
        replace(SIGNED, signature=b""),
    ],
)
def test_a_ticket_that_was_changed_is_refused(forged):
    with pytest.raises(TicketError, match="signature") as refused:
        check(forged)
    assert refused.value.fault == "forged"


@pytest.mark.parametrize(
    "proof",
    [
        b"",
        prove(SIGNED, "w1", holder_key(holder_of("another"), SECRET)),
        prove(SIGNED, "w1", holder_key(holder_of("session"), b"another service")),
        prove(replace(SIGNED, signature=b"another ticket"), "w1", OWN_KEY),
        prove(SIGNED, "w2", OWN_KEY),
    ],
)
def test_a_ticket_opens_nothing_for_who_is_not_its_holder(proof):
    with pytest.raises(TicketError, match="given to another session") as refused:
        check(SIGNED, proof=proof)
    assert refused.value.fault == "holder"


def test_what_a_ticket_calls_a_session_does_not_tell_its_name_or_its_key():
    assert "session" not in SIGNED.holder
    assert OWN_KEY.hex() not in repr(SIGNED)
    assert holder_of("session") != holder_of("sessio")


def test_a_ticket_for_another_worker_or_too_late_is_refused():
    with pytest.raises(TicketError, match="for worker 'w1'") as refused:
        check(SIGNED, worker="w2")
    assert refused.value.fault == "worker"
    with pytest.raises(TicketError, match="expired 20 s ago") as refused:
        check(SIGNED, now_unix_s=120.0)
    assert refused.value.fault == "expired"


def test_each_worker_finds_its_own_parts_by_pack_the_sequence_first():
    later = replace(SEQUENCE, key=replace(KEY, pack=7))
    ticket = ticket_for({"w1": [later, CUT, SEQUENCE], "w2": [replace(ITEMS, items=(0,))]}, **ABOUT)
    assert parts_at(ticket, "w1") == [SEQUENCE, CUT, later]
    (only,) = parts_at(ticket, "w2")
    assert (only.items, only.ranges) == ((0,), (UnitRange(0, 1, 1),))
    assert parts_at(ticket, "w3") == []


def test_a_ticket_whose_columns_contradict_each_other_is_refused():
    with pytest.raises(
        TicketError, match="cannot be read: column sequence_worker has 1 bytes for 2"
    ):
        parts_at(replace(SIGNED, sequences=2), "w1")
