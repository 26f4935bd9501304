"""What the tests of studies share: texts that fit in a test, and a study run on them."""

import json

from stories import STORIES
from tapernorm.studies import runner


def text_file(folder, name="stories.jsonl", word="and"):
    """A file of short documents."""
    lines = [{"text": f"{story} {i % 7} {word} {i % 5}."} for i, story in enumerate(STORIES)]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(folder / name)


def study(name, out, **options):
    """(what the runner says, the rows) of a study."""
    from tapernorm.studies.rows import read_rows

    return runner.run_study(name, out=out, **options), read_rows(out / name)
