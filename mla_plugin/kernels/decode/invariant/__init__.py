"""The decode kernels whose bits do not depend on what is beside a query: the keys in chunks at fixed places."""
