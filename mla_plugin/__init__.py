"""One MLA attention backend for every attention registry."""
