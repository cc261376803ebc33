"""Kernels whose types are stated."""

import pickle

import numpy as np
import pytest

from dataservice.core.kernels import array, kernel, load_kernels, read_only
from dataservice.workers.decoder_process import DecoderProgram


def summing():
    @kernel((read_only(np.int64),), (array(np.float64),))
    def total(numbers):
        """Their sum."""
        found = numbers[0]
        for each in numbers[1:]:
            found += each
        return found

    return total


def is_loaded(made):
    return "compiled" in vars(made)


def test_one_is_compiled_when_it_is_first_called_and_takes_the_types_that_it_states():
    total = summing()
    assert not is_loaded(total)
    assert total.__doc__ == "Their sum."
    numbers = np.arange(5)
    numbers.setflags(write=False)
    assert total(numbers) == 10
    assert total(np.ones(3)) == 3.0
    assert is_loaded(total)
    with pytest.raises(TypeError, match="No matching definition"):
        total(np.ones(3, np.float32))


def test_all_are_loaded_by_a_service_as_it_starts():
    total = summing()
    load_kernels()
    assert is_loaded(total)


def test_decoders_are_forked_from_a_nursery_that_has_loaded_them():
    total = summing()
    pickle.loads(pickle.dumps(DecoderProgram(factory=None)))
    assert is_loaded(total)
