"""One thread per process (the models are tiny, and xdist runs several), a quiet transformers, poisoned memory."""

from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that `torch.empty` and its like hand out is NaN: what reads a slot nobody wrote shows at once, and not
    only where the memory happens to hold a NaN."""
    torch.use_deterministic_algorithms(True)  # which fills
    yield
    torch.use_deterministic_algorithms(False)
