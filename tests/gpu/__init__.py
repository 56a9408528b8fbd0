"""The tests that need a CUDA device, as one command: ``python -m tests.gpu``."""
