"""Data that need no download: captchas and chats that are drawn, examples and documentation of Python, handwritten digits."""
