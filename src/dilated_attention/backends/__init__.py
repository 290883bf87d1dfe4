"""Attention on one device. `choose` says what a backend is and which runs; `run` computes a call with it."""
