"""Backends: the ops that the decoder is written in, and the KV storage that they read and write."""
