import pytest

from dataservice.core.address import is_loopback, join_address, split_address
from dataservice.core.errors import SpecError


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", "50051")),
        ("data-service:50051", ("data-service", "50051")),
        ("[::1]:50051", ("::1", "50051")),
        ("[2001:db8::7]:20100-20115", ("2001:db8::7", "20100-20115")),
        ("[fe80::1%eth0]:0", ("fe80::1%eth0", "0")),
        ("[::]:9090", ("::", "9090")),
        (":9090", ("", "9090")),
    ],
)
def test_an_address_is_split_and_joined_again(address, parts):
    assert split_address(address) == parts
    assert join_address(*parts) == address


def test_a_host_that_has_brackets_already_gets_no_others():
    assert join_address("[::1]", 1) == "[::1]:1"


@pytest.mark.parametrize("target", ["dns:///data-service:50051", "ipv4:10.0.0.5:50051"])
def test_a_target_with_a_scheme_is_left_to_grpc(target):
    assert split_address(target)[1] == "50051"


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("::1:50051", r"Write \[::1\]:50051"),
        ("2001:db8::7:0", r"Write \[2001:db8::7\]:0"),
        ("fe80::1%eth0:50051", r"Write \[fe80::1%eth0\]:50051"),
        ("::1", r"Write \[::1\]:50051"),
    ],
)
def test_ipv6_without_brackets_is_refused_with_what_to_write(address, meant):
    with pytest.raises(SpecError, match=meant):
        split_address(address)


@pytest.mark.parametrize("address", ["50051", "data-service", "[::1]", "[name]:50051"])
def test_what_is_no_host_and_port_is_refused(address):
    with pytest.raises(SpecError, match=r"is not host:port, such as|brackets"):
        split_address(address)


@pytest.mark.parametrize("scheme", ["http", "https", "grpc", "tcp"])
def test_a_url_is_no_address(scheme):
    with pytest.raises(SpecError, match=r"is a URL. Write host:port alone"):
        split_address(f"{scheme}://data-service:50051")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_stays_on_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.7", "", "localhost.evil.test"])
def test_other_hosts_do_not(host):
    assert not is_loopback(host)
