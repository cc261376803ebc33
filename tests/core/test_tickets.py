from dataclasses import replace

import pytest

from dataservice.core.errors import TicketError
from dataservice.core.orders import PackKey, PartSpec, Ticket, UnitRange
from dataservice.core.tickets import check_ticket, holder_key, holder_of, prove, sign_ticket

SECRET = b"a secret of the service"
KEY = PackKey(job="job", step=3, plan_digest="d", pack=1)
OWN_KEY = holder_key(holder_of("session"), SECRET)
SIGNED = sign_ticket(
    Ticket(
        worker="w1",
        address="127.0.0.1:1",
        rank=0,
        holder=holder_of("session"),
        expires_unix_s=100,
        parts=(PartSpec(key=KEY, cp_rank=0), PartSpec(key=KEY, items=(1, 2))),
    ),
    SECRET,
)


def check(ticket, *, proof=None, worker="w1", now_unix_s=0.0):
    proof = prove(ticket, OWN_KEY) if proof is None else proof
    check_ticket(ticket, proof, SECRET, worker=worker, now_unix_s=now_unix_s)


def test_a_signed_ticket_opens_its_worker_until_it_expires():
    check(SIGNED, now_unix_s=100.0)


@pytest.mark.parametrize(
    "forged",
    [
        replace(SIGNED, rank=1),
        replace(SIGNED, holder=holder_of("another")),
        replace(SIGNED, expires_unix_s=10_000),
        replace(SIGNED, parts=(PartSpec(key=KEY, cp_rank=1),)),
        replace(SIGNED, parts=(PartSpec(key=replace(KEY, job="other"), cp_rank=0),)),
        replace(SIGNED, parts=(replace(SIGNED.parts[0], tensors=("labels",)), SIGNED.parts[1])),
        replace(
            SIGNED,
            parts=(SIGNED.parts[0], replace(SIGNED.parts[1], ranges=(UnitRange(0, 1, 2),) * 2)),
        ),
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
        prove(SIGNED, holder_key(holder_of("another"), SECRET)),
        prove(SIGNED, holder_key(holder_of("session"), b"another service")),
        prove(replace(SIGNED, signature=b"another ticket"), OWN_KEY),
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
