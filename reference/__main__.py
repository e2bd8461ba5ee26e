"""Write the pages: `python -m reference`. Pages that are no longer generated are left alone."""

from __future__ import annotations

from reference.pages import FOLDER, PAGES

for name, text in PAGES.items():
    (FOLDER / name).write_text(text())
