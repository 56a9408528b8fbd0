"""The batch-invariant decode kernels: every sequence is split into chunks of keys at fixed positions."""
