"""The command line, run in the process of a test."""

import sys

import transformers

from tapernorm import cli


def run_command(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `tapernorm ARGUMENTS`."""
    transformers.utils.logging.disable_progress_bar()  # as main() does by the environment, before the first import
    monkeypatch.setattr(sys, "argv", ["tapernorm", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as error:
        code = int(error.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err
