from dataclasses import replace

import pytest

from dataservice.core.errors import TicketError
from dataservice.core.orders import PackKey, PartSpec, Ticket
from dataservice.core.tickets import check_ticket, sign_ticket

SECRET = b"a secret of the service"
KEY = PackKey(job="job", step=3, plan_digest="d", pack=1)
SIGNED = sign_ticket(
    Ticket(
        worker="w1",
        address="127.0.0.1:1",
        rank=0,
        expires_unix_s=100,
        parts=(PartSpec(key=KEY, cp_rank=0), PartSpec(key=KEY, items=(1, 2))),
    ),
    SECRET,
)


def test_a_signed_ticket_opens_its_worker_until_it_expires():
    check_ticket(SIGNED, SECRET, worker="w1", now_unix_s=100.0)


@pytest.mark.parametrize(
    "forged",
    [
        replace(SIGNED, rank=1),
        replace(SIGNED, expires_unix_s=10_000),
        replace(SIGNED, parts=(PartSpec(key=KEY, cp_rank=1),)),
        replace(SIGNED, parts=(PartSpec(key=replace(KEY, job="other"), cp_rank=0),)),
        replace(SIGNED, parts=(replace(SIGNED.parts[0], tensors=("labels",)), SIGNED.parts[1])),
        replace(SIGNED, signature=b""),
    ],
)
def test_a_ticket_that_was_changed_is_refused(forged):
    with pytest.raises(TicketError, match="signature"):
        check_ticket(forged, SECRET, worker="w1", now_unix_s=0.0)


def test_a_ticket_for_another_worker_or_too_late_is_refused():
    with pytest.raises(TicketError, match="for worker 'w1'"):
        check_ticket(SIGNED, SECRET, worker="w2", now_unix_s=0.0)
    with pytest.raises(TicketError, match="expired 20 s ago"):
        check_ticket(SIGNED, SECRET, worker="w1", now_unix_s=120.0)
