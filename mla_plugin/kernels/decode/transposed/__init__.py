"""The Hopper decode kernel of few rows over e4m3: products are transposed, and keys reach them through registers."""
