"""Timings. Nothing here is asserted by a test; figures are ratios of things measured in one run."""
