"""The right answers: slow, obvious, NumPy, float64. Imports nothing of kdtree_engine."""
