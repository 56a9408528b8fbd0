"""The wide decode kernel: more than 32 rows over e4m3, on Hopper."""
