"""Training data: documents and images, tokenizers, collators."""
