"""Models: what a checkpoint says about itself, its weights, its tokenizer, and the decoder that uses them."""
