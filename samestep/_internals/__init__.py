"""Holds all that is private or replaced of torch, accelerate, transformers, datasets and libc, a module for each of them.

Elsewhere the engine uses what these libraries document. What is torchft's is in contrib/replication. tests/test_internals.py
fails where an upgrade changes what is here. Docstrings name the version that it was looked up in.
"""
