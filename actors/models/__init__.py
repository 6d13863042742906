"""Models as files: folders, adapters, images, tokenizers, checkpoints and their digests."""
