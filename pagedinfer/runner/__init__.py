"""Runners: a plan in, new tokens out. The torch runner is inputs, then the decoder, then the sampler."""
