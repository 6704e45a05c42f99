"""Triton interpreted where there is no GPU, one thread per process (the models are tiny, and xdist runs several), a
quiet transformers, poisoned memory."""

import os
from collections.abc import Iterator

import pytest
import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # poisoned_memory asks for deterministic algorithms
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported, as transformers may do

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
