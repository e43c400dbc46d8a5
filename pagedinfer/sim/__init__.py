"""Runners without a model: the same scheduler over made-up or recorded traffic."""
