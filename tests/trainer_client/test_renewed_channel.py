"""Stubs made once call along whichever channel is the newest."""

import pytest

from trainer_client import BadArgument
from trainer_client.renewed_channel import RenewedChannel


class Opened:
    """A channel whose answers are its number."""

    def __init__(self, number):
        self.number = number
        self.closed = False

    def unary_unary(self, method, **options):
        return lambda request, **how: (self.number, method, request)

    def close(self):
        self.closed = True


@pytest.fixture
def opened():
    return []


@pytest.fixture
def renewed(opened):
    def open_channel():
        if len(opened) == 2:
            raise BadArgument("cannot read the TLS file")
        opened.append(Opened(len(opened)))
        return opened[-1]

    return RenewedChannel(open_channel)


def test_a_call_goes_along_the_newest_channel_and_the_one_before_is_closed(renewed, opened):
    ask = renewed.channel.unary_unary("/Ask")
    assert ask("a") == (0, "/Ask", "a")
    renewed.renew()
    assert ask("b", timeout=1.0) == (1, "/Ask", "b")
    assert [channel.closed for channel in opened] == [True, False]


def test_where_none_can_be_opened_the_channel_before_stays(renewed, opened):
    renewed.renew()
    renewed.renew()
    assert renewed.channel.unary_unary("/Ask")("a") == (1, "/Ask", "a")
    assert not opened[1].closed


def test_what_was_closed_opens_no_other(renewed, opened):
    renewed.close()
    renewed.renew()
    assert [channel.closed for channel in opened] == [True]
