"""Each part of a request has its bound, maps included."""

import pytest
from dataservice_proto.v1 import coordinator_pb2

from dataservice.core.errors import SpecError
from dataservice.serving.limits import Limits, require_within


def test_a_map_is_bounded_by_its_entries_and_its_texts():
    """Found by mutated requests: a map was taken for a list of messages."""
    request = coordinator_pb2.CommitStepRequest(session="s", phase_s={"exchange": 0.5})
    require_within(request, Limits())
    with pytest.raises(SpecError, match=r"phase_s has 1 entries; this service takes at most 0"):
        require_within(request, Limits(entries=0))
    request.phase_s["x" * 600] = 1.0
    with pytest.raises(SpecError, match="phase_s has 600 bytes"):
        require_within(request, Limits())
