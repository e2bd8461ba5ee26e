"""The pages of docs/reference/ that are written from the code: `python -m reference`.

It stands beside `sqshforge` and `training`, which know nothing of each other, as it reads both.
"""
