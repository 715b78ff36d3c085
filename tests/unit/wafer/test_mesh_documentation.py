"""The example of the page on mesh programs prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "wafer_programs.md"


def test_example_of_the_page_prints_what_it_says(capsys):
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(source, str(PAGE), "exec"), {})
    expected = source.rstrip().rsplit("\n# ", 1)[1]
    assert capsys.readouterr().out.strip() == expected


def test_functions_that_the_page_names_exist():
    import penstock.wafer.programs as programs

    names = re.findall(r"`(simulate_\w+)", PAGE.read_text())
    assert len(names) > 10
    for name in names:
        assert callable(getattr(programs, name))
