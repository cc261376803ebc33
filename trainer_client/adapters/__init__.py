"""Hooks for frameworks that own the training loop. Each needs its framework; the rest of the
client needs none of them, and imports nothing from here."""
