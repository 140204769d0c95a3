"""The documentation that ships with Python, of language and library, as documents, labelled paragraphs or pairs of texts."""

import ast
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.data import documents, labelled_texts, text_pairs
from samestep.data.arrow import hash_modules

MIN_BUILTIN = 200  # characters: a shorter piece of the built-in documentation hardly holds two sentences
MIN_PARAGRAPH = 80  # characters of a paragraph of Python's documentation; a shorter one says little
MIN_ANSWER = 60  # characters of a text that a pair's query should find
PARTS = (
    "reference",
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "tkinter",
    "turtle",
    "typing",
    "unittest",
    "xml",
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_DOCTEST = re.compile(r"(?m)^ *>>> .*(?:\n *\S.*)*")  # to the next blank line, as doctest reads it
_RULER = re.compile(r"(?m)^[ |]*[-=*~+^#][-=*~+^# |]{2,}$")  # underlined titles, borders of tables


def load_pages() -> Any:
    """Load the documents of `builtin/python_docs`."""
    return documents.cache_rows(_read_pages, documents.FEATURES, key=("pages", sys.version, hash_modules(__name__)))


def load_paragraphs() -> Any:
    """Load the labelled texts of `builtin/python_docs_parts`."""
    key = ("paragraphs", sys.version, hash_modules(__name__))
    return documents.cache_rows(_read_paragraphs, labelled_texts.FEATURES, key=key)


def load_pairs() -> Any:
    """Load the pairs of texts of `builtin/python_docs_pairs`."""
    return documents.cache_rows(_read_pairs, text_pairs.FEATURES, key=("pairs", sys.version, hash_modules(__name__)))


def python_pages() -> Iterator[tuple[str, str]]:
    """Read every topic of the language reference, then every module of the standard library, sorted by name.

    A module's page is the docstrings of the module and of its classes and functions in source order, read from the source:
    nothing is imported. Examples at the `>>>` prompt and ruled lines are cut out: they are not prose. A topic that another
    topic quotes whole is left out: held out, it would be known.

    Yields:
        `reference`, or the package or module that a file belongs to (`asyncio`), and the text.
    """
    from pydoc_data.topics import topics

    pages = [_prose(text) for _, text in sorted(topics.items())]
    yield from (("reference", p) for p in pages if not any(p in page and p != page for page in pages))
    for parts, source in _python_sources():
        yield parts[0], _prose("\n\n".join(_docstrings(source)))


def python_docstrings() -> Iterator[tuple[str, str]]:
    """Read the docstrings of the standard library that hold examples at the `>>>` prompt: name of the module, and the text."""
    for parts, source in _python_sources():
        if b">>>" in source:
            yield from ((".".join(parts), text) for text in _docstrings(source) if ">>>" in text)


def _python_sources() -> Iterator[tuple[tuple[str, ...], bytes]]:
    """Read the modules of the standard library, sorted by name: the parts of the name (`asyncio`, `queues`), and the source."""
    root = sysconfig.get_path("stdlib")
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED_FOLDERS
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files |= {path.relative_to(root).with_suffix("").parts: path for path in paths}
    yield from ((parts, files[parts].read_bytes()) for parts in sorted(files))


def _read_pages() -> Iterator[dict[str, str]]:
    """Make a document of each page of `python_pages` of `MIN_BUILTIN` characters or more."""
    yield from ({"text": page} for _, page in python_pages() if len(page) >= MIN_BUILTIN)


def _docstrings(source: bytes) -> list[str]:
    nodes = _statements(_parse(source))
    return [text for node in nodes if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))]


def _parse(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in someone else's source
        return ast.parse(source)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Visit the node and the statements inside it, in source order; `ast.walk` would visit every expression as well."""
    yield node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from _statements(child)


def _prose(text: str) -> str:
    text = _RULER.sub("", _DOCTEST.sub("", text.expandtabs()))
    return re.sub(r"\n\s*\n", "\n\n", text).strip()


def _read_paragraphs() -> Iterator[dict[str, str | None]]:
    """Make a row of each paragraph of `MIN_PARAGRAPH` characters or more, labelled by the one of `PARTS` it comes from.

    A paragraph that several parts have is left out.
    """
    sources: dict[str, set[str]] = {}
    for part, page in python_pages():
        for paragraph in page.split("\n\n"):
            sources.setdefault(" ".join(paragraph.split()), set()).add(part)
    for text, parts in sources.items():
        if len(parts) == 1 and parts <= set(PARTS) and len(text) >= MIN_PARAGRAPH:
            yield dict.fromkeys(labelled_texts.FEATURES) | {"text": text, "label": next(iter(parts))}


def _read_pairs() -> Iterator[dict[str, Any]]:
    """Make a pair of each docstring: its first sentence and the rest, or if that is short, what it describes and all of it.

    Texts that were met before, as a query or as what is found, make no other pair: they would be false negatives.
    """
    known: set[str] = set()
    for parts, source in _python_sources():
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, docstring in _list_docstrings(_parse(source), module):
            title, *rest = documents.split_sentences(_prose(docstring)) or [""]
            query, text = (
                (title, " ".join(rest)) if len(" ".join(rest)) >= MIN_ANSWER else (name, " ".join([title, *rest]))
            )
            if len(text) >= MIN_ANSWER and query.lower() != text.lower() and not known & {query, text}:
                known |= {query, text}
                yield {"query": query, "positive": text, "negatives": [], "source": parts[0]}


def _list_docstrings(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """List the docstrings of a module, class or function and of what is in it, each behind its full name and its arguments."""
    if text := (ast.get_docstring(node) or "").strip():
        arguments = getattr(node, "args", None)
        yield (name if arguments is None else f"{name}({ast.unparse(arguments)})"), text
    for child in node.body:
        if isinstance(child, DOCUMENTED[1:]):
            yield from _list_docstrings(child, f"{name}.{child.name}")
