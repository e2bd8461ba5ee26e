"""Write the pages of docs/reference/ that come from the code: `python -m reference`.

It is separate from `sqshforge` and `training`, which do not import each other, as it reads both.
"""
