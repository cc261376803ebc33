"""What is particular to a ready step as one rank gets it."""

import pytest
from dataservice_proto.columns import packed

from dataservice.engine.ready_step import packed_places


@pytest.mark.parametrize("workers", [0, 1, 128, 129, 40_000])
def test_places_of_few_and_of_many_workers_are_packed_as_columns_are(workers):
    places = list(range(workers))
    assert packed_places(places) == packed(places)
