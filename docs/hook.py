"""Brings what documents link to outside of docs/ into the site: a hook of mkdocs (mkdocs.yml).

Documents are read on GitHub, too, so that their links are paths of the repository: `../benchmarks/results/bench.md`. Here every
such file is a page, or a picture, of its own below source/, and links lead there.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
PICTURE = re.compile(r'<picture>.*?srcset="(.*?)".*?src="(.*?)".*?alt="(.*?)".*?</picture>', re.DOTALL)
ENTRY = re.compile(r"^\| ([a-z- ]{2,}) \| (.+) \|$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}
FENCE = re.compile(r"( *)(`{3,})([\w-]*)$")
COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.MULTILINE)
COMMAND_CODE = re.compile(r'<div class="language-sh.*?</div>', re.DOTALL)
FLAG = re.compile(r"([\s>])(--?[a-zA-Z][\w-]*)")
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme would load from the internet for the search of pages that are opened from a folder."""
EVERYDAY = {"word", "sample", "process", "cut", "exact", "window", "head", "audit", "recipe"}
"""Words of the glossary that are not explained at every place."""
PAGES, PICTURES = {".md", *LANGUAGES}, {".png", ".svg"}


def resolve(document: Path, link: str) -> Path:
    """Return the path in the repository that a link of a document means."""
    return Path(os.path.normpath(document.parent / link))


def find_address(path: Path) -> str:
    """Return where the site has a file of the repository, as mkdocs names sources."""
    if path.parts[0] == "docs":
        return "/".join(path.parts[1:])
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}" + ("" if path.suffix in {".md", *PICTURES} else ".md")


def read_page(path: Path) -> str:
    """Return a file of the repository as a page; a folder as a list of its files."""
    if (ROOT / path).is_dir():
        files = sorted(name for name in os.listdir(ROOT / path) if not name.startswith(("_", ".")))
        return f"# {path}\n\n" + "".join(f"- {name}\n" for name in files)
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def list_words() -> dict[str, str]:
    """Read the words of docs/glossary.md that mean one thing wherever they stand, with their meanings.

    >>> list_words()["tail"]
    'the last step of an epoch, when fewer samples are left than a global batch has'
    """
    words = dict(ENTRY.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")))
    return {word: meaning for word, meaning in words.items() if word not in EVERYDAY}


def part_shell(text: str) -> list[tuple[str, str]]:
    """Part what a terminal showed into its commands, which can be copied, and what they printed: language and text.

    >>> part_shell("$ a \\\\\\n    b\\nc\\n")
    [('sh', 'a \\\\\\n    b\\n'), ('text', 'c\\n')]
    """
    parts, start = [], 0
    for command in COMMAND.finditer(text):
        parts += [("text", text[start : command.start()]), ("sh", command[0].removeprefix("$ "))]
        start = command.end()
    return [(language, part) for language, part in [*parts, ("text", text[start:])] if part.strip()]


def mark_commands(markdown: str) -> str:
    """Call blocks of code without a language sh, and part what a terminal showed: see docs/site.css.

    >>> mark_commands("```\\na\\n```\\nb\\n```python\\nc\\n```")
    '```sh\\na\\n```\\nb\\n```python\\nc\\n```'
    """
    lines, block, opened = [], [], None
    for line in markdown.split("\n"):
        fence = FENCE.match(line)
        if opened is None:
            opened = fence
            block = []
            lines += [] if fence else [line]
        elif fence and fence[2] == opened[2] and not fence[3]:
            indent, language = opened[1], opened[3]
            text = "".join(f"{inner.removeprefix(indent)}\n" for inner in block)
            parts = part_shell(text) if language == "text" and text.startswith("$ ") else [(language or "sh", text)]
            for language, part in parts:
                inner = [indent + line if line else line for line in part.split("\n")[:-1]]
                lines += [f"{indent}{opened[2]}{language}", *inner, line]
            opened = None
        else:
            block.append(line)
    return "\n".join(lines)


def find_linked(document: Path, text: str) -> set[Path]:
    """List the files outside of docs/ that a document links to."""
    paths = {resolve(document, match[1]) for match in LINK.finditer(text)}
    return {path for path in paths if path.parts[0] != "docs" and (ROOT / path).exists()}


def on_files(files, config):
    """Add the files that documents link to, and those that these link to in turn."""
    from mkdocs.structure.files import File  # here: the tests of this file have no mkdocs

    todo = [Path("docs") / file.src_uri for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        document = todo.pop()
        text = (ROOT / document).read_text(encoding="utf-8") if document.suffix == ".md" else ""
        for path in find_linked(document, text) - seen:
            seen.add(path)
            if path.suffix in PICTURES:
                content = (ROOT / path).read_bytes()
            else:
                content, todo = read_page(path), [*todo, path]
            files.append(File.generated(config, find_address(path), content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links of the repository into links of the site."""
    address = Path(page.file.src_uri)
    is_source = address.parts[0] == "source"
    document = Path(*address.parts[1:]) if is_source else Path("docs") / address
    if is_source and document.suffixes[-2:-1] and document.suffixes[-2] in LANGUAGES:
        return markdown

    def rewrite(match: re.Match) -> str:
        target = find_address(resolve(document, match[1]))
        return os.path.relpath(target, address.parent) + (match[2] or "")

    # GitHub chooses a picture by the system's colours, the site by its own switch
    markdown = PICTURE.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", markdown)
    markdown = LINK.sub(rewrite, markdown.replace("<details>", '<details markdown="1">'))
    markdown = mark_commands(markdown)
    # The site shows the meaning of a word to somebody who points at it (mkdocs.yml: abbr, content.tooltips)
    if is_source or address.name == "glossary.md":
        return markdown
    return markdown + "".join(f"\n*[{word}]: {meaning.replace('`', '')}" for word, meaning in list_words().items())


def on_page_content(html, page, config, files):
    """Mark the flags of commands, so that no line ends within one (docs/site.css)."""
    return COMMAND_CODE.sub(lambda block: FLAG.sub(r"\1<span class=flag>\2</span>", block[0]), html)


def on_post_page(output, page, config):
    """Give a page the site's own docs/worker.js in place of one from the internet."""
    return output.replace(SHIM, os.path.relpath("worker.js", Path(page.file.dest_uri).parent))
