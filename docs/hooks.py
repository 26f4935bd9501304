"""What mkdocs does not do by itself: the page of the command line, formulas as MathML, links that leave docs/.

Named in mkdocs.yml. The page is made from the commands themselves, so it cannot go out of date. Pages of studies are
read from the folders of their results.
"""

from __future__ import annotations

import html
import logging
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

log = logging.getLogger("mkdocs.hooks")

CLI_HEAD = """\
# Command line

Tables go to stdout, progress and errors to stderr. `--json` puts one JSON object on stdout instead of a table.
`--config run.yaml` sets any option of a command; what is given on the command line wins. Every command has `--help`.

| exit code | |
|---|---|
| 0 | done |
| 2 | the input is wrong, or there is no room, memory or permission |
| 3 | a numerical check failed |
| 130 | stopped with Ctrl-C |
"""


def on_files(files: Any, config: Any) -> Any:
    """Add cli.md, and the pages and figures that `tapernorm study` left in studies/."""
    from tapernorm import studies

    files.append(File.generated(config, "cli.md", content=cli_page()))
    for name in studies.names():
        folder = ROOT / "studies" / name
        for path in (*folder.glob("page.md"), *folder.glob("*.svg")):
            files.append(File.generated(config, f"studies/{name}/{path.name}", abs_src_path=str(path)))
        if not (folder / "page.md").is_file():
            text = f"{studies.load(name).page([])}\nNo runs were made yet.\n"
            files.append(File.generated(config, f"studies/{name}/page.md", content=text))
    return files


def cli_page() -> str:
    """A section for every command: its help, its arguments and its options."""
    import typer

    from tapernorm.cli import app

    group: Any = typer.main.get_command(app)
    return "\n".join([CLI_HEAD, *(_command(name, command) for name, command in group.commands.items())])


def _command(name: str, command: Any) -> str:
    lines = [f"## {name}\n"]
    for paragraph in (command.help or "").split("\n\n"):
        text = " ".join(paragraph.split())
        lines.append(f"    {text.removeprefix('Example: ')}\n" if text.startswith("Example: ") else f"{_cell(text)}\n")
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    usage = " ".join(["tapernorm", name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
    lines.append(f"```text\n{usage}\n```\n")
    lines += ['<div class="options" markdown>\n', "| | default | |", "|---|---|---|"]
    for parameter in shown:
        lines.append(f"| {_names(parameter)} | {_default(parameter)} | {_cell(parameter.help or '')} |")
    return "\n".join([*lines, "\n</div>\n"])


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in names)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or value == () or callable(value) or "UNSET" in repr(value).upper():
        return ""
    return "on" if value is True else f"`{value}`"


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*")


_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w./-]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file of the repository that is no page becomes the file's name."""

    def name(match: re.Match[str]) -> str:
        inside = (Path(page.file.abs_src_path or ROOT / "docs").parent / match[0].partition("](")[2][:-1]).resolve()
        if inside.is_relative_to(ROOT / "docs") or not inside.exists():
            return match[0]
        return match[1] if match[2] in match[1] else f"{match[1]} (`{match[2]}`)"

    return _OUTSIDE.sub(name, markdown)


_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.S)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """LaTeX becomes MathML, which browsers draw without a script."""

    def formula(match: re.Match[str], display: str) -> str:
        source = html.unescape(match[1]).strip()
        try:
            return convert(source, display=display)
        except Exception as error:  # the parser raises many kinds
            log.warning("%s: the formula %r cannot be read: %s", page.file.src_uri, source, error)
            return match[0]

    content = _BLOCK.sub(lambda m: f'<div class="formula">{formula(m, "block")}</div>', content)
    return _INLINE.sub(lambda m: formula(m, "inline"), content)
