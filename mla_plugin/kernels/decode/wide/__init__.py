"""The wide decode kernel of Hopper: over e4m3, for more (query, head) pairs than the transposed kernel takes."""
