"""Backends: the ops that the decoder is written in, and the KV storage that they read and write."""

import os

# torch's CPU threads (GNU OpenMP) spin while they wait for each other. Where anything else runs beside them, that made
# a decode step of SmolLM2 four to eight times slower; asleep they cost little. Takes effect if torch is not loaded yet;
# a value that is set already stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
