"""What is told of storage that does not answer."""

import logging

import pytest

from dataservice.sources.filesystem import patiently


def test_storage_that_is_asked_again_is_told_without_what_its_error_quotes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = [ConnectionError("sent Authorization: Bearer hunter2")]

    def read() -> str:
        if errors:
            raise errors.pop()
        return "read"

    with caplog.at_level(logging.WARNING):
        assert patiently(read) == "read"
    assert "storage is asked again" in caplog.text
    assert "ConnectionError" in caplog.text
    assert "hunter2" not in caplog.text
