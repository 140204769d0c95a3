"""Data that need no download: chats that are drawn, examples and documentation of Python, handwritten digits."""
