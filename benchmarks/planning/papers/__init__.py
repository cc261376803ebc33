"""The papers' speed-ups, recomputed: `python -m benchmarks.planning --only papers`."""
