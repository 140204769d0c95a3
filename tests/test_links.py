"""Every link of a document leads to a file, and to a heading that is there."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from common import ROOT, load_docs_program
from printed import documents

FENCE = re.compile(r"^ *```.*\n(?:.*\n)*? *```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")


def slug(heading: str) -> str:
    """Make the anchor of a heading as GitHub does, and the site (mkdocs.yml: `toc`).

    >>> slug("What is measured: `--speed auto`")
    'what-is-measured---speed-auto'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(path: Path) -> set[str]:
    """List the anchors of a document."""
    return {
        slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M)
    }


def find_broken(path: Path, text: str) -> list[str]:
    """List the links of a document's text that lead nowhere; addresses of the web are not asked for."""
    broken = []
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        link = match[1] or match[2]
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if re.match(r"[a-z]+:", link) or (target.exists() and (not anchor or anchor in anchors(target))):
            continue
        broken.append(link)
    return broken


def test_every_link_leads_somewhere():
    broken = {str(path.relative_to(ROOT)): find_broken(path, path.read_text(encoding="utf-8")) for path in documents()}
    assert {name: links for name, links in broken.items() if links} == {}


def test_a_broken_link_is_found():
    text = "[a](nosuch.md) [b](audit.md#nosuch) [c](audit.md#batch_norm) [d](#nosuch) [e](https://x.y) `[f](nosuch.md)`"
    assert find_broken(ROOT / "docs" / "audit.md", text) == ["nosuch.md", "audit.md#nosuch", "#nosuch"]


def test_every_page_has_a_place_in_the_site():
    """Once; `make site` builds them."""
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize(
    ("address", "link", "expected"),
    [
        ("speed.md", "../benchmarks/results/bench.md", "source/benchmarks/results/bench.md"),
        ("exactness.md", "../tests/own_loops/after/streaming.py#x", "source/tests/own_loops/after/streaming.py.md#x"),
        ("claims.md", "../studies/claims", "source/studies/claims/index.md"),
        ("audit.md", "faq.md#does-batchnorm-work", "faq.md#does-batchnorm-work"),
        ("audit.md", "#batch_norm", "#batch_norm"),
        ("source/studies/claims/README.md", "../../docs/exactness.md", "../../../exactness.md"),
        ("source/studies/claims/claims.md", "pictures/bert.png", "pictures/bert.png"),
        ("index.md", "https://pytorch.org/a.md", "https://pytorch.org/a.md"),
    ],
)
def test_the_site_leads_links_of_the_repository_to_pages(address, link, expected):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=address))
    hook = load_docs_program("hook")
    assert hook.on_page_markdown(f"[a]({link})", page, None, None).partition("\n*[")[0] == f"[a]({expected})"
    picture = '<picture>\n  <source media="x" srcset="b.svg">\n  <img src="a.svg" width="1" alt="A b">\n</picture>'
    shown = hook.on_page_markdown(picture, page, None, None).partition("\n*[")
    assert shown[0] == "![A b](a.svg#only-light)\n![A b](b.svg#only-dark)"
    assert bool(shown[1]) != address.startswith("source/")  # the site explains words of pages, not of sources


def test_the_site_shows_commands_whole_and_asks_no_network():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="audit.md", dest_uri="source/a/b.html"))
    hook = load_docs_program("hook")
    blocks = "- a\n\n  ```\n  run --all\n  ```\n\n```text\n$ ask \\\n  --me\nyes\n```\n\n```python\n1\n```"
    shown = hook.on_page_markdown(blocks, page, None, None).partition("\n*[")[0]
    asked = "```sh\nask \\\n  --me\n```\n```text\nyes\n```"
    assert shown == f"- a\n\n  ```sh\n  run --all\n  ```\n\n{asked}\n\n```python\n1\n```"
    html = '<p>a --b</p><div class="language-sh highlight">run --all-of_it -q</div>'
    marked = hook.on_page_content(html, page, None, None)
    assert marked.endswith("run <span class=flag>--all-of_it</span> <span class=flag>-q</span></div>")
    assert marked.startswith("<p>a --b</p>")
    assert hook.on_post_page(f'<script src="{hook.SHIM}">', page, None) == '<script src="../../worker.js">'
