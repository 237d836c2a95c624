"""The gates: each phase a pytest suite, and the tools that only the gates need."""

import os

# The oracle's matrices are small: threads inside a product cost more than they bring, and spin while others compute.
# Has an effect only before NumPy's first import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
