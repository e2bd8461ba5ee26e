"""Write the pages: `python -m reference`. Those that the code no longer gives are left alone."""

from __future__ import annotations

from reference.pages import FOLDER, PAGES

for name, text in PAGES.items():
    (FOLDER / name).write_text(text())
