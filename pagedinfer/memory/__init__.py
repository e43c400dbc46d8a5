"""Paged KV memory: which physical block holds which tokens of which request. Ids only, no tensors."""
