"""Settings of the conformance tests."""

import torch

# The cases are tiny: a second thread gains nothing, and on a busy machine the threads wait for one another.
torch.set_num_threads(1)
