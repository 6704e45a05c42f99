"""One thread per process (the models are tiny, and xdist runs several), and a quiet transformers."""

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
